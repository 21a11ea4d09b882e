// Counters in memory that several processes share: 64 bits, written by one of them.
//
// A store releases, a load acquires: who has seen a counter move also sees what was written before.
#pragma once

#include <cstdint>

namespace zcomm {

inline uint64_t load_counter(const uint64_t* counter) {
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

inline void store_counter(uint64_t* counter, uint64_t value) {
    __atomic_store_n(counter, value, __ATOMIC_RELEASE);
}

inline bool equal_counters(const uint64_t* counters, const uint64_t* values, int64_t number) {
    for (int64_t i = 0; i < number; ++i)
        if (load_counter(counters + i) != values[i]) return false;
    return true;
}

}  // namespace zcomm
