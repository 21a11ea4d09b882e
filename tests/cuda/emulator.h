// CUDA for the host: enough of it to run zcomm/csrc/kernels.cu, unchanged, on the CPU.
//
// Threads of a block are fibres that take turns, blocks run one after the other; with
// EMULATOR_THREADS all threads of all blocks are threads of the machine, so that a race detector
// sees what is ordered by nothing. What is not played: flush to zero, lanes that diverge inside a
// warp operation (all must take part), the order in which a device makes memory visible (here every
// warp operation is a barrier for memory, on a device only __syncwarp is one), speed.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#ifdef EMULATOR_THREADS
#include <condition_variable>
#include <thread>
#else
#include <ucontext.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

namespace emulator {

struct Index {
    unsigned x;
};

#ifdef EMULATOR_THREADS
struct Barrier {
    std::mutex mutex;
    std::condition_variable opened;
    int expected = 0, arrived = 0;
    unsigned generation = 0;

    void open() {
        arrived = 0;
        ++generation;
        opened.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex);
        unsigned mine = generation;
        if (++arrived == expected) open();
        else opened.wait(lock, [&] { return generation != mine; });
    }
    void leave() {
        std::unique_lock lock(mutex);
        if (--expected > 0 && arrived == expected) open();
    }
};
#else
void yield();
extern int yields_without_progress;

struct Barrier {
    int expected = 0, arrived = 0;
    unsigned generation = 0;

    void open() {
        arrived = 0;
        ++generation;
        yields_without_progress = 0;
    }
    void wait() {
        unsigned mine = generation;
        if (++arrived == expected) return open();
        while (generation == mine) yield();
    }
    void leave() {
        if (--expected > 0 && arrived == expected) open();
    }
};
#endif

// Values are left in the slots of one parity while those of the other are still being read.
struct Warp {
    Barrier barrier;
    uint32_t slot[2][32] = {};
};

struct Block {
    std::vector<Warp> warps;
    std::mutex mutex;
    std::unique_ptr<void, decltype(&free)> memory{nullptr, free};

    // Exactly as long as asked for, and full of garbage.
    void* shared(size_t nbytes) {
        std::lock_guard lock(mutex);
        if (!memory) {
            memory.reset(malloc(nbytes));
            memset(memory.get(), 0xCD, nbytes);
        }
        return memory.get();
    }
};

struct Thread {
    Index thread, block, block_size, grid_size;
    Block* owner;
    Warp* warp;
    int parity;
};

#ifdef EMULATOR_THREADS
extern thread_local Thread* me;
#else
extern Thread* me;
#endif

// What every lane of the warp gave.
inline const uint32_t* exchange(uint32_t value) {
    Warp& warp = *me->warp;
    uint32_t* slots = warp.slot[me->parity ^= 1];
    slots[me->thread.x % 32] = value;
    warp.barrier.wait();
    return slots;
}

void launch(unsigned grid, unsigned threads, const std::function<void()>& kernel);

}  // namespace emulator

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx (emulator::me->thread)
#define blockIdx (emulator::me->block)
#define blockDim (emulator::me->block_size)
#define gridDim (emulator::me->grid_size)
#define ZC_FN [[maybe_unused]] static inline
#define ZC_SHARED(type, name, numel) \
    type* name = static_cast<type*>(emulator::me->owner->shared(sizeof(type) * (numel)))

template <class T> T __ldg(const T* address) { return *address; }
template <class T> T __ldcg(const T* address) { return *address; }
template <class T> void __stcs(T* address, T value) { *address = value; }
inline uint32_t atomicExch(uint32_t* address, uint32_t value) {
    return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
inline void __syncwarp() { emulator::me->warp->barrier.wait(); }
template <class T> T __shfl_xor_sync(unsigned, T value, int distance) {
    int lane = int(threadIdx.x) % 32;
    return std::bit_cast<T>(emulator::exchange(std::bit_cast<uint32_t>(value))[lane ^ distance]);
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
    const uint32_t* slots = emulator::exchange(value);
    return *std::max_element(slots, slots + 32);
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i)
        result |= uint32_t((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 0xFF) << (8 * i);
    return result;
}
