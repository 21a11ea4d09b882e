// What the lanes of a warp do together: vectors in memory, maxima, transforms, blocks of codes.
//
// Compiled by NVRTC for CUDA devices and, under an emulator, by the host's compiler; no include but
// codec.h. A *lane* holds V consecutive elements of the first half of a block and the V elements at
// the same place in the second half: where int4 puts both into V bytes. Addresses are absolute, and
// have any alignment. Do not assume that all lanes of a warp have work: all take part in shuffles.
#pragma once

#include "codec.h"

namespace ZC_NS {

enum { WARP = 32, LARGEST_BLOCK = 4096 };
enum : u32 { ALL_LANES = 0xFFFFFFFFu };

ZC_FN int lane_index() { return int(threadIdx.x) % WARP; }

// N bytes as they are in memory.
template <int N> struct Raw {
    u32 word[N / 4];
};

ZC_FN u32 byte_of(const u32* words, int i) { return (words[i / 4] >> (8 * (i % 4))) & 0xFFu; }

ZC_FN u32 load_byte(u64 address) { return __ldg(reinterpret_cast<const u8*>(address)); }

ZC_FN u32 load_half(u64 address) {
    if (address % 2 == 0) return __ldg(reinterpret_cast<const u16*>(address));
    return load_byte(address) | load_byte(address + 1) << 8;
}

template <bool ALIGNED> ZC_FN u32 load_word(u64 address) {
    if (ALIGNED) return __ldg(reinterpret_cast<const u32*>(address));
    return load_half(address) | load_half(address + 2) << 16;
}

ZC_FN u32 load_word(u64 address) {
    return address % 4 == 0 ? load_word<true>(address) : load_word<false>(address);
}

template <int N> ZC_FN Raw<N> load_vector(u64 address) {
    Raw<N> raw;
    if constexpr (N == 16) {
        uint4 v = __ldg(reinterpret_cast<const uint4*>(address));
        raw = {{v.x, v.y, v.z, v.w}};
    } else if constexpr (N == 8) {
        uint2 v = __ldg(reinterpret_cast<const uint2*>(address));
        raw = {{v.x, v.y}};
    } else {
        raw = {{__ldg(reinterpret_cast<const u32*>(address))}};
    }
    return raw;
}

// Whether a vector of N bytes can be accessed at once.
template <int N> ZC_FN bool is_aligned(u64 address) { return address % N == 0; }

template <int N, bool ALIGNED> ZC_FN Raw<N> load_words(u64 address) {
    Raw<N> raw;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) raw.word[i] = load_word<ALIGNED>(address + 4 * i);
    return raw;
}

// ALIGNED promises that the address is; else it may be.
template <int N, bool ALIGNED> ZC_FN Raw<N> load(u64 address) {
    if constexpr (ALIGNED) {
        return load_vector<N>(address);
    } else {
        if (is_aligned<N>(address)) return load_vector<N>(address);
        return address % 4 == 0 ? load_words<N, true>(address) : load_words<N, false>(address);
    }
}

ZC_FN void store_byte(u64 address, u32 value) {
    __stcs(reinterpret_cast<u8*>(address), u8(value));
}

ZC_FN void store_half(u64 address, u32 value) {
    if (address % 2 == 0) return __stcs(reinterpret_cast<u16*>(address), u16(value));
    store_byte(address, value);
    store_byte(address + 1, value >> 8);
}

template <bool ALIGNED> ZC_FN void store_word(u64 address, u32 value) {
    if (ALIGNED) return __stcs(reinterpret_cast<u32*>(address), value);
    store_half(address, value);
    store_half(address + 2, value >> 16);
}

ZC_FN void store_word(u64 address, u32 value) {
    if (address % 4 == 0) store_word<true>(address, value);
    else store_word<false>(address, value);
}

template <int N> ZC_FN void store_vector(u64 address, const Raw<N>& raw) {
    if constexpr (N == 16) {
        uint4 v = {raw.word[0], raw.word[1], raw.word[2], raw.word[3]};
        __stcs(reinterpret_cast<uint4*>(address), v);
    } else if constexpr (N == 8) {
        uint2 v = {raw.word[0], raw.word[1]};
        __stcs(reinterpret_cast<uint2*>(address), v);
    } else {
        __stcs(reinterpret_cast<u32*>(address), raw.word[0]);
    }
}

template <int N, bool ALIGNED> ZC_FN void store_words(u64 address, const Raw<N>& raw) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) store_word<ALIGNED>(address + 4 * i, raw.word[i]);
}

template <int N, bool ALIGNED> ZC_FN void store(u64 address, const Raw<N>& raw) {
    if constexpr (ALIGNED) {
        store_vector(address, raw);
    } else {
        if (is_aligned<N>(address)) store_vector(address, raw);
        else if (address % 4 == 0) store_words<N, true>(address, raw);
        else store_words<N, false>(address, raw);
    }
}

