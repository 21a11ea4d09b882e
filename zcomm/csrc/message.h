// Whole messages: where segments lie on the wire and in memory, tile by tile over a table's loops.
//
// Every function checks all sizes before it touches memory and says so in its Status; what exactly
// is wrong is worked out, and worded, by the caller. Inputs and outputs must not overlap.
#pragma once

#include <atomic>
#include <vector>

#include "table.h"

namespace zcomm {

enum Status { DONE = 0, DOES_NOT_FIT = 1, PADDING_NOT_ZERO = 2 };

struct Codec {
    Format format;
    i64 block;         // elements; a power of two for quantised formats, else unused
    bool stochastic;   // int8 and int4 only
    bool transformed;  // by Hadamard; quantised formats only
};

struct Input {
    const u8* data;
    i64 nbytes;
};

struct Output {
    u8* data;
    i64 nbytes;
};

// Runs of elements of a typed memory. Without starts they follow each other.
struct Segments {
    const i64* starts;
    const i64* lengths;
    i64 count;
};

// Codes and decoded values of at least so many bytes go past the caches; fewer, which the next step
// finds there, do not.
extern std::atomic<i64> streamed_from;

// seed: of random numbers, where the codec wants any.
Status encode(const Table&, Codec, Input x, Dtype, Segments, Output wire, u64 seed);
Status decode(const Table&, Codec, Input wire, Segments, Output out, Dtype);
Status decode_reduce(const Table&, Codec, const std::vector<Input>& wires, Segments, Output out,
                     Dtype, i64 divisor);
Status decode_reduce_encode(const Table&, Codec in, const std::vector<Input>& wires, Codec out,
                            Segments, Output wire, u64 seed);

}  // namespace zcomm
