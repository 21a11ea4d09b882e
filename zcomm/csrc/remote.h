// Memory of another process of this machine, read by one call of the system (Linux).
#pragma once

#include <cstdint>

namespace zcomm {

// Runs of bytes: addresses in the process that is read, offsets in the memory that is written.
struct Runs {
    const int64_t* starts;
    const int64_t* lengths;
    int64_t count;
};

enum Reading : int { READ = 0, ENDED = -1 };

// Copies the bytes of `from`, in the process `pid`, one run after the other to those of `to` in
// `out`; both hold as many bytes, and those of `to` lie in `out`. Returns READ, what errno says, or
// ENDED where the system delivers no more bytes without saying why.
int read_process(int pid, Runs from, unsigned char* out, Runs to);

// Lets other processes of the same user read this one, or, where not `any`, no longer: what Yama
// asks for at ptrace_scope 1. Returns 0 or what errno says.
int permit_reading(bool any);

// Tells whether memory of this process lies on huge pages, all of it: 1, 0, or -1 where the system
// does not say. Looks at no more than `most` bytes, in the middle.
int on_huge_pages(const unsigned char* memory, int64_t nbytes, int64_t most);

}  // namespace zcomm
