// The loops over one segment's part of a message, compiled once for every instruction set.
//
// ZC_NS names the copy. Each loop does what it can in vectors (simd.h, where there is one for the
// machine) and the rest one by one (codec.h), with the same bits. Nothing here may have external
// linkage but the table: a shared symbol could end up as the widest copy on a machine that cannot
// run it.
#include "codec.h"
#include "table.h"

#if defined(__SSE2__)
#define ZC_SIMD 1
#include "simd.h"
#else
#define ZC_SIMD 0
#endif

namespace ZC_NS {
namespace {

struct __attribute__((packed, may_alias)) AnyFloat {
    float value;
};
struct __attribute__((packed, may_alias)) AnyHalf {
    u16 value;
};

ZC_FN float load(const float*, const u8* in, i64 i) {
    return reinterpret_cast<const AnyFloat*>(in)[i].value;
}
ZC_FN bf16 load(const bf16*, const u8* in, i64 i) {
    return {reinterpret_cast<const AnyHalf*>(in)[i].value};
}
ZC_FN fp16 load(const fp16*, const u8* in, i64 i) {
    return {reinterpret_cast<const AnyHalf*>(in)[i].value};
}
template <class T> ZC_FN T load(const u8* in, i64 i) {
    return load(static_cast<const T*>(nullptr), in, i);
}

ZC_FN void store(u8* out, i64 i, float v) { reinterpret_cast<AnyFloat*>(out)[i].value = v; }
ZC_FN void store(u8* out, i64 i, bf16 v) { reinterpret_cast<AnyHalf*>(out)[i].value = v.pattern; }
ZC_FN void store(u8* out, i64 i, fp16 v) { reinterpret_cast<AnyHalf*>(out)[i].value = v.pattern; }

template <class T, bool SATURATE> ZC_FN T from_float(float v) {
    if constexpr (sizeof(T) == 4) return canonical(v);
    else if constexpr (__is_same(T, bf16)) return to_bf16(v);
    else return to_fp16<SATURATE>(v);
}

template <class T> constexpr bool IN_VECTORS = ZC_SIMD;
#if ZC_SIMD && !defined(__F16C__)
template <> constexpr bool IN_VECTORS<fp16> = false;
#endif

#if ZC_SIMD
enum { ROW = 32, VECTORS = ROW / LANES };  // the smallest block, and the vectors that it fills

// The lanes from element i on, as float32; NaN in any form.
template <class T> ZC_FN F lanes(const u8* in, i64 i) {
    if constexpr (sizeof(T) == 4) return load_lanes(in + 4 * i);
    else if constexpr (__is_same(T, bf16)) return flt(left<16>(load_halves(in + 2 * i)));
#if defined(__F16C__)
    else return load_fp16(in + 2 * i);
#endif
}

template <class T, bool SATURATE> ZC_FN void store_rounded(u8* out, i64 i, F v) {
    if constexpr (sizeof(T) == 4) {
        store_lanes(out + 4 * i, flt(where_nan(v, splat(u32(NAN_F32)), bits(v))));
    } else if constexpr (__is_same(T, bf16)) {
        I odd = both(right<16>(bits(v)), splat(1u));
        I rounded = right<16>(add(add(bits(v), splat(0x7FFFu)), odd));
        store_halves(out + 2 * i, where_nan(v, splat(u32(NAN_BF16)), rounded));
    }
#if defined(__F16C__)
    else {
        F bounded = SATURATE ? within_fp16(v) : v;
        store_halves(out + 2 * i, where_nan(v, splat(u32(NAN_FP16)), round_fp16(bounded)));
    }
#endif
}
#endif

template <class T> void copy(const u8* __restrict in, i64 n, u8* __restrict out) {
    for (i64 i = 0; i < n; ++i) store(out, i, canonical(load<T>(in, i)));
}

template <class T> void widen(const u8* __restrict in, i64 n, u8* __restrict out) {
    i64 i = 0;
#if ZC_SIMD
    if constexpr (IN_VECTORS<T>)
        for (; i + LANES <= n; i += LANES) store_rounded<float, false>(out, i, lanes<T>(in, i));
#endif
    for (; i < n; ++i) store(out, i, to_float(canonical(load<T>(in, i))));
}

template <class T, bool SATURATE, bool DIVIDE>
ZC_FN void narrow_loop(const u8* __restrict in, i64 n, float divisor, u8* __restrict out) {
    i64 i = 0;
#if ZC_SIMD
    if constexpr (IN_VECTORS<T>)
        for (F by = splat(divisor); i + LANES <= n; i += LANES) {
            F v = lanes<float>(in, i);
            store_rounded<T, SATURATE>(out, i, DIVIDE ? v / by : v);
        }
#endif
    for (; i < n; ++i) {
        float v = load<float>(in, i);
        store(out, i, from_float<T, SATURATE>(DIVIDE ? v / divisor : v));
    }
}

template <class T, bool SATURATE>
void narrow(const u8* __restrict in, i64 n, float divisor, u8* __restrict out) {
    if (divisor == 1.0f) narrow_loop<T, SATURATE, false>(in, n, divisor, out);
    else narrow_loop<T, SATURATE, true>(in, n, divisor, out);
}

// Compared as unsigned numbers, patterns of negative values are the largest, as signed numbers those
// of positive ones; among either, the larger magnitude wins. So two plain maxima find both extremes.
template <class T> ZC_FN u32 largest_key(const u8* in, i64 n) {
    u32 largest = 0;
    i64 i = 0;
#if ZC_SIMD
    if constexpr (IN_VECTORS<T>)
        if (n >= ROW) {
            I negative[VECTORS], positive[VECTORS];
            for (int k = 0; k < VECTORS; ++k)
                negative[k] = positive[k] = bits(lanes<T>(in, k * LANES));
            for (i = ROW; i + ROW <= n; i += ROW)
                for (int k = 0; k < VECTORS; ++k) {
                    I pattern = bits(lanes<T>(in, i + k * LANES));
                    negative[k] = max_unsigned(negative[k], pattern);
                    positive[k] = max_signed(positive[k], pattern);
                }
            for (int k = 1; k < VECTORS; ++k) {
                negative[0] = max_unsigned(negative[0], negative[k]);
                positive[0] = max_signed(positive[0], positive[k]);
            }
            I a = either(left<1>(negative[0]), right<31>(negative[0]));
            I b = either(left<1>(positive[0]), right<31>(positive[0]));
            largest = largest_unsigned(max_unsigned(a, b));
        }
#endif
    for (; i < n; ++i) {
        u32 k = key(to_float(load<T>(in, i)));
        largest = k > largest ? k : largest;
    }
    return largest;
}

// Blocks are encoded in groups of GROUP elements: a group is measured, its scales are worked out, then
// it is quantised. So the divisions of several blocks overlap, and while a group is quantised from
// the L1 cache the next one is fetched. Longer groups, and a longer lead, were slower.
const i64 GROUP = 512;

#if ZC_SIMD
// The codes of the 16 elements from i on, one in a byte.
template <class T, int BITS> ZC_FN __m128i quantised(const u8* in, i64 i, F inverse) {
    __builtin_prefetch(in + sizeof(T) * (i + GROUP));
    F scaled[16 / LANES];
    for (int k = 0; k < 16 / LANES; ++k) scaled[k] = lanes<T>(in, i + k * LANES) * inverse;
    return round_to_bytes<BITS>(scaled);
}

ZC_FN void store_bytes(u8* out, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), v); }
#endif

