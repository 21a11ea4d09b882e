// Programs: kernels' work on memories that are named when it is done, checked as everywhere.
//
// A *job* is one call of a kernel, or a copy; its arrays are regions of numbered memories. A program
// is prepared once and run many times, each time on other memories.
#pragma once

#include <vector>

#include "message.h"

namespace zcomm {

struct Memory {
    u8* data;
    i64 nbytes;
};

// Bytes [start, stop) of a memory; a negative stop is its end.
struct Region {
    i64 memory, start, stop;
};

struct Job {
    enum Kind { COPY, ENCODE, DECODE, DECODE_REDUCE, DECODE_REDUCE_ENCODE };
    Kind kind;
    Codec codec, codec_out;
    Dtype dtype;
    std::vector<Region> inputs;
    Region output;
    std::vector<i64> starts, lengths;
    i64 divisor;
};

// Runs jobs in their order until one fails; seeds[i] is that of job i, 0 where there is none.
Status run(const Table&, const std::vector<Job>& jobs, const std::vector<Memory>& memories,
           const std::vector<u64>& seeds);

}  // namespace zcomm
