#include "remote.h"

#include <cerrno>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#if !defined(PR_SET_PTRACER)
#define PR_SET_PTRACER 0x59616d61
#define PR_SET_PTRACER_ANY (-1ul)
#endif
#endif

namespace zcomm {

#if defined(__linux__)

namespace {

// Where reading stands: in which run, and how many bytes into it.
class Cursor {
  public:
    explicit Cursor(Runs runs) : runs_(runs) { skip_empty(); }

    bool at_end() const { return index_ == runs_.count; }

    void advance(int64_t nbytes) {
        while (nbytes > 0) {
            int64_t step = std::min(nbytes, runs_.lengths[index_] - done_);
            done_ += step;
            nbytes -= step;
            skip_empty();
        }
    }

    // Fills vectors with what follows, up to `most` of them; returns how many.
    int fill(iovec* vectors, int most, uintptr_t base) const {
        int used = 0;
        int64_t done = done_;
        for (int64_t i = index_; i < runs_.count && used < most; ++i, done = 0) {
            if (runs_.lengths[i] == done) continue;
            uintptr_t at = base + uintptr_t(runs_.starts[i]) + uintptr_t(done);
            vectors[used++] = {reinterpret_cast<void*>(at), size_t(runs_.lengths[i] - done)};
        }
        return used;
    }

  private:
    void skip_empty() {
        while (index_ < runs_.count && done_ == runs_.lengths[index_]) ++index_, done_ = 0;
    }

    Runs runs_;
    int64_t index_ = 0, done_ = 0;
};

// The request of PAGEMAP_SCAN (Linux 6.7), which older headers lack.
struct ScanRequest {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
struct ScanRegion {
    uint64_t start, end, categories;
};
const uint64_t PRESENT = 1 << 3, HUGE_PAGE = 1 << 6;
const unsigned long SCAN = _IOWR('f', 16, ScanRequest);

}  // namespace

int read_process(int pid, Runs from, unsigned char* out, Runs to) {
    const int MOST = 512;  // at once; the system takes 1024, more only cost stack
    iovec local[MOST], remote[MOST];
    Cursor source(from), target(to);
    while (!target.at_end()) {
        int to_count = target.fill(local, MOST, reinterpret_cast<uintptr_t>(out));
        int from_count = source.fill(remote, MOST, 0);
        ssize_t got = process_vm_readv(pid, local, size_t(to_count), remote, size_t(from_count), 0);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0) return ENDED;
        source.advance(got);
        target.advance(got);
    }
    return READ;
}

int permit_reading(bool any) {
    return prctl(PR_SET_PTRACER, any ? PR_SET_PTRACER_ANY : 0ul, 0, 0, 0) ? errno : 0;
}

int on_huge_pages(const unsigned char* memory, int64_t nbytes, int64_t most) {
    const uint64_t page = uint64_t(sysconf(_SC_PAGESIZE));
    uint64_t begin = reinterpret_cast<uint64_t>(memory);
    if (nbytes > most) begin += uint64_t(nbytes - most) / 2;
    uint64_t end = begin + uint64_t(std::min(nbytes, most));
    begin = (begin + page - 1) / page * page, end = end / page * page;
    if (begin >= end) return 0;
    int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    ScanRegion found[1];
    ScanRequest request{};
    request.size = sizeof request;
    request.start = begin, request.end = end;
    request.vec = reinterpret_cast<uint64_t>(found), request.vec_len = 1;
    request.category_mask = request.return_mask = PRESENT | HUGE_PAGE;
    int count = ioctl(file, SCAN, &request);
    close(file);
    if (count < 0) return -1;
    return count == 1 && found[0].start <= begin && found[0].end >= end;
}

#else

int read_process(int, Runs, unsigned char*, Runs) { return ENOSYS; }
int permit_reading(bool) { return ENOSYS; }
int on_huge_pages(const unsigned char*, int64_t, int64_t) { return -1; }

#endif

}  // namespace zcomm