template <class T>
ZC_FN void quantise8(const u8* __restrict in, i64 n, const Scale& scale, u8* __restrict out) {
    i64 i = 0;
#if ZC_SIMD
    if constexpr (IN_VECTORS<T>) {
        __m128i live = _mm_set1_epi8(char(scale.live));
        for (F by = splat(scale.inverse); i + 32 <= n; i += 32) {
            __m128i first = quantised<T, 8>(in, i, by), second = quantised<T, 8>(in, i + 16, by);
            store_bytes(out + i, _mm_and_si128(first, live));
            store_bytes(out + i + 16, _mm_and_si128(second, live));
        }
    }
#endif
    for (; i < n; ++i)
        out[i] = u8(quantise<8>(to_float(load<T>(in, i)), scale.inverse) & scale.live);
}

template <class T>
ZC_FN void quantise4(const u8* __restrict in, i64 n, const Scale& scale, u8* __restrict out) {
    i64 half = (n + 1) / 2, i = 0;
#if ZC_SIMD
    if constexpr (IN_VECTORS<T>) {
        __m128i low = _mm_set1_epi8(char(scale.live & 15)), high = _mm_set1_epi8(char(scale.live & 240));
        for (F by = splat(scale.inverse); i + 16 <= n / 2; i += 16) {
            __m128i first = quantised<T, 4>(in, i, by), second = quantised<T, 4>(in, half + i, by);
            second = _mm_and_si128(_mm_slli_epi16(second, 4), high);
            store_bytes(out + i, _mm_or_si128(_mm_and_si128(first, low), second));
        }
    }
#endif
    for (; i < half; ++i) {
        u32 first = quantise<4>(to_float(load<T>(in, i)), scale.inverse) & 15u, second = 0;
        if (half + i < n) second = quantise<4>(to_float(load<T>(in, half + i)), scale.inverse) << 4;
        out[i] = u8((first | second) & scale.live);
    }
}

