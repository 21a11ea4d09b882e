// Loops that read codes and scales: values of one wire in any dtype, sums of several in float32.
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

// Products with such a scale are exact: they have at most 16 significant bits, none below 2^-149,
// and are not too large. Encoders write few others.
ZC_FN bool has_exact_products(float scale) { return (bits(scale) & ~SIGN) < bits(0x1p100f); }

#if ZC_SIMD
// What products with a scale are made from.
template <Code C> ZC_FN F factor_of(float scale) {
    if constexpr (C == INT4) return nibble_factor(scale);
    else return splat(scale);
}

// The values of C but INT4 in units of the scale.
template <Code C> ZC_FN F value_lanes(I bytes) {
    if constexpr (C == E4M3 || C == E5M2) return fp8_values<C>(bytes);
    else return from_int(bytes);
}

template <Code C, int NIBBLE> ZC_FN F product(I bytes, F factor) {
    if constexpr (C == INT4) return nibble_product<NIBBLE>(bytes, factor);
    else return value_lanes<C>(bytes) * factor;
}

// EXACT: the product is, so that one rounding gives the bits of two.
template <Code C, int NIBBLE, bool EXACT> ZC_FN F plus_product(F total, I bytes, F factor) {
    if constexpr (!EXACT) return total + product<C, NIBBLE>(bytes, factor);
    else if constexpr (C == INT4) return plus_nibble_product<NIBBLE>(total, bytes, factor);
    else return multiply_add(value_lanes<C>(bytes), factor, total);
}

template <Code C, int NIBBLE, int N, bool ADD, bool EXACT>
ZC_FN F sum_lanes(const I (&bytes)[N], const F (&factors)[N], const u8* out, i64 at) {
    F total;
    if constexpr (ADD)
        total = plus_product<C, NIBBLE, EXACT>(lanes<float>(out, at), bytes[0], factors[0]);
    else total = product<C, NIBBLE>(bytes[0], factors[0]);
    for (int w = 1; w < N; ++w)
        total = plus_product<C, NIBBLE, EXACT>(total, bytes[w], factors[w]);
    return total;
}

// Writes N wires' sums of vectors of a block, and returns how many of its bytes were read.
template <Code C, int N, bool ADD, bool EXACT>
ZC_FN i64 sum_vectors(const u8* const (&codes)[N], const float (&scales)[N], i64 n, u8* out) {
    i64 half = num_code_bytes<C>(n), i = 0;
    F factors[N];
    for (int w = 0; w < N; ++w) factors[w] = factor_of<C>(scales[w]);
    for (; i + LANES <= (C == INT4 ? n / 2 : n); i += LANES) {
        I bytes[N];
        for (int w = 0; w < N; ++w) bytes[w] = load_bytes(codes[w] + i);
        store_lanes(out + 4 * i, sum_lanes<C, 0, N, ADD, EXACT>(bytes, factors, out, i));
        if constexpr (C == INT4)
            store_lanes(out + 4 * (half + i),
                        sum_lanes<C, 1, N, ADD, EXACT>(bytes, factors, out, half + i));
    }
    return i;
}
#endif

template <Code C, int N, bool ADD>
ZC_FN void sum_block(const u8* const (&codes)[N], const float (&scales)[N], i64 n,
                     u8* __restrict out) {
    i64 half = num_code_bytes<C>(n), i = 0;
#if ZC_SIMD
    bool exact = N > 1 || ADD;
    for (int w = 0; w < N; ++w) exact = exact && has_exact_products(scales[w]);
    i = exact ? sum_vectors<C, N, ADD, true>(codes, scales, n, out)
              : sum_vectors<C, N, ADD, false>(codes, scales, n, out);
#endif
    for (; i < half; ++i) {
        store(out, i, sum_at<C, 0, N, ADD>(codes, scales, i, out, i));
        if (C == INT4 && half + i < n)
            store(out, half + i, sum_at<C, 1, N, ADD>(codes, scales, i, out, half + i));
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
        sum_block<C, N, ADD>(codes, scales, m, out + 4 * i);
        for (int w = 0; w < N; ++w) codes[w] += num_code_bytes<C>(m);
    }
}

#if ZC_SIMD && defined(__AVX512F__)
// Decodes int4 to 16-bit values, which one lookup finds, rounded; returns how many bytes were read.
template <class T, bool STREAMED>
ZC_FN i64 decode_by_table(const u8* codes, float scale, i64 n, u8* out) {
    H values = rounded_halves<T, true>(nibble_factor(scale));
    i64 half = num_code_bytes<INT4>(n), i = 0;
    for (; i + 32 <= n / 2; i += 32) {
        I low, high;
        look_up(values, codes + i, low, high);
        store_bits<STREAMED>(out + 2 * i, low);
        store_bits<STREAMED>(out + 2 * (half + i), high);
    }
    return i;
}
#endif

template <Code C, class T, bool STREAMED>
ZC_FN void decode_block(const u8* codes, float scale, i64 n, u8* __restrict out) {
    i64 half = num_code_bytes<C>(n), i = 0;
#if ZC_SIMD
#if defined(__AVX512F__)
    if constexpr (C == INT4 && sizeof(T) == 2)
        i = decode_by_table<T, STREAMED>(codes, scale, n, out);
#endif
    F factor = factor_of<C>(scale);
    for (; i + LANES <= (C == INT4 ? n / 2 : n); i += LANES) {
        I bytes = load_bytes(codes + i);
        store_rounded<T, true, STREAMED>(out, i, product<C, 0>(bytes, factor));
        if constexpr (C == INT4)
            store_rounded<T, true, STREAMED>(out, half + i, product<C, 1>(bytes, factor));
    }
#endif
    for (; i < half; ++i) {
        store(out, i, from_float<T, true>(value_of<C, 0>(codes[i]) * scale));
        if (C == INT4 && half + i < n)
            store(out, half + i, from_float<T, true>(value_of<C, 1>(codes[i]) * scale));
    }
}

template <Code C, class T, bool STREAMED>
ZC_FN void decode_loop(const u8* codes, const u8* scales, i64 n, i64 block, u8* __restrict out) {
    for (i64 i = 0, k = 0; i < n; i += block, ++k) {
        i64 m = n - i < block ? n - i : block;
        float scale = decoding_scale(load<bf16>(scales, k).pattern);
        u8* at = out + sizeof(T) * i;
        if (m == block) decode_block<C, T, STREAMED>(codes, scale, m, at);
        else decode_block<C, T, false>(codes, scale, m, at);
        codes += num_code_bytes<C>(m);
    }
}

// streamed: whether values may go past the caches.
template <Code C, class T>
void decode(const u8* codes, const u8* scales, i64 n, i64 block, bool streamed, u8* out) {
    if (streamed && reinterpret_cast<u64>(out) % 16 == 0)
        decode_loop<C, T, true>(codes, scales, n, block, out);
    else decode_loop<C, T, false>(codes, scales, n, block, out);
}

}  // namespace
}  // namespace ZC_NS