template <class T> ZC_FN T from_pattern(u32 pattern) {
    if constexpr (sizeof(T) == 4) return flt(pattern);
    else return T{u16(pattern)};
}

template <class T> ZC_FN float load_element(u64 address) {
    return to_float(from_pattern<T>(sizeof(T) == 4 ? load_word(address) : load_half(address)));
}

// Element i of a vector of elements.
template <class T, int N> ZC_FN float element(const Raw<N>& raw, int i) {
    if (sizeof(T) == 4) return to_float(from_pattern<T>(raw.word[i]));
    return to_float(from_pattern<T>((raw.word[i / 2] >> (16 * (i % 2))) & 0xFFFFu));
}

// The bits of a value as T; saturate: see to_fp16.
ZC_FN u32 rounded_as(float, float value, bool) { return bits(canonical(value)); }
ZC_FN u32 rounded_as(bf16, float value, bool) { return to_bf16(value).pattern; }
ZC_FN u32 rounded_as(fp16, float value, bool saturate) {
    return saturate ? to_fp16<true>(value).pattern : to_fp16<false>(value).pattern;
}
template <class T> ZC_FN u32 rounded(float value, bool saturate) {
    return rounded_as(T(), value, saturate);
}

template <class T> ZC_FN void store_element(u64 address, float value, bool saturate) {
    if (sizeof(T) == 4) store_word(address, rounded<T>(value, saturate));
    else store_half(address, rounded<T>(value, saturate));
}

// V values as elements of T, consecutive in memory.
template <class T, bool ALIGNED, int V>
ZC_FN void store_elements(u64 address, const float (&values)[V], bool saturate) {
    Raw<V * int(sizeof(T))> raw;
#pragma unroll
    for (int i = 0; i < V; ++i) {
        u32 pattern = rounded<T>(values[i], saturate);
        if (sizeof(T) == 4) raw.word[i] = pattern;
        else if (i % 2 == 0) raw.word[i / 2] = pattern;
        else raw.word[i / 2] |= pattern << 16;
    }
    store<V * int(sizeof(T)), ALIGNED>(address, raw);
}

// The largest among `lanes` neighbours, a power of two.
ZC_FN u32 largest_of(u32 value, int lanes) {
    if (lanes == WARP) return __reduce_max_sync(ALL_LANES, value);
    for (int distance = 1; distance < lanes; distance *= 2) {
        u32 other = __shfl_xor_sync(ALL_LANES, value, distance);
        value = value < other ? other : value;
    }
    return value;
}

ZC_FN void butterfly(float& a, float& b) {
    float sum = add(a, b), difference = sub(a, b);
    a = sum;
    b = difference;
}

// The butterfly of a value with that of another lane.
ZC_FN float butterfly_with(float value, int distance) {
    float other = __shfl_xor_sync(ALL_LANES, value, distance);
    return lane_index() & distance ? sub(other, value) : add(value, other);
}

// One value per lane, a group of numel values.
ZC_FN float transform_in_warp(float value, int numel) {
    int some = 1;
    while (2 * some <= numel) some *= 2;
    bool inside = lane_index() < some;
    float result = transform_input(value);
    for (int distance = 1; distance < some; distance *= 2) result = butterfly_with(result, distance);
    return inside ? mul(result, transform_factor(some)) : value;
}

// The butterflies of distance 1 to 8 among consecutive values, V in a lane.
template <int V> ZC_FN void transform_sixteen(float (&values)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = transform_input(values[i]);
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
            if (distance >= V) values[i] = butterfly_with(values[i], distance / V);
            else if (!(i & distance)) butterfly(values[i], values[i + distance]);
        }
    }
}

template <int V> ZC_FN void scale_transformed(float (&values)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = mul(values[i], transform_factor(TRANSFORMED));
}

// Groups of 32 consecutive values, V in a lane.
template <int V> ZC_FN void transform_lanes(float (&values)[V]) {
    transform_sixteen(values);
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = butterfly_with(values[i], 16 / V);
    scale_transformed(values);
}

// Groups of 32 consecutive values in both halves of blocks, V and V in a lane. In a block of 32
// the halves are those of one group.
template <int V> ZC_FN void transform_lanes(float (&low)[V], float (&high)[V], int block) {
    if (block > TRANSFORMED) {
        transform_lanes(low);
        return transform_lanes(high);
    }
    transform_sixteen(low);
    transform_sixteen(high);
#pragma unroll
    for (int i = 0; i < V; ++i) butterfly(low[i], high[i]);
    scale_transformed(low);
    scale_transformed(high);
}

}  // namespace ZC_NS