template <class T, int BITS>
void encode(const u8* __restrict in, i64 n, i64 block, u8* __restrict codes, u8* __restrict scales) {
    i64 group = block > GROUP ? block : GROUP;
    for (i64 begin = 0; begin < n; begin += group) {
        i64 end = n - begin < group ? n : begin + group, count = 0;
        Scale found[GROUP / 32];
        for (i64 i = begin; i < end; i += block)
            found[count++].extreme =
                largest_key<T>(in + sizeof(T) * i, end - i < block ? end - i : block);
        for (i64 k = 0; k < count; ++k) found[k] = scale_of<BITS>(found[k].extreme);
        for (i64 i = begin, k = 0; k < count; i += block, ++k) {
            i64 m = end - i < block ? end - i : block;
            const u8* x = in + sizeof(T) * i;
            __builtin_memcpy(scales, &found[k].stored, 2);
            if (BITS == 8) quantise8<T>(x, m, found[k], codes);
            else quantise4<T>(x, m, found[k], codes);
            codes += BITS == 8 ? m : (m + 1) / 2;
            scales += 2;
        }
    }
}

template <class T, int N, bool ADD>
void sum_cast(const u8* const* codes, const u8* const*, i64 n, i64, u8* __restrict out) {
    const u8* wires[N];
    for (int w = 0; w < N; ++w) wires[w] = codes[w];
    i64 i = 0;
#if ZC_SIMD
    if constexpr (IN_VECTORS<T>)
        for (; i + LANES <= n; i += LANES) {
            F total = lanes<T>(wires[0], i);
            if (ADD) total = lanes<float>(out, i) + total;
            for (int w = 1; w < N; ++w) total = total + lanes<T>(wires[w], i);
            store_lanes(out + 4 * i, total);
        }
#endif
    for (; i < n; ++i) {
        float total = to_float(load<T>(wires[0], i));
        if (ADD) total = load<float>(out, i) + total;
        for (int w = 1; w < N; ++w) total += to_float(load<T>(wires[w], i));
        store(out, i, total);
    }
}

// NIBBLE 0 is the low one; a code of 8 bits has only that.
template <int BITS, int NIBBLE> ZC_FN float value_of(u8 packed, float scale) {
    u8 at_top = BITS == 8 || NIBBLE == 1 ? packed : u8(packed << 4);
    return float(static_cast<signed char>(at_top) >> (8 - BITS)) * scale;
}

// The values at i of N wires, and at `at` of out where ADD, summed in ascending order.
template <int BITS, int NIBBLE, int N, bool ADD>
ZC_FN void sum_at(const u8* const (&codes)[N], const float (&scales)[N], i64 i, u8* out, i64 at) {
    float total = value_of<BITS, NIBBLE>(codes[0][i], scales[0]);
    if (ADD) total = load<float>(out, at) + total;
    for (int w = 1; w < N; ++w) total += value_of<BITS, NIBBLE>(codes[w][i], scales[w]);
    store(out, at, total);
}

