// Elements in memory of any alignment, one by one and in vectors, and their three dtypes.
//
// T is float, bf16 or fp16 throughout. ZC_SIMD says whether there are vectors for this processor; the
// functions on F exist only then.
#pragma once

#include "codec.h"

#if !defined(ZC_SIMD)
#if defined(__SSE2__)
#define ZC_SIMD 1
#else
#define ZC_SIMD 0
#endif
#endif
#if ZC_SIMD
#include "simd.h"
#endif

namespace ZC_NS {
namespace {

using zcomm::Random;

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

#if ZC_SIMD
// The lanes from element i on, as float32; NaN in any form.
template <class T> ZC_FN F lanes(const u8* in, i64 i) {
    if constexpr (sizeof(T) == 4) return load_lanes(in + 4 * i);
    else if constexpr (__is_same(T, bf16)) return flt(left<16>(load_halves(in + 2 * i)));
    else return load_fp16(in + 2 * i);
}

// STREAMED: past the caches; out is then a multiple of 16.
template <bool STREAMED> ZC_FN void store_bits(u8* out, I v) {
    if (STREAMED) stream_patterns(out, v);
    else store_patterns(out, v);
}

// from_float in 16 bits.
template <class T, bool SATURATE> ZC_FN H rounded_halves(F v) {
    if constexpr (__is_same(T, bf16)) {
        I odd = both(right<16>(bits(v)), splat(1u));
        I rounded = right<16>(add(add(bits(v), splat(0x7FFFu)), odd));
        return halves_of(where_nan(v, splat(u32(NAN_BF16)), rounded));
    } else {
        F bounded = SATURATE ? within_fp16(v) : v;
        // The one NaN of float32 becomes that of float16.
        return fp16_of(flt(where_nan(v, splat(u32(NAN_F32)), bits(bounded))));
    }
}

template <class T, bool SATURATE, bool STREAMED = false>
ZC_FN void store_rounded(u8* out, i64 i, F v) {
    if constexpr (sizeof(T) == 4)
        store_bits<STREAMED>(out + 4 * i, where_nan(v, splat(u32(NAN_F32)), bits(v)));
    else if (STREAMED) stream_halves(out + 2 * i, rounded_halves<T, SATURATE>(v));
    else store_halves(out + 2 * i, rounded_halves<T, SATURATE>(v));
}
#endif

}  // namespace
}  // namespace ZC_NS
