// The Python module zcomm._native: the four kernels on uint8 arrays, programs of them, the choice of
// loops, counters in shared memory, and the memory of other processes.
//
// Every kernel returns a Status as an int and runs without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "counters.h"
#include "message.h"
#include "program.h"
#include "remote.h"

namespace nb = nanobind;
using namespace nb::literals;

#define ZC_DECLARE(name)                \
    namespace name {                    \
    extern const zcomm::Table table;    \
    }
ZC_DECLARE(zc_baseline)
#if defined(ZC_X86)
ZC_DECLARE(zc_avx2)
ZC_DECLARE(zc_avx512)
#endif

namespace {

using zcomm::Codec;
using zcomm::Dtype;
using zcomm::Format;
using zcomm::i64;
using zcomm::Segments;

using Readable = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Writable = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Counters = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct InstructionSet {
    const char* name;
    const zcomm::Table* table;
    bool (*available)();
};

#if defined(ZC_X86)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}
#endif

// Widest first.
const InstructionSet INSTRUCTION_SETS[] = {
#if defined(ZC_X86)
    {"avx512", &zc_avx512::table,
     [] {
         return has_avx2() && __builtin_cpu_supports("avx512f") &&
                __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vl");
     }},
    {"avx2", &zc_avx2::table, has_avx2},
#endif
    {"baseline", &zc_baseline::table, [] { return true; }},
};

const InstructionSet& widest() {
    for (const InstructionSet& set : INSTRUCTION_SETS)
        if (set.available()) return set;
    __builtin_unreachable();
}

std::atomic<const InstructionSet*> active{&widest()};

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const InstructionSet& set : INSTRUCTION_SETS)
        if (set.available()) names.push_back(set.name);
    return names;
}

bool use(const std::string& name) {
    for (const InstructionSet& set : INSTRUCTION_SETS)
        if ((name.empty() || name == set.name) && set.available()) {
            active = &set;
            return true;
        }
    return false;
}

const zcomm::Table& table() { return *active.load()->table; }

zcomm::Input input(const Readable& array) { return {array.data(), i64(array.size())}; }

zcomm::Output output(const Writable& array) { return {array.data(), i64(array.size())}; }

std::vector<zcomm::Input> inputs(const std::vector<Readable>& arrays) {
    std::vector<zcomm::Input> result;
    for (const Readable& array : arrays) result.push_back(input(array));
    return result;
}

static_assert(sizeof(i64) == sizeof(int64_t));

const i64* numbers(const Numbers& array) { return reinterpret_cast<const i64*>(array.data()); }

bool segments_of(const Numbers& starts, const Numbers& lengths, Segments& result) {
    result = {numbers(starts), numbers(lengths), i64(lengths.size())};
    return starts.size() == lengths.size();
}

// As Python passes it: format, block, stochastic, transformed.
using Description = std::tuple<int, i64, bool, bool>;

Codec codec_of(const Description& d) {
    return {Format(std::get<0>(d)), std::get<1>(d), std::get<2>(d), std::get<3>(d)};
}

int encode(const Description& codec, const Readable& x, int dtype, const Numbers& starts,
           const Numbers& lengths, const Writable& out, uint64_t seed) {
    Segments segments;
    if (!segments_of(starts, lengths, segments)) return zcomm::DOES_NOT_FIT;
    nb::gil_scoped_release release;
    return zcomm::encode(table(), codec_of(codec), input(x), Dtype(dtype), segments, output(out),
                         seed);
}

int decode(const Description& codec, const Readable& wire, const Numbers& starts,
           const Numbers& lengths, const Writable& out, int dtype) {
    Segments segments;
    if (!segments_of(starts, lengths, segments)) return zcomm::DOES_NOT_FIT;
    nb::gil_scoped_release release;
    return zcomm::decode(table(), codec_of(codec), input(wire), segments, output(out),
                         Dtype(dtype));
}

int decode_reduce(const Description& codec, const std::vector<Readable>& wires,
                  const Numbers& starts, const Numbers& lengths, const Writable& out, int dtype,
                  i64 divisor) {
    Segments segments;
    if (!segments_of(starts, lengths, segments)) return zcomm::DOES_NOT_FIT;
    nb::gil_scoped_release release;
    return zcomm::decode_reduce(table(), codec_of(codec), inputs(wires), segments, output(out),
                                Dtype(dtype), divisor);
}

// A decode_reduce of the same memory again and again: for sums that take less time than its
// arguments do. It keeps the arrays, and the GIL.
class Reduction {
public:
    Reduction(const Description& codec, const std::vector<Readable>& wires, const Numbers& starts,
              const Numbers& lengths, const Writable& out, int dtype, i64 divisor)
        : codec_(codec_of(codec)), wires_(wires), starts_(starts), lengths_(lengths), out_(out),
          inputs_(inputs(wires)), dtype_(Dtype(dtype)), divisor_(divisor) {}