template <int N, bool ADD>
ZC_FN void sum8(const u8* const (&codes)[N], const float (&scales)[N], i64 n, u8* __restrict out) {
    i64 i = 0;
#if ZC_SIMD
    for (; i + LANES <= n; i += LANES) {
        F total = from_int(load_bytes(codes[0] + i)) * splat(scales[0]);
        if (ADD) total = lanes<float>(out, i) + total;
        for (int w = 1; w < N; ++w)
            total = total + from_int(load_bytes(codes[w] + i)) * splat(scales[w]);
        store_lanes(out + 4 * i, total);
    }
#endif
    for (; i < n; ++i) sum_at<8, 0, N, ADD>(codes, scales, i, out, i);
}

template <int N, bool ADD>
ZC_FN void sum4(const u8* const (&codes)[N], const float (&scales)[N], i64 n, u8* __restrict out) {
    i64 half = (n + 1) / 2, i = 0;
#if ZC_SIMD
    for (; i + LANES <= n / 2; i += LANES) {
        F low, high;
        for (int w = 0; w < N; ++w) {
            I packed = load_bytes(codes[w] + i);
            F a = from_int(right_signed<28>(left<28>(packed))) * splat(scales[w]);
            F b = from_int(right_signed<4>(packed)) * splat(scales[w]);
            low = w ? low + a : ADD ? lanes<float>(out, i) + a : a;
            high = w ? high + b : ADD ? lanes<float>(out, half + i) + b : b;
        }
        store_lanes(out + 4 * i, low);
        store_lanes(out + 4 * (half + i), high);
    }
#endif
    for (; i < n / 2; ++i) {
        sum_at<4, 0, N, ADD>(codes, scales, i, out, i);
        sum_at<4, 1, N, ADD>(codes, scales, i, out, half + i);
    }
    if (i < half) sum_at<4, 0, N, ADD>(codes, scales, i, out, i);
}

template <int BITS, int N, bool ADD>
void sum_codes(const u8* const* all_codes, const u8* const* all_scales, i64 n, i64 block,
               u8* __restrict out) {
    const u8* codes[N];
    float scales[N];
    for (int w = 0; w < N; ++w) codes[w] = all_codes[w];
    for (i64 i = 0, k = 0; i < n; i += block, ++k) {
        i64 m = n - i < block ? n - i : block;
        for (int w = 0; w < N; ++w)
            scales[w] = decoding_scale(load<bf16>(all_scales[w], k).pattern);
        if (BITS == 8) sum8<N, ADD>(codes, scales, m, out + 4 * i);
        else sum4<N, ADD>(codes, scales, m, out + 4 * i);
        for (int w = 0; w < N; ++w) codes[w] += BITS == 8 ? m : (m + 1) / 2;
    }
}

}  // namespace

#define ZC_SUMS(name, arg)                                            \
    {                                                                 \
        {name<arg, 1, false>, name<arg, 2, false>, name<arg, 4, false>}, \
        {name<arg, 1, true>, name<arg, 2, true>, name<arg, 4, true>}     \
    }

extern const zcomm::Table table;
const zcomm::Table table = {
    {copy<float>, copy<bf16>, copy<fp16>},
    {copy<float>, widen<bf16>, widen<fp16>},
    {narrow<float, false>, narrow<bf16, false>, narrow<fp16, false>},
    narrow<fp16, true>,
    {{encode<float, 8>, encode<float, 4>},
     {encode<bf16, 8>, encode<bf16, 4>},
     {encode<fp16, 8>, encode<fp16, 4>}},
    {ZC_SUMS(sum_cast, float), ZC_SUMS(sum_cast, bf16), ZC_SUMS(sum_cast, fp16),
     ZC_SUMS(sum_codes, 8), ZC_SUMS(sum_codes, 4)},
};

}  // namespace ZC_NS
