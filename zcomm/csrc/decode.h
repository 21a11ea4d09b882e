// Loops that read codes and scales: the values of one wire in any dtype, sums of several in float32.
#pragma once

#include "elements.h"

namespace ZC_NS {
namespace {

template <Code C> constexpr i64 num_code_bytes(i64 numel) {
    return C == INT4 ? (numel + 1) / 2 : numel;
}

// The value of a byte of codes in units of the scale; NIBBLE 0 is the low one of int4.
template <Code C, int NIBBLE> ZC_FN float value_of(u8 packed) {
    if constexpr (C == E4M3 || C == E5M2) return fp8_value<C>(packed);
    u8 at_top = C == INT8 || NIBBLE == 1 ? packed : u8(packed << 4);
    return float(static_cast<signed char>(at_top) >> (C == INT8 ? 0 : 4));
}

// The values at i of N wires, and at `at` of out where ADD, summed in ascending order.
template <Code C, int NIBBLE, int N, bool ADD>
ZC_FN float sum_at(const u8* const (&codes)[N], const float (&scales)[N], i64 i, const u8* out,
                   i64 at) {
    float total = value_of<C, NIBBLE>(codes[0][i]) * scales[0];
    if (ADD) total = load<float>(out, at) + total;
    for (int w = 1; w < N; ++w) total += value_of<C, NIBBLE>(codes[w][i]) * scales[w];
    return total;
}

#if ZC_SIMD
template <Code C, int NIBBLE> ZC_FN F value_lanes(I bytes) {
    if constexpr (C == E4M3 || C == E5M2) return fp8_values<C>(bytes);
    else if constexpr (C == INT8) return from_int(bytes);
    else return from_int(right_signed<NIBBLE ? 4 : 28>(NIBBLE ? bytes : left<28>(bytes)));
}

template <Code C, int NIBBLE, int N, bool ADD>
ZC_FN F sum_lanes(const I (&bytes)[N], const F (&scales)[N], const u8* out, i64 at) {
    F total = value_lanes<C, NIBBLE>(bytes[0]) * scales[0];
    if (ADD) total = lanes<float>(out, at) + total;
    for (int w = 1; w < N; ++w) total = total + value_lanes<C, NIBBLE>(bytes[w]) * scales[w];
    return total;
}
#endif

// Whether a sum is the value to be stored, or more may be added to it.
enum Stage { PARTIAL, FINAL };

template <class T, Stage S> ZC_FN void put(u8* out, i64 i, float v) {
    if constexpr (S == FINAL) store(out, i, from_float<T, true>(v));
    else store(out, i, v);
}

#if ZC_SIMD
template <class T, Stage S> ZC_FN void put_lanes(u8* out, i64 i, F v) {
    if constexpr (S == FINAL) store_rounded<T, true>(out, i, v);
    else store_lanes(out + 4 * i, v);
}
#endif

template <Code C, class T, Stage S, int N, bool ADD>
ZC_FN void sum_block(const u8* const (&codes)[N], const float (&scales)[N], i64 n,
                     u8* __restrict out) {
    i64 half = num_code_bytes<C>(n), i = 0;
#if ZC_SIMD
    if constexpr (IN_VECTORS<T>) {
        F by[N];
        for (int w = 0; w < N; ++w) by[w] = splat(scales[w]);
        for (; i + LANES <= (C == INT4 ? n / 2 : n); i += LANES) {
            I bytes[N];
            for (int w = 0; w < N; ++w) bytes[w] = load_bytes(codes[w] + i);
            put_lanes<T, S>(out, i, sum_lanes<C, 0, N, ADD>(bytes, by, out, i));
            if (C == INT4)
                put_lanes<T, S>(out, half + i, sum_lanes<C, 1, N, ADD>(bytes, by, out, half + i));
        }
    }
#endif
    for (; i < half; ++i) {
        put<T, S>(out, i, sum_at<C, 0, N, ADD>(codes, scales, i, out, i));
        if (C == INT4 && half + i < n)
            put<T, S>(out, half + i, sum_at<C, 1, N, ADD>(codes, scales, i, out, half + i));
    }
}

template <Code C, int N, bool ADD>
void sum_codes(const u8* const* all_codes, const u8* const* all_scales, i64 n, i64 block,
               u8* __restrict out) {
    const u8* codes[N];
    float scales[N];
    for (int w = 0; w < N; ++w) codes[w] = all_codes[w];
    for (i64 i = 0, k = 0; i < n; i += block, ++k) {
        i64 m = n - i < block ? n - i : block;
        for (int w = 0; w < N; ++w)
            scales[w] = decoding_scale(load<bf16>(all_scales[w], k).pattern);
        sum_block<C, float, PARTIAL, N, ADD>(codes, scales, m, out + 4 * i);
        for (int w = 0; w < N; ++w) codes[w] += num_code_bytes<C>(m);
    }
}

template <Code C, class T>
void decode(const u8* codes, const u8* scales, i64 n, i64 block, u8* __restrict out) {
    for (i64 i = 0, k = 0; i < n; i += block, ++k) {
        i64 m = n - i < block ? n - i : block;
        const u8* const wire[1] = {codes};
        const float scale[1] = {decoding_scale(load<bf16>(scales, k).pattern)};
        sum_block<C, T, FINAL, 1, false>(wire, scale, m, out + sizeof(T) * i);
        codes += num_code_bytes<C>(m);
    }
}

}  // namespace
}  // namespace ZC_NS