    int operator()() const {
        Segments segments;
        if (!segments_of(starts_, lengths_, segments)) return zcomm::DOES_NOT_FIT;
        return zcomm::decode_reduce(table(), codec_, inputs_, segments, output(out_), dtype_,
                                    divisor_);
    }

private:
    Codec codec_;
    std::vector<Readable> wires_;
    Numbers starts_, lengths_;
    Writable out_;
    std::vector<zcomm::Input> inputs_;
    Dtype dtype_;
    i64 divisor_;
};

int decode_reduce_encode(const Description& codec_in, const std::vector<Readable>& wires,
                         const Description& codec_out, const Numbers& lengths,
                         const Writable& out, uint64_t seed) {
    Segments segments{nullptr, numbers(lengths), i64(lengths.size())};
    nb::gil_scoped_release release;
    return zcomm::decode_reduce_encode(table(), codec_of(codec_in), inputs(wires),
                                       codec_of(codec_out), segments, output(out), seed);
}

using Numbered = nb::ndarray<const int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Where = std::tuple<i64, i64, i64>;  // a region: memory, start, stop

// Jobs of kernels, run again and again on memories that are given as rows (address, bytes).
class Program {
public:
    void copy(const Where& source, const Where& target) {
        add(zcomm::Job::COPY, {}, {}, 0, {source}, target, {}, {}, 1);
    }

    void encode(const Description& codec, const Where& x, int dtype, const std::vector<i64>& starts,
                const std::vector<i64>& lengths, const Where& out) {
        add(zcomm::Job::ENCODE, codec, {}, dtype, {x}, out, starts, lengths, 1);
    }

    void decode(const Description& codec, const Where& wire, const std::vector<i64>& starts,
                const std::vector<i64>& lengths, const Where& out, int dtype) {
        add(zcomm::Job::DECODE, codec, {}, dtype, {wire}, out, starts, lengths, 1);
    }

    void decode_reduce(const Description& codec, const std::vector<Where>& wires,
                       const std::vector<i64>& starts, const std::vector<i64>& lengths,
                       const Where& out, int dtype, i64 divisor) {
        add(zcomm::Job::DECODE_REDUCE, codec, {}, dtype, wires, out, starts, lengths, divisor);
    }

    void decode_reduce_encode(const Description& codec_in, const std::vector<Where>& wires,
                              const Description& codec_out, const std::vector<i64>& lengths,
                              const Where& out) {
        std::vector<i64> starts(lengths.size(), 0);
        add(zcomm::Job::DECODE_REDUCE_ENCODE, codec_in, codec_out, 0, wires, out, starts, lengths,
            1);
    }

    int run(const Numbered& rows, const std::vector<uint64_t>& seeds) const {
        std::vector<zcomm::Memory> memories(rows.shape(0));
        for (size_t i = 0; i < memories.size(); ++i)
            memories[i] = {reinterpret_cast<zcomm::u8*>(rows(i, 0)), i64(rows(i, 1))};
        std::vector<zcomm::u64> own(seeds.begin(), seeds.end());
        nb::gil_scoped_release release;
        return zcomm::run(table(), jobs_, memories, own);
    }

private:
    void add(zcomm::Job::Kind kind, const Description& codec, const Description& codec_out,
             int dtype, const std::vector<Where>& inputs, const Where& output,
             const std::vector<i64>& starts, const std::vector<i64>& lengths, i64 divisor) {
        if (starts.size() != lengths.size()) throw nb::value_error("a length for every start");
        zcomm::Job job{kind, codec_of(codec), codec_of(codec_out), Dtype(dtype), {},
                       region(output), starts, lengths, divisor};
        for (const Where& input : inputs) job.inputs.push_back(region(input));
        jobs_.push_back(job);
    }

    static zcomm::Region region(const Where& where) {
        return {std::get<0>(where), std::get<1>(where), std::get<2>(where)};
    }

    std::vector<zcomm::Job> jobs_;
};

// Writes where an array lies, and its bytes, to a row of what a program is run with.
void bind(const nb::ndarray<int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>& rows,
          size_t row, const Readable& array) {
    if (row >= rows.shape(0)) throw nb::index_error("no such row");
    rows(row, 0) = reinterpret_cast<int64_t>(array.data());
    rows(row, 1) = int64_t(array.size());
}

uint64_t* counter(const Counters& counters, size_t index) {
    if (index >= counters.size()) throw nb::index_error("no such counter");
    return counters.data() + index;
}

// The sum of the lengths, or -1 where a run is negative or, with a `limit`, reaches beyond it.
int64_t total(const Numbers& starts, const Numbers& lengths, int64_t limit) {
    if (starts.size() != lengths.size()) return -1;
    int64_t sum = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
        int64_t start = starts.data()[i], length = lengths.data()[i];
        if (length < 0 || length > INT64_MAX - sum) return -1;
        if (limit >= 0 && (start < 0 || start > limit || length > limit - start)) return -1;
        sum += length;
    }
    return sum;
}

