// The loops over one segment's part of a message, compiled once for every instruction set.
//
// ZC_NS names the copy. Inner loops have a constant number of steps, so that the compiler makes
// vector code without a remainder. Nothing here may have external linkage but the table: a shared
// symbol could end up as the widest copy on a machine that cannot run it.
#include "codec.h"
#include "table.h"

#if defined(__F16C__)
#include <immintrin.h>
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

template <class T> void copy(const u8* __restrict in, i64 n, u8* __restrict out) {
    for (i64 i = 0; i < n; ++i) store(out, i, canonical(load<T>(in, i)));
}

template <class T> void widen(const u8* __restrict in, i64 n, u8* __restrict out) {
    for (i64 i = 0; i < n; ++i) store(out, i, to_float(canonical(load<T>(in, i))));
}

template <class T, bool SATURATE, bool DIVIDE>
ZC_FN void narrow_loop(const u8* __restrict in, i64 n, float divisor, u8* __restrict out) {
    for (i64 i = 0; i < n; ++i) {
        float v = load<float>(in, i);
        store(out, i, from_float<T, SATURATE>(DIVIDE ? v / divisor : v));
    }
}

template <class T, bool SATURATE>
void narrow(const u8* __restrict in, i64 n, float divisor, u8* __restrict out) {
    if (divisor == 1.0f) narrow_loop<T, SATURATE, false>(in, n, divisor, out);
    else narrow_loop<T, SATURATE, true>(in, n, divisor, out);
}

ZC_FN u32 largest_key(const u8* in, i64 n) {
    u32 largest = 0;
    for (i64 i = 0; i < n; ++i) {
        u32 k = key(load<float>(in, i));
        largest = k > largest ? k : largest;
    }
    return largest;
}

template <int BITS> ZC_FN void quantise_block(const u8* __restrict in, i64 n, float inverse, u8* __restrict out) {
    if constexpr (BITS == 8) {
        for (i64 i = 0; i < n; ++i) out[i] = u8(quantise<BITS>(load<float>(in, i), inverse));
        return;
    }
    i64 low = (n + 1) / 2, high = n / 2;
    const u8* second = in + 4 * low;
    for (i64 i = 0; i < high; ++i) {
        u32 a = quantise<BITS>(load<float>(in, i), inverse) & 15u;
        u32 b = quantise<BITS>(load<float>(second, i), inverse) << 4;
        out[i] = u8(a | b);
    }
    if (low > high) out[high] = u8(quantise<BITS>(load<float>(in, high), inverse) & 15u);
}

template <int BITS>
void encode(const u8* __restrict in, i64 n, i64 block, u8* __restrict codes, u8* __restrict scales) {
    for (i64 i = 0; i < n; i += block) {
        i64 m = n - i < block ? n - i : block, nbytes = BITS == 8 ? m : (m + 1) / 2;
        const u8* x = in + 4 * i;
        Scale scale = scale_of<BITS>(largest_key(x, m));
        __builtin_memcpy(scales, &scale.stored, 2);
        if (scale.live) quantise_block<BITS>(x, m, scale.inverse, codes);
        else __builtin_memset(codes, 0, nbytes);
        codes += nbytes;
        scales += 2;
    }
}

template <class T, int N, bool ADD>
void sum_cast(const u8* const* codes, const u8* const*, i64 n, i64, u8* __restrict out) {
    const u8* wires[N];
    for (int w = 0; w < N; ++w) wires[w] = codes[w];
    for (i64 i = 0; i < n; ++i) {
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

// The values at i of N wires, and at i of out where ADD, summed in ascending order.
template <int BITS, int NIBBLE, int N, bool ADD>
ZC_FN void sum_at(const u8* const (&codes)[N], const float (&scales)[N], i64 i, u8* out, i64 at) {
    float total = value_of<BITS, NIBBLE>(codes[0][i], scales[0]);
    if (ADD) total = load<float>(out, at) + total;
    for (int w = 1; w < N; ++w) total += value_of<BITS, NIBBLE>(codes[w][i], scales[w]);
    store(out, at, total);
}

template <int BITS, int N, bool ADD>
void sum_codes(const u8* const* all_codes, const u8* const* all_scales, i64 n, i64 block,
               u8* __restrict out) {
    const u8* codes[N];
    float scales[N];
    for (int w = 0; w < N; ++w) codes[w] = all_codes[w];
    for (i64 i = 0; i < n; i += block, out += 4 * block) {
        i64 m = n - i < block ? n - i : block, half = (m + 1) / 2;
        for (int w = 0; w < N; ++w)
            scales[w] = decoding_scale(load<bf16>(all_scales[w], i / block).pattern);
        if constexpr (BITS == 8) {
            for (i64 j = 0; j < m; ++j) sum_at<BITS, 0, N, ADD>(codes, scales, j, out, j);
        } else {
            for (i64 j = 0; j < m / 2; ++j) {
                sum_at<BITS, 0, N, ADD>(codes, scales, j, out, j);
                sum_at<BITS, 1, N, ADD>(codes, scales, j, out, half + j);
            }
            if (m % 2) sum_at<BITS, 0, N, ADD>(codes, scales, m / 2, out, m / 2);
        }
        for (int w = 0; w < N; ++w) codes[w] += BITS == 8 ? m : half;
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
    {nullptr, nullptr, nullptr, encode<8>, encode<4>},
    {ZC_SUMS(sum_cast, float), ZC_SUMS(sum_cast, bf16), ZC_SUMS(sum_cast, fp16),
     ZC_SUMS(sum_codes, 8), ZC_SUMS(sum_codes, 4)},
};

}  // namespace ZC_NS
