// An accelerator for tests: torch's PrivateUse1 backend, with host memory and several devices.
//
// Several, because the autograd engine has one thread a device: ranks that are threads and share a
// device would wait for each other in its hooks forever.
//
// Its kernels are the CPU's, reached by torch's CPU fallback, but a host tensor that CUDA would
// refuse is refused here, too. Streams and events exist and do nothing: work is done at once. New
// memory holds 0xff (NaN as floating point), so that what is read before it is written shows.

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace {

constexpr auto kAccel = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kNumDevices = 8;
constexpr size_t kAlignment = 512;

thread_local c10::DeviceIndex current_index = 0;

c10::DeviceIndex index_of(c10::Device device) {
  TORCH_CHECK(device.type() == kAccel && device.index() < kNumDevices, "there is no ", device);
  return device.has_index() ? device.index() : current_index;
}

struct Block {
  size_t nbytes;
  c10::DeviceIndex place;
};

// The blocks of one kind of memory that are in use, in one of several places.
class Blocks {
 public:
  void* take(size_t nbytes, c10::DeviceIndex place) {
    void* start = nullptr;
    size_t whole = (std::max<size_t>(nbytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    TORCH_CHECK(posix_memalign(&start, kAlignment, whole) == 0, "no memory for ", nbytes, " bytes");
    std::memset(start, 0xff, whole);
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[reinterpret_cast<uintptr_t>(start)] = {nbytes, place};
    live_[place] += static_cast<int64_t>(nbytes);
    peak_[place] = std::max(peak_[place], live_[place]);
    return start;
  }

  void give(void* start) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = blocks_.find(reinterpret_cast<uintptr_t>(start));
      live_[found->second.place] -= static_cast<int64_t>(found->second.nbytes);
      blocks_.erase(found);
    }
    std::free(start);
  }

  bool hold(const void* pointer, size_t nbytes, c10::DeviceIndex place) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto address = reinterpret_cast<uintptr_t>(pointer);
    auto after = blocks_.upper_bound(address);
    if (after == blocks_.begin()) return false;
    auto [start, block] = *std::prev(after);
    return block.place == place && address + nbytes <= start + block.nbytes;
  }

  int64_t live(c10::DeviceIndex place) {
    std::lock_guard<std::mutex> lock(mutex_);
    return live_.at(place);
  }

  int64_t peak(c10::DeviceIndex place) {
    std::lock_guard<std::mutex> lock(mutex_);
    return peak_.at(place);
  }

  void reset_peak(c10::DeviceIndex place) {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_.at(place) = live_.at(place);
  }

 private:
  std::mutex mutex_;
  std::map<uintptr_t, Block> blocks_;
  std::array<int64_t, kNumDevices> live_{};
  std::array<int64_t, kNumDevices> peak_{};
};

// Never destroyed: tensors may be freed while the process ends.
Blocks& device_blocks() {
  static auto* blocks = new Blocks;
  return *blocks;
}

Blocks& pinned_blocks() {
  static auto* blocks = new Blocks;
  return *blocks;
}

template <Blocks& (*blocks)()>
void give(void* start) {
  if (start != nullptr) blocks().give(start);
}

c10::DataPtr allocate_on(c10::DeviceIndex index, size_t nbytes) {
  void* start = nbytes == 0 ? nullptr : device_blocks().take(nbytes, index);
  return {start, start, &give<device_blocks>, c10::Device(kAccel, index)};
}

