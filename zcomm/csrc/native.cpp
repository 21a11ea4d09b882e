// The Python module zcomm._native: the four kernels on uint8 arrays, and the choice of loops.
//
// Every kernel returns a Status as an int and runs without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "message.h"

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
using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct InstructionSet {
    const char* name;
    const zcomm::Table* table;
    bool (*available)();
};

// Widest first.
const InstructionSet INSTRUCTION_SETS[] = {
#if defined(ZC_X86)
    {"avx512", &zc_avx512::table,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("f16c");
     }},
    {"avx2", &zc_avx2::table,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }},
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

int encode(int format, i64 block, const Readable& x, int dtype, const Numbers& starts,
           const Numbers& lengths, const Writable& out) {
    Segments segments;
    if (!segments_of(starts, lengths, segments)) return zcomm::DOES_NOT_FIT;
    nb::gil_scoped_release release;
    return zcomm::encode(table(), Codec{Format(format), block}, input(x), Dtype(dtype), segments,
                         output(out));
}

int decode(int format, i64 block, const Readable& wire, const Numbers& starts,
           const Numbers& lengths, const Writable& out, int dtype) {
    Segments segments;
    if (!segments_of(starts, lengths, segments)) return zcomm::DOES_NOT_FIT;
    nb::gil_scoped_release release;
    return zcomm::decode(table(), Codec{Format(format), block}, input(wire), segments, output(out),
                         Dtype(dtype));
}

int decode_reduce(int format, i64 block, const std::vector<Readable>& wires, const Numbers& starts,
                  const Numbers& lengths, const Writable& out, int dtype, i64 divisor) {
    Segments segments;
    if (!segments_of(starts, lengths, segments)) return zcomm::DOES_NOT_FIT;
    nb::gil_scoped_release release;
    return zcomm::decode_reduce(table(), Codec{Format(format), block}, inputs(wires), segments,
                                output(out), Dtype(dtype), divisor);
}

int decode_reduce_encode(int format_in, i64 block_in, const std::vector<Readable>& wires,
                         int format_out, i64 block_out, const Numbers& lengths,
                         const Writable& out) {
    Segments segments{nullptr, numbers(lengths), i64(lengths.size())};
    nb::gil_scoped_release release;
    return zcomm::decode_reduce_encode(table(), Codec{Format(format_in), block_in}, inputs(wires),
                                       Codec{Format(format_out), block_out}, segments,
                                       output(out));
}

}  // namespace

NB_MODULE(_native, module) {
    module.def("instruction_sets", &instruction_sets);
    module.def("instruction_set", [] { return std::string(active.load()->name); });
    module.def("select", &use, "name"_a);
    module.def("encode", &encode, "format"_a, "block"_a, "x"_a.noconvert(), "dtype"_a,
               "starts"_a.noconvert(), "lengths"_a.noconvert(), "out"_a.noconvert());
    module.def("decode", &decode, "format"_a, "block"_a, "wire"_a.noconvert(),
               "starts"_a.noconvert(), "lengths"_a.noconvert(), "out"_a.noconvert(), "dtype"_a);
    module.def("decode_reduce", &decode_reduce, "format"_a, "block"_a, "wires"_a.noconvert(),
               "starts"_a.noconvert(), "lengths"_a.noconvert(), "out"_a.noconvert(), "dtype"_a,
               "divisor"_a);
    module.def("decode_reduce_encode", &decode_reduce_encode, "format_in"_a, "block_in"_a,
               "wires"_a.noconvert(), "format_out"_a, "block_out"_a, "lengths"_a.noconvert(),
               "out"_a.noconvert());
}
