#include "program.h"

#include <cstring>

namespace zcomm {

namespace {

using Memories = std::vector<Memory>;

bool find(const Memories& memories, Region region, Memory& found) {
    if (region.memory < 0 || region.memory >= i64(memories.size())) return false;
    Memory memory = memories[region.memory];
    i64 stop = region.stop < 0 ? memory.nbytes : region.stop;
    if (region.start < 0 || region.start > stop || stop > memory.nbytes) return false;
    found = {memory.data + region.start, stop - region.start};
    return true;
}

Status run(const Table& table, const Job& job, const Memories& memories, u64 seed) {
    Memory out;
    if (!find(memories, job.output, out)) return DOES_NOT_FIT;
    std::vector<Input> inputs;
    inputs.reserve(job.inputs.size());
    for (Region region : job.inputs) {
        Memory in;
        if (!find(memories, region, in)) return DOES_NOT_FIT;
        inputs.push_back({in.data, in.nbytes});
    }
    if (inputs.empty()) return DOES_NOT_FIT;
    Segments segments{job.starts.data(), job.lengths.data(), i64(job.lengths.size())};
    Output output{out.data, out.nbytes};
    switch (job.kind) {
        case Job::COPY:
            if (inputs[0].nbytes != out.nbytes) return DOES_NOT_FIT;
            if (out.nbytes > 0) std::memcpy(out.data, inputs[0].data, out.nbytes);
            return DONE;
        case Job::ENCODE:
            return encode(table, job.codec, inputs[0], job.dtype, segments, output, seed);
        case Job::DECODE:
            return decode(table, job.codec, inputs[0], segments, output, job.dtype);
        case Job::DECODE_REDUCE:
            return decode_reduce(table, job.codec, inputs, segments, output, job.dtype,
                                 job.divisor);
        case Job::DECODE_REDUCE_ENCODE:
            return decode_reduce_encode(table, job.codec, inputs, job.codec_out, segments, output,
                                        seed);
    }
    return DOES_NOT_FIT;
}

}  // namespace

Status run(const Table& table, const std::vector<Job>& jobs, const Memories& memories,
           const std::vector<u64>& seeds) {
    for (std::size_t i = 0; i < jobs.size(); ++i) {
        u64 seed = i < seeds.size() ? seeds[i] : 0;
        if (Status status = run(table, jobs[i], memories, seed)) return status;
    }
    return DONE;
}

}  // namespace zcomm
