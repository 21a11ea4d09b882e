// The arithmetic of the codec, one element or one block at a time, as docs/numerics.md defines it.
//
// Plain C++17 without an include: the same text serves the CPU loops and a run-time compiler for
// another machine. ZC_NS keeps copies that were compiled for different instruction sets apart: the
// linker would otherwise keep any one of them for all. Do not assume that values are finite.
#pragma once

#ifndef ZC_NS
#define ZC_NS zc
#endif
#ifndef ZC_FN
#define ZC_FN static inline __attribute__((always_inline))
#endif

namespace ZC_NS {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

struct bf16 {
    u16 pattern;
};
struct fp16 {
    u16 pattern;
};

enum : u32 {
    SIGN = 0x80000000u,
    INFINITY_F32 = 0x7F800000u,
    NAN_F32 = 0x7FC00000u,
    NAN_BF16 = 0x7FC0u,
    NAN_FP16 = 0x7E00u,
    INFINITY_FP16 = 0x7C00u,
    LARGEST_FP16 = 0x7BFFu,
    LARGEST_ROUNDED_UP = 0x7F7F0000u,
    FLUSHED_BELOW = (127u - 100u) << 23,  // 2^-100
};

ZC_FN u32 bits(float value) {
    u32 result;
    __builtin_memcpy(&result, &value, 4);
    return result;
}

ZC_FN float flt(u32 pattern) {
    float result;
    __builtin_memcpy(&result, &pattern, 4);
    return result;
}

ZC_FN float to_float(float value) { return value; }

ZC_FN float to_float(bf16 value) { return flt(u32(value.pattern) << 16); }

// A subnormal becomes the difference of two normal numbers: no float32 subnormal takes part.
ZC_FN float to_float(fp16 value) {
    u32 magnitude = value.pattern & 0x7FFFu, sign = u32(value.pattern & 0x8000u) << 16;
    u32 normal = (magnitude << 13) + (112u << 23);
    u32 special = (magnitude << 13) | INFINITY_F32;
    u32 subnormal = bits(flt((113u << 23) | (magnitude << 13)) - flt(113u << 23));
    u32 result = magnitude >= 0x400u ? normal : subnormal;
    return flt((magnitude >= INFINITY_FP16 ? special : result) | sign);
}

ZC_FN bool is_nan(float value) { return (bits(value) & ~SIGN) > INFINITY_F32; }

// The one form of NaN; other values as they are.
ZC_FN float canonical(float value) { return is_nan(value) ? flt(NAN_F32) : value; }

ZC_FN bf16 canonical(bf16 value) {
    return {u16((value.pattern & 0x7FFFu) > (INFINITY_F32 >> 16) ? u32(NAN_BF16) : value.pattern)};
}

ZC_FN fp16 canonical(fp16 value) {
    return {u16((value.pattern & 0x7FFFu) > INFINITY_FP16 ? u32(NAN_FP16) : value.pattern)};
}

ZC_FN bf16 to_bf16(float value) {
    u32 pattern = bits(value);
    u32 rounded = (pattern + 0x7FFFu + ((pattern >> 16) & 1u)) >> 16;
    return {u16(is_nan(value) ? u32(NAN_BF16) : rounded)};
}

// SATURATE: a finite value beyond the range is stored as the largest one, not as infinity.
template <bool SATURATE> ZC_FN fp16 to_fp16(float value) {
    u32 pattern = bits(value), magnitude = pattern & ~SIGN, sign = (pattern & SIGN) >> 16;
    u32 normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    u32 subnormal = bits(flt(magnitude) + 0.5f) - bits(0.5f);
    u32 finite = magnitude >= (113u << 23) ? normal : subnormal;
    u32 beyond = SATURATE && magnitude < INFINITY_F32 ? LARGEST_FP16 : INFINITY_FP16;
    u32 result = magnitude >= bits(65520.0f) ? beyond : finite;
    return {u16(is_nan(value) ? u32(NAN_FP16) : (result | sign))};
}

// The largest key belongs to the element of largest magnitude, the negative one in a tie.
ZC_FN u32 key(float value) { return (bits(value) << 1) | (bits(value) >> 31); }

struct Scale {
    u32 extreme;    // the largest key of the block
    float inverse;  // of the stored scale
    u16 stored;     // bfloat16
    u8 live;        // all ones, or 0: every code of the block is 0
};

// The scale of a block whose largest key is given: bfloat16, its magnitude rounded up unless
// the extreme would then decode to infinity.
template <int BITS> ZC_FN Scale scale_of(u32 largest_key) {
    u32 extreme = (largest_key >> 1) | (largest_key << 31), magnitude = extreme & ~SIGN;
    if (magnitude >= INFINITY_F32) {
        bool nan = magnitude > INFINITY_F32;
        u32 infinity = ((~extreme & SIGN) | INFINITY_F32) >> 16;
        return {largest_key, 0.0f, u16(nan ? u32(NAN_BF16) : infinity), 0};
    }
    u32 scale = bits(flt(extreme) * (-1.0f / float(1 << (BITS - 1))));
    u32 rounded = (magnitude > LARGEST_ROUNDED_UP ? scale : scale + 0xFFFFu) & 0xFFFF0000u;
    if ((rounded & ~SIGN) < FLUSHED_BELOW) return {largest_key, 0.0f, 0, 0};
    return {largest_key, 1.0f / flt(rounded), u16(rounded >> 16), 0xFF};
}

// The code of an element, in the low BITS of the result; higher bits are not zero. In a block that
// is not live the result means nothing.
template <int BITS> ZC_FN u32 quantise(float value, float inverse) {
    const float low = -float(1 << (BITS - 1)), high = float((1 << (BITS - 1)) - 1);
    float scaled = value * inverse;
    scaled = scaled < low ? low : scaled;
    scaled = scaled > high ? high : scaled;
    return bits(scaled + 12582912.0f);  // 1.5 * 2^23: the sum's unit is 1, rounded half to even
}

// What a code is multiplied with; a block whose scale is not finite decodes to NaN.
ZC_FN float decoding_scale(u16 stored) {
    u32 pattern = u32(stored) << 16;
    return flt((pattern & INFINITY_F32) == INFINITY_F32 ? u32(NAN_F32) : pattern);
}

}  // namespace ZC_NS