// On the current device, as torch expects it.
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override { return allocate_on(current_index, nbytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &give<device_blocks>; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* start = nbytes == 0 ? nullptr : pinned_blocks().take(nbytes, 0);
    return {start, start, &give<pinned_blocks>, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give<pinned_blocks>; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};

DeviceAllocator* device_allocator() {
  static auto* made = new DeviceAllocator;
  return made;
}

PinnedAllocator* pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return made;
}

// One stream a device, that never has anything to do.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream only(c10::Device device) {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kAccel, index_of(device)));
  }

  c10::DeviceType type() const override { return kAccel; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kAccel, std::exchange(current_index, index_of(device)));
  }
  c10::Device getDevice() const override { return c10::Device(kAccel, current_index); }
  void setDevice(c10::Device device) const override { current_index = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_index = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  c10::Stream getStream(c10::Device device) const override { return only(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return only(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return only(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return only(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return only(stream.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    *event = const_cast<Guard*>(this);  // torch asks only whether there is one
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchangeDevice(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_index, index_of(c10::Device(kAccel, index)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return pinned_blocks().hold(data, 1, 0); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    for (c10::DeviceIndex index = 0; index < kNumDevices; ++index) {
      if (device_blocks().hold(data, 1, index)) return c10::Device(kAccel, index);
    }
    TORCH_CHECK(false, data, " is not memory of a device");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* kept = storage.unsafeGetStorageImpl();
    auto made = allocate_on(index_of(kept->device()), nbytes);
    const size_t common = std::min(nbytes, kept->nbytes());
    if (common > 0) std::memcpy(made.get(), kept->data(), common);
    kept->set_data_ptr_noswap(std::move(made));
    kept->set_nbytes(nbytes);
  }
  // Numbers are drawn by the CPU's generator: the same ones as on the CPU.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::DeviceType::CPU);
  }
};

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "only strided tensors");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(c10::Device(kAccel)));
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "only strided tensors");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(c10::Device(kAccel)));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

const at::Tensor& resize(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

// A tensor of the same memory that the CPU's kernels take; valid as long as the tensor is.
at::Tensor on_host(const at::Tensor& x) {
  if (x.is_cpu()) return x;
  auto made = at::from_blob(
      const_cast<void*>(x.const_data_ptr()), x.sizes(), x.strides(),
      at::TensorOptions().dtype(x.scalar_type()));
  made._set_conj(x.is_conj());
  made._set_neg(x.is_neg());
  return made;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(self));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  at::native::resize_output(target, self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) { return on_host(self).item(); }

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {numel}, {});
}

at::Tensor& set_storage_offset(
    at::Tensor& self,
    at::Storage source,
    int64_t offset,
    at::IntArrayRef size,
    at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}

void record_stream(at::Tensor&, c10::Stream) {}

// torch would choose a fused kernel that the CPU or CUDA has; 0 is the one of plain operations.
int64_t no_fused_attention(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return 0;
}

// torch hands convolutions of this backend to these two.
at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  std::optional<at::Tensor> bias_on_host;
  if (bias.has_value() && bias->defined()) bias_on_host = on_host(*bias);
  return at::convolution(
             on_host(input), on_host(weight), bias_on_host, stride, padding, dilation, transposed,
             output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> wanted) {
  const int64_t numel_bias = weight.size(transposed ? 1 : 0) * (transposed ? groups : 1);
  auto found = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), at::IntArrayRef{numel_bias}, stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  auto moved = [&](const at::Tensor& x) { return x.defined() ? x.to(input.device()) : x; };
  return {moved(std::get<0>(found)), moved(std::get<1>(found)), moved(std::get<2>(found))};
}

// A tensor may be moved in place (`x.data = moved`, `model.to`) between the CPU and CUDA; torch does
// not allow it for this backend by itself.
bool may_become(const at::Tensor& self, const at::Tensor& from) {
  auto dense = [](const at::Tensor& x) {
    return x.layout() == at::kStrided && (x.is_cpu() || x.device().type() == kAccel);
  };
  return dense(self) && dense(from);
}

// Refuse what CUDA refuses: an operation on tensors of a device and of another, or of the host.
struct Places {
  const std::string& name;
  std::optional<c10::Device> device;
  std::optional<c10::Device> other;

  void see(const at::Tensor& x) {
    if (!x.defined() || (x.is_cpu() && x.dim() == 0)) return;
    if (!device.has_value()) device = x.device();
    if (x.device() != *device) other = x.device();
    TORCH_CHECK(
        !other.has_value(),
        "Expected all tensors to be on the same device, but found at least two devices, ", *device,
        " and ", *other, "! (operator ", name, ")");
  }

  void see(const c10::IValue& value) {
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& x : value.toTensorVector()) see(x);
    } else if (value.isList()) {
      for (const c10::IValue& x : value.toListRef()) see(x);
    }
  }
};

bool takes_host_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
      name == "aten::_index_put_impl_" || name == "aten::_unsafe_index" ||
      name == "aten::_unsafe_index_put";
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const bool indexing = takes_host_indices(schema.name());
  Places places{schema.name(), {}, {}};
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!(indexing && arguments[i].name() == "indices")) places.see((*stack)[first + i]);
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// Here torch would put plain operations together, with other bits than the CPU's own kernels.
constexpr const char* OWN[] = {
    "native_layer_norm", "native_group_norm", "addr", "silu_backward", "mish_backward"};

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_has_compatible_shallow_copy_type", &may_become);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &no_fused_attention);
  for (const char* name : OWN) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(kAccel, device_allocator());

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

extern "C" {
int accel_num_devices() { return kNumDevices; }
int accel_current() { return current_index; }
int accel_exchange(int index) {
  return index < 0 || index >= kNumDevices
      ? -1
      : std::exchange(current_index, static_cast<c10::DeviceIndex>(index));
}
int64_t accel_live_nbytes(int index) {
  return device_blocks().live(static_cast<c10::DeviceIndex>(index));
}
int64_t accel_peak_nbytes(int index) {
  return device_blocks().peak(static_cast<c10::DeviceIndex>(index));
}
void accel_reset_peak(int index) {
  device_blocks().reset_peak(static_cast<c10::DeviceIndex>(index));
}
bool accel_holds(uintptr_t pointer, size_t nbytes, int index) {
  return device_blocks().hold(
      reinterpret_cast<void*>(pointer), nbytes, static_cast<c10::DeviceIndex>(index));
}
bool accel_pinned(uintptr_t pointer, size_t nbytes) {
  return pinned_blocks().hold(reinterpret_cast<void*>(pointer), nbytes, 0);
}
}