int read_process(int pid, const Numbers& addresses, const Numbers& lengths, const Writable& out,
                 const Numbers& starts, const Numbers& sizes) {
    int64_t from = total(addresses, lengths, -1), to = total(starts, sizes, int64_t(out.size()));
    if (from < 0 || from != to) throw nb::value_error("runs of bytes that do not fit");
    nb::gil_scoped_release release;
    zcomm::Runs source{addresses.data(), lengths.data(), int64_t(lengths.size())};
    zcomm::Runs target{starts.data(), sizes.data(), int64_t(sizes.size())};
    return zcomm::read_process(pid, source, out.data(), target);
}

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // plans keep programs until the process ends
    module.def("instruction_sets", &instruction_sets);
    module.def("instruction_set", [] { return std::string(active.load()->name); });
    module.def("select", &use, "name"_a);
    module.def("stream_from", [](i64 nbytes) { return zcomm::streamed_from.exchange(nbytes); },
               "nbytes"_a);
    module.def("encode", &encode, "codec"_a, "x"_a.noconvert(), "dtype"_a,
               "starts"_a.noconvert(), "lengths"_a.noconvert(), "out"_a.noconvert(), "seed"_a);
    module.def("decode", &decode, "codec"_a, "wire"_a.noconvert(), "starts"_a.noconvert(),
               "lengths"_a.noconvert(), "out"_a.noconvert(), "dtype"_a);
    module.def("decode_reduce", &decode_reduce, "codec"_a, "wires"_a.noconvert(),
               "starts"_a.noconvert(), "lengths"_a.noconvert(), "out"_a.noconvert(), "dtype"_a,
               "divisor"_a);
    nb::class_<Reduction>(module, "Reduction")
        .def(nb::init<const Description&, const std::vector<Readable>&, const Numbers&,
                      const Numbers&, const Writable&, int, i64>(),
             "codec"_a, "wires"_a.noconvert(), "starts"_a.noconvert(), "lengths"_a.noconvert(),
             "out"_a.noconvert(), "dtype"_a, "divisor"_a)
        .def("__call__", &Reduction::operator());
    module.def("decode_reduce_encode", &decode_reduce_encode, "codec_in"_a,
               "wires"_a.noconvert(), "codec_out"_a, "lengths"_a.noconvert(),
               "out"_a.noconvert(), "seed"_a);
    nb::class_<Program>(module, "Program")
        .def(nb::init<>())
        .def("copy", &Program::copy, "source"_a, "target"_a)
        .def("encode", &Program::encode, "codec"_a, "x"_a, "dtype"_a, "starts"_a, "lengths"_a,
             "out"_a)
        .def("decode", &Program::decode, "codec"_a, "wire"_a, "starts"_a, "lengths"_a, "out"_a,
             "dtype"_a)
        .def("decode_reduce", &Program::decode_reduce, "codec"_a, "wires"_a, "starts"_a,
             "lengths"_a, "out"_a, "dtype"_a, "divisor"_a)
        .def("decode_reduce_encode", &Program::decode_reduce_encode, "codec_in"_a, "wires"_a,
             "codec_out"_a, "lengths"_a, "out"_a)
        .def("run", &Program::run, "rows"_a.noconvert(), "seeds"_a);
    module.def("bind", &bind, "rows"_a.noconvert(), "row"_a, "array"_a.noconvert());
    module.def("read_process", &read_process, "pid"_a, "addresses"_a.noconvert(),
               "lengths"_a.noconvert(), "out"_a.noconvert(), "starts"_a.noconvert(),
               "sizes"_a.noconvert());
    module.def("permit_reading", &zcomm::permit_reading, "any"_a);
    module.def("on_huge_pages",
               [](const Readable& memory, i64 most) {
                   return zcomm::on_huge_pages(memory.data(), i64(memory.size()), most);
               },
               "memory"_a.noconvert(), "most"_a);
    module.def("load_counter",
               [](const Counters& counters, size_t index) {
                   return zcomm::load_counter(counter(counters, index));
               },
               "counters"_a.noconvert(), "index"_a);
    module.def("store_counter",
               [](const Counters& counters, size_t index, uint64_t value) {
                   zcomm::store_counter(counter(counters, index), value);
               },
               "counters"_a.noconvert(), "index"_a, "value"_a);
    module.def("equal_counters",
               [](const Counters& counters, const Counters& values) {
                   return counters.size() == values.size() &&
                          zcomm::equal_counters(counters.data(), values.data(),
                                                i64(values.size()));
               },
               "counters"_a.noconvert(), "values"_a.noconvert());
}
