// Copies past the caches: for memory that nobody reads soon, and that would first have to be fetched.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace zcomm {

// Copies n bytes between memories that do not overlap. The stores are in order when it returns.
inline void copy_past(unsigned char* out, const unsigned char* in, int64_t n) {
#if defined(__SSE2__)
    const int64_t line = 64, head = (line - int64_t(reinterpret_cast<uintptr_t>(out) % line)) % line;
    if (n >= head + line) {
        std::memcpy(out, in, size_t(head));
        out += head, in += head, n -= head;
        for (; n >= line; out += line, in += line, n -= line)
            for (int64_t i = 0; i < line; i += 16)
                _mm_stream_si128(reinterpret_cast<__m128i*>(out + i),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
        _mm_sfence();
    }
#endif
    std::memcpy(out, in, size_t(n));
}

}  // namespace zcomm
