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
enum { ROW = 32 };  // the smallest block fills whole vectors

// The lanes from element i on, as float32; NaN in any form.
template <class T> ZC_FN F lanes(const u8* in, i64 i) {
    if constexpr (sizeof(T) == 4) return load_lanes(in + 4 * i);
    else if constexpr (__is_same(T, bf16)) return flt(left<16>(load_halves(in + 2 * i)));
#if defined(__F16C__)
    else return load_fp16(in + 2 * i);
#endif
}

// The float32 key of the value of T that has a given key.
template <class T> ZC_FN u32 widened_key(u32 key_of_t) {
    if constexpr (sizeof(T) == 4) return key_of_t;
    else return key(to_float(T{u16(key_of_t >> 1 | key_of_t << 15)}));
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
        F bounded = SATURATE ? within_fp16(v) : v;  // the one NaN of float32 becomes that of float16
        store_fp16(out + 2 * i, flt(where_nan(v, splat(u32(NAN_F32)), bits(bounded))));
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

enum Division { BY_ONE, BY_POWER_OF_TWO, BY_ANY };

// divisor: its reciprocal for a power of two, which gives the same bits and is faster.
template <Division D, class V> ZC_FN V divided(V v, V divisor) {
    return D == BY_ONE ? v : D == BY_POWER_OF_TWO ? v * divisor : v / divisor;
}

template <class T, bool SATURATE, Division D>
ZC_FN void narrow_loop(const u8* __restrict in, i64 n, float divisor, u8* __restrict out) {
    i64 i = 0;
#if ZC_SIMD
    if constexpr (IN_VECTORS<T>)
        for (F by = splat(divisor); i + LANES <= n; i += LANES)
            store_rounded<T, SATURATE>(out, i, divided<D>(lanes<float>(in, i), by));
#endif
    for (; i < n; ++i)
        store(out, i, from_float<T, SATURATE>(divided<D>(load<float>(in, i), divisor)));
}

template <class T, bool SATURATE>
void narrow(const u8* __restrict in, i64 n, float divisor, u8* __restrict out) {
    bool power_of_two = (bits(divisor) & 0x7FFFFFu) == 0;
    if (divisor == 1.0f) narrow_loop<T, SATURATE, BY_ONE>(in, n, divisor, out);
    else if (power_of_two) narrow_loop<T, SATURATE, BY_POWER_OF_TWO>(in, n, 1.0f / divisor, out);
    else narrow_loop<T, SATURATE, BY_ANY>(in, n, divisor, out);
}

// The largest key of n values, as the float32 key of its element.
//
// Compared as unsigned numbers, patterns of negative values are the largest, as signed numbers
// those of positive ones; among either the larger magnitude wins. So two plain maxima find both extremes.
// Patterns of 16-bit values are in the order of their float32 keys: only the winner is converted.
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
const i64 GROUP = 512;

#if ZC_SIMD
// The 16 elements from i on, times the inverse scale.
template <class T> ZC_FN void scale_lanes(const u8* in, i64 i, F inverse, F (&scaled)[16 / LANES]) {
    __builtin_prefetch(in + sizeof(T) * (i + GROUP));
    for (int k = 0; k < 16 / LANES; ++k) scaled[k] = lanes<T>(in, i + k * LANES) * inverse;
}
#endif

template <class T>
ZC_FN void quantise8(const u8* __restrict in, i64 n, const Scale& scale, u8* __restrict out) {
    i64 i = 0;
#if ZC_SIMD
    if constexpr (IN_VECTORS<T>) {
        F by = splat(scale.inverse), first[16 / LANES], second[16 / LANES];
        for (; i + 32 <= n; i += 32) {
            scale_lanes<T>(in, i, by, first);
            scale_lanes<T>(in, i + 16, by, second);
            store_codes8(out + i, first, second, scale.live);
        }
    }
#endif
    for (; i < n; ++i)
        out[i] = u8(nearest_code<INT8>(to_float(load<T>(in, i)) * scale.inverse) & scale.live);
}

template <class T>
ZC_FN void quantise4(const u8* __restrict in, i64 n, const Scale& scale, u8* __restrict out) {
    i64 half = (n + 1) / 2, i = 0;
#if ZC_SIMD
    if constexpr (IN_VECTORS<T>) {
        F by = splat(scale.inverse), low[16 / LANES], high[16 / LANES];
        for (; i + 16 <= n / 2; i += 16) {
            scale_lanes<T>(in, i, by, low);
            scale_lanes<T>(in, half + i, by, high);
            store_codes4(out + i, low, high, scale.live);
        }
    }
#endif
    for (; i < half; ++i) {
        u32 first = nearest_code<INT4>(to_float(load<T>(in, i)) * scale.inverse) & 15u, second = 0;
        if (half + i < n) second = nearest_code<INT4>(to_float(load<T>(in, half + i)) * scale.inverse) << 4;
        out[i] = u8((first | second) & scale.live);
    }
}

template <class T, int BITS>
void encode(const u8* __restrict in, i64 n, i64 block, u8* __restrict codes,
            u8* __restrict scales) {
    i64 group = block > GROUP ? block : GROUP;
    for (i64 begin = 0; begin < n; begin += group) {
        i64 end = n - begin < group ? n : begin + group, count = 0;
        Scale found[GROUP / 32];
        for (i64 i = begin; i < end; i += block)
            found[count++].extreme =
                largest_key<T>(in + sizeof(T) * i, end - i < block ? end - i : block);
        for (i64 k = 0; k < count; ++k) found[k] = scale_of<BITS == 8 ? INT8 : INT4, NEAREST>(found[k].extreme);
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
