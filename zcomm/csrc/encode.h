// Loops that write the codes and scales of a tile.
#pragma once

#include "random.h"

namespace ZC_NS {
namespace {

#if ZC_SIMD
// The float32 key of the value of T that has a given key.
template <class T> ZC_FN u32 widened_key(u32 key_of_t) {
    if constexpr (sizeof(T) == 4) return key_of_t;
    else return key(to_float(T{u16(key_of_t >> 1 | key_of_t << 15)}));
}
#endif

// The largest key of n values, as the float32 key of its element.
//
// Compared as unsigned numbers, patterns of negative values are the largest, as signed numbers
// those of positive ones; among either the larger magnitude wins. So two plain maxima find both
// extremes. Patterns of 16-bit values are in the order of their float32 keys: only the winner is
// converted.
template <class T> ZC_FN u32 largest_key(const u8* in, i64 n) {
    u32 largest = 0;
    i64 i = 0;
#if ZC_SIMD
    const int step = sizeof(I) / sizeof(T), vectors = ROW / step;
    if (n >= ROW) {
        I negative[vectors], positive[vectors];
        for (int k = 0; k < vectors; ++k)
            negative[k] = positive[k] = load_patterns(in + sizeof(I) * k);
        for (i = ROW; i + ROW <= n; i += ROW)
            for (int k = 0; k < vectors; ++k) {
                I pattern = load_patterns(in + sizeof(T) * i + sizeof(I) * k);
                negative[k] = max_unsigned<sizeof(T)>(negative[k], pattern);
                positive[k] = max_signed<sizeof(T)>(positive[k], pattern);
            }
        for (int k = 1; k < vectors; ++k) {
            negative[0] = max_unsigned<sizeof(T)>(negative[0], negative[k]);
            positive[0] = max_signed<sizeof(T)>(positive[0], positive[k]);
        }
        I a = sign_last<sizeof(T)>(negative[0]), b = sign_last<sizeof(T)>(positive[0]);
        largest = widened_key<T>(largest_unsigned<sizeof(T)>(max_unsigned<sizeof(T)>(a, b)));
    }
#endif
    for (; i < n; ++i) {
        u32 k = key(to_float(load<T>(in, i)));
        largest = k > largest ? k : largest;
    }
    return largest;
}

// Blocks are encoded in groups of GROUP elements: a group is measured, its scales are worked out,
// then it is quantised. So the divisions of several blocks overlap, and while a group is quantised
// from the L1 cache the next one is fetched. Longer groups, and a longer lead, were slower.
const i64 GROUP = 1024;

// The code of a value in units of the scale, in the low bits; `drawn` lies beside the elements.
template <Code C, Rounding R> ZC_FN u32 code_of(float scaled, const u8* drawn, i64 i) {
    if constexpr (C == E4M3 || C == E5M2) return fp8_code<C>(scaled);
    else if constexpr (R == STOCHASTIC) return stochastic_code<C>(scaled, load<float>(drawn, i));
    else return nearest_code<C>(scaled);
}

#if ZC_SIMD
template <Code C, Rounding R> ZC_FN I code_lanes(F scaled, const u8* drawn, i64 i) {
    if constexpr (C == E4M3 || C == E5M2) return fp8_codes<C>(scaled);
    else if constexpr (R == STOCHASTIC)
        return stochastic_codes<C>(scaled, lanes<float>(drawn, i));
    else return nearest(scaled);
}

// The codes of the elements from i on, VECTORS * LANES of them.
template <class T, Code C, Rounding R, int VECTORS>
ZC_FN void codes_at(const u8* in, i64 i, F inverse, const u8* drawn, I (&codes)[VECTORS]) {
    const u8* ahead = in + sizeof(T) * (i + GROUP);
    for (int k = 0; k < int(sizeof(T)) * VECTORS * LANES; k += 64) __builtin_prefetch(ahead + k);
    for (int k = 0; k < VECTORS; ++k)
        codes[k] = code_lanes<C, R>(lanes<T>(in, i + k * LANES) * inverse, drawn, i + k * LANES);
}
#endif

template <class T, Code C, Rounding R, bool STREAMED>
ZC_FN void quantise8(const u8* __restrict in, i64 n, const Scale& scale, const u8* drawn,
                     u8* __restrict out) {
    i64 i = 0;
#if ZC_SIMD
    F by = splat(scale.inverse);
    I live = splat(scale.live * 0x01010101u), quad[4], sixteen[SIXTEEN];
    for (; i + QUAD <= n; i += QUAD) {
        codes_at<T, C, R>(in, i, by, drawn, quad);
        store_bits<STREAMED>(out + i, both(in_order(mixed_bytes_of(quad)), live));
    }
    for (; i + 16 <= n; i += 16) {
        codes_at<T, C, R>(in, i, by, drawn, sixteen);
        store_sixteen(out + i, bytes_of(sixteen), scale.live);
    }
#endif
    for (; i < n; ++i) {
        float scaled = to_float(load<T>(in, i)) * scale.inverse;
        out[i] = u8(code_of<C, R>(scaled, drawn, i) & scale.live);
    }
}

template <class T, Rounding R, bool STREAMED>
ZC_FN void quantise4(const u8* __restrict in, i64 n, const Scale& scale, const u8* drawn,
                     u8* __restrict out) {
    i64 half = (n + 1) / 2, i = 0;
#if ZC_SIMD
    F by = splat(scale.inverse);
    I live = splat(scale.live * 0x01010101u), low[4], high[4];
    for (; i + QUAD <= n / 2; i += QUAD) {
        codes_at<T, INT4, R>(in, i, by, drawn, low);
        codes_at<T, INT4, R>(in, half + i, by, drawn, high);
        I packed = nibbles(within_four_bits(mixed_bytes_of(low)),
                           within_four_bits(mixed_bytes_of(high)));
        store_bits<STREAMED>(out + i, both(in_order(packed), live));
    }
    I first[SIXTEEN], second[SIXTEEN];
    for (; i + 16 <= n / 2; i += 16) {
        codes_at<T, INT4, R>(in, i, by, drawn, first);
        codes_at<T, INT4, R>(in, half + i, by, drawn, second);
        store_sixteen(out + i, nibbles_of(bytes_of(first), bytes_of(second)), scale.live);
    }
#endif
    auto code = [&](i64 at) {
        return code_of<INT4, R>(to_float(load<T>(in, at)) * scale.inverse, drawn, at) & 15u;
    };
    for (; i < half; ++i) {
        u32 high = half + i < n ? code(half + i) << 4 : 0;
        out[i] = u8((code(i) | high) & scale.live);
    }
}

template <class T, Code C, Rounding R, bool STREAMED>
ZC_FN void encode_loop(const u8* __restrict in, i64 n, i64 block, Random random,
                       u8* __restrict codes, u8* __restrict scales) {
    alignas(64) u8 drawn[R == STOCHASTIC ? 4 * (zcomm::TILE + DRAWN) : 1];
    if (R == STOCHASTIC) draw<sizeof(T)>(random, n, drawn, in);
    i64 group = block > GROUP ? block : GROUP;
    for (i64 begin = 0; begin < n; begin += group) {
        i64 end = n - begin < group ? n : begin + group, count = 0;
        Scale found[GROUP / 32];
        for (i64 i = begin; i < end; i += block)
            found[count++].extreme =
                largest_key<T>(in + sizeof(T) * i, end - i < block ? end - i : block);
        for (i64 k = 0; k < count; ++k) found[k] = scale_of<C, R>(found[k].extreme);
        for (i64 i = begin, k = 0; k < count; i += block, ++k) {
            i64 m = end - i < block ? end - i : block;
            const u8 *x = in + sizeof(T) * i, *u = R == STOCHASTIC ? drawn + 4 * i : drawn;
            __builtin_memcpy(scales, &found[k].stored, 2);
            if constexpr (C == INT4) quantise4<T, R, STREAMED>(x, m, found[k], u, codes);
            else quantise8<T, C, R, STREAMED>(x, m, found[k], u, codes);
            codes += C == INT4 ? (m + 1) / 2 : m;
            scales += 2;
        }
    }
}

// streamed: whether codes may go past the caches.
template <class T, Code C, Rounding R>
void encode(const u8* in, i64 n, i64 block, Random random, bool streamed, u8* codes, u8* scales) {
    if (R == NEAREST && streamed && reinterpret_cast<u64>(codes) % 16 == 0)
        encode_loop<T, C, R, R == NEAREST>(in, n, block, random, codes, scales);
    else encode_loop<T, C, R, false>(in, n, block, random, codes, scales);
}

}  // namespace
}  // namespace ZC_NS
