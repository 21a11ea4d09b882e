// The arithmetic of the codec, one element or one block at a time, as docs/numerics.md defines it.
//
// Plain C++17 without an include: the same text serves the CPU loops and, compiled at run time, the
// CUDA kernels. ZC_NS keeps copies that were compiled for different instruction sets apart: the
// linker would otherwise keep any one of them for all. Do not assume that values are finite.
//
// float32 arithmetic goes through add, sub, mul and quotient: on a CUDA device they are PTX without
// .ftz, because CuPy compiles everything else to flush subnormals, and PTX is never contracted. Even
// a comparison or a negation would flush: both are done on the bits. What differs on a device stands
// in the one-line functions under ZC_CUDA; all else is shared.
#pragma once

#if defined(__CUDACC_RTC__) || defined(__CUDA_ARCH__)
#define ZC_CUDA 1
#else
#define ZC_CUDA 0
#endif
#ifndef ZC_NS
#define ZC_NS zc
#endif
#ifndef ZC_FN
#if ZC_CUDA
#define ZC_FN [[maybe_unused]] static __device__ __forceinline__
#else
#define ZC_FN static inline __attribute__((always_inline))
#endif
#endif

namespace ZC_NS {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
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
    FLUSHED_BELOW = (127u - 100u) << 23,        // 2^-100
    TRANSFORMED_AS_ZERO = (127u - 102u) << 23,  // 2^-102
};

enum Code { INT8, INT4, E4M3, E5M2 };
enum Rounding { NEAREST, STOCHASTIC };

#if ZC_CUDA
ZC_FN u32 bits(float value) { return __float_as_uint(value); }
ZC_FN float flt(u32 pattern) { return __uint_as_float(pattern); }
ZC_FN u32 high_product(u32 a, u32 b) { return __umulhi(a, b); }
ZC_FN float add(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
ZC_FN float sub(float a, float b) {
    float r;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
ZC_FN float mul(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
ZC_FN float quotient(float a, float b) {
    float r;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
// a * b + c with one rounding: the bits of two where a * b is exact.
ZC_FN float fused(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
// 1 / scale, correctly rounded for every bfloat16 of 2^-100 and more: one Newton step from an
// approximation good to 1 ulp (all 128 significands and every start within 4 ulp were checked).
// Neither scale nor result is subnormal, so that the flush of the approximation cannot matter.
ZC_FN float inverse_of(float scale) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(scale));
    return fused(fused(flt(bits(scale) ^ SIGN), r, 1.0f), r, r);
}
#else
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
ZC_FN u32 high_product(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
ZC_FN float add(float a, float b) { return a + b; }
ZC_FN float sub(float a, float b) { return a - b; }
ZC_FN float mul(float a, float b) { return a * b; }
ZC_FN float quotient(float a, float b) { return a / b; }
ZC_FN float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ZC_FN float inverse_of(float scale) { return 1.0f / scale; }
#endif

// 1.5 * 2^23: the unit of a sum with it is 1, rounded half to even. Integers up to 2^22 in magnitude
// are differences from its bits.
ZC_FN constexpr float unit_one() { return 12582912.0f; }
enum : u32 { ZERO_CODE = 0x4B400000u };

// ZERO_CODE plus the largest integer that is not above a value.
#if ZC_CUDA
ZC_FN u32 floor_code(float value) {
    float r;
    asm("add.rm.f32 %0, %1, %2;" : "=f"(r) : "f"(value), "f"(unit_one()));
    return bits(r);
}
#else
ZC_FN u32 floor_code(float value) {
    u32 nearest = bits(add(value, unit_one()));
    return nearest - (sub(flt(nearest), unit_one()) > value ? 1u : 0u);
}
#endif

ZC_FN float to_float(float value) { return value; }

ZC_FN float to_float(bf16 value) { return flt(u32(value.pattern) << 16); }

#if ZC_CUDA
ZC_FN float to_float(fp16 value) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(value.pattern));
    return r;
}
#else
// A subnormal becomes the difference of two normal numbers: no float32 subnormal takes part.
ZC_FN float to_float(fp16 value) {
    u32 magnitude = value.pattern & 0x7FFFu, sign = u32(value.pattern & 0x8000u) << 16;
    u32 normal = (magnitude << 13) + (112u << 23);
    u32 special = (magnitude << 13) | INFINITY_F32;
    u32 subnormal = bits(flt((113u << 23) | (magnitude << 13)) - flt(113u << 23));
    u32 result = magnitude >= 0x400u ? normal : subnormal;
    return flt((magnitude >= INFINITY_FP16 ? special : result) | sign);
}
#endif

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

#if ZC_CUDA
ZC_FN u32 rounded_fp16(float value) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(value));
    return r;
}
#else
// The bits of a value that is not NaN.
ZC_FN u32 rounded_fp16(float value) {
    u32 magnitude = bits(value) & ~SIGN, sign = (bits(value) & SIGN) >> 16;
    u32 normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    u32 subnormal = bits(flt(magnitude) + 0.5f) - bits(0.5f);
    u32 finite = magnitude >= (113u << 23) ? normal : subnormal;
    return (magnitude >= bits(65520.0f) ? u32(INFINITY_FP16) : finite) | sign;
}
#endif

// SATURATE: a finite value beyond the range is stored as the largest one, not as infinity.
template <bool SATURATE> ZC_FN fp16 to_fp16(float value) {
    u32 result = rounded_fp16(value), sign = result & 0x8000u;
    const u32 too_large = 0x477FF000u;  // 65520, which rounds to infinity
    bool beyond = (bits(value) & ~SIGN) - too_large < INFINITY_F32 - too_large;
    if (SATURATE) result = beyond ? sign | LARGEST_FP16 : result;
    return {u16(is_nan(value) ? u32(NAN_FP16) : result)};
}

// The largest key belongs to the element of largest magnitude, the negative one in a tie.
ZC_FN u32 key(float value) { return (bits(value) << 1) | (bits(value) >> 31); }

struct Scale {
    u32 extreme;    // the largest key of the block
    float inverse;  // of the stored scale
    u16 stored;     // bfloat16
    u8 live;        // all ones, or 0: every code of the block is 0
};

// The largest magnitude that codes stand for, in units of the scale.
template <Code C, Rounding R> ZC_FN constexpr float largest_magnitude() {
    if (C == E4M3) return 448.0f;
    if (C == E5M2) return 57344.0f;
    return float((C == INT8 ? 128 : 8) - (R == STOCHASTIC ? 1 : 0));
}

// Scales of these take the sign that turns the extreme into the lowest code: all codes are used.
template <Code C, Rounding R> ZC_FN constexpr bool signed_scale() {
    return (C == INT8 || C == INT4) && R == NEAREST;
}

// A scale whose magnitude is rounded up to bfloat16, or down where the extreme would otherwise
// decode to infinity.
template <Code C, Rounding R> ZC_FN u32 rounded_scale(u32 extreme) {
    const float largest = largest_magnitude<C, R>();
    u32 magnitude = extreme & ~SIGN;
    if (signed_scale<C, R>()) {
        u32 scale = bits(mul(flt(extreme), -1.0f / largest));  // exact
        return (magnitude > LARGEST_ROUNDED_UP ? scale : scale + 0xFFFFu) & 0xFFFF0000u;
    }
    u32 scale = bits(quotient(flt(magnitude), largest)), up = (scale + 0xFFFFu) & 0xFFFF0000u;
    return bits(mul(flt(up), largest)) < INFINITY_F32 ? up : scale & 0xFFFF0000u;
}

// The scale of a block whose largest key is given.
template <Code C, Rounding R> ZC_FN Scale scale_of(u32 largest_key) {
    u32 extreme = (largest_key >> 1) | (largest_key << 31), magnitude = extreme & ~SIGN;
    if (magnitude >= INFINITY_F32) {
        u32 sign = signed_scale<C, R>() ? ~extreme & SIGN : 0u;
        u32 infinity = (sign | INFINITY_F32) >> 16;
        return {largest_key, 0.0f, u16(magnitude > INFINITY_F32 ? u32(NAN_BF16) : infinity), 0};
    }
    u32 rounded = rounded_scale<C, R>(extreme);
    if ((rounded & ~SIGN) < FLUSHED_BELOW) return {largest_key, 0.0f, 0, 0};
    return {largest_key, inverse_of(flt(rounded)), u16(rounded >> 16), 0xFF};
}

// What a code is multiplied with; a block whose scale is not finite decodes to NaN.
ZC_FN float decoding_scale(u16 stored) {
    u32 pattern = u32(stored) << 16;
    return flt((pattern & INFINITY_F32) == INFINITY_F32 ? u32(NAN_F32) : pattern);
}

// The integer code of a value in units of the scale, in the low bits of the result; higher bits are
// not zero. In a block that is not live the result means nothing.
template <Code C> ZC_FN u32 nearest_code(float scaled) {
    const u32 half = C == INT8 ? 128u : 8u;
    u32 code = bits(add(scaled, unit_one()));
    code = code < ZERO_CODE - half ? ZERO_CODE - half : code;
    return code > ZERO_CODE + half - 1u ? ZERO_CODE + half - 1u : code;
}

// The same, rounded up with the probability of the distance from below: drawn lies within (0, 1).
// Bits of numbers that are not negative are in the order of the numbers.
template <Code C> ZC_FN u32 stochastic_code(float scaled, float drawn) {
    const u32 largest = C == INT8 ? 127u : 7u;
    u32 code = floor_code(scaled);
    float distance = sub(scaled, sub(flt(code), unit_one()));
    code += int(bits(drawn)) < int(bits(distance)) ? 1u : 0u;
    code = code < ZERO_CODE - largest ? ZERO_CODE - largest : code;
    return code > ZERO_CODE + largest ? ZERO_CODE + largest : code;
}

// The OCP FP8 bits of a finite value, rounded half to even, beyond the range the largest one.
template <Code C> ZC_FN u32 fp8_code(float value) {
    const int drop = C == E4M3 ? 20 : 21;               // mantissa bits of float32 that fp8 lacks
    const u32 bias = C == E4M3 ? 120u << 3 : 112u << 2;  // difference of the exponents' biases
    const u32 smallest_normal = (C == E4M3 ? 127u - 6u : 127u - 14u) << 23;
    const float unit_subnormal = C == E4M3 ? 16384.0f : 128.0f;  // a sum's unit is a subnormal step
    const u32 largest = C == E4M3 ? 0x7Eu : 0x7Bu;
    u32 magnitude = bits(value) & ~SIGN, odd = (magnitude >> drop) & 1u;
    u32 normal = ((magnitude + (1u << (drop - 1)) - 1u + odd) >> drop) - bias;
    u32 subnormal = bits(add(flt(magnitude), unit_subnormal)) - bits(unit_subnormal);
    u32 code = magnitude < smallest_normal ? subnormal : normal < largest ? normal : largest;
    return code | (bits(value) >> 31 << 7);
}

// The value of fp8 bits, exact: as float16, whose exponent has 5 bits.
template <Code C> ZC_FN float fp8_value(u32 code) {
    if (C == E5M2) return to_float(fp16{u16(code << 8)});
    float value = mul(to_float(fp16{u16(((code & 0x7Fu) << 7) | ((code & 0x80u) << 8))}), 256.0f);
    return (code & 0x7Fu) == 0x7Fu ? flt(NAN_F32) : value;
}

// Four random words: Philox4x32-10 (Salmon et al., Parallel Random Numbers, SC 2011).
struct Words {
    u32 word[4];
};

ZC_FN Words philox(u64 counter, u64 seed) {
    u32 a = u32(counter), b = u32(counter >> 32), c = 0, d = 0;
    u32 key = u32(seed), other_key = u32(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        u32 high_a = high_product(a, 0xD2511F53u), low_a = a * 0xD2511F53u;
        u32 high_c = high_product(c, 0xCD9E8D57u), low_c = c * 0xCD9E8D57u;
        a = high_c ^ b ^ key;
        b = low_c;
        c = high_a ^ d ^ other_key;
        d = low_a;
        key += 0x9E3779B9u;
        other_key += 0xBB67AE85u;
    }
    return {{a, b, c, d}};
}

// A number within (0, 1), a multiple of 2^-24: the difference of two numbers in [0.5, 2), exact.
ZC_FN float drawn_from(u32 word) { return sub(flt((word >> 9) | bits(1.0f)), flt(0x3F7FFFFFu)); }

enum { TRANSFORMED = 32 };  // elements that one Hadamard transform combines

// Values so small that the transform could meet a subnormal number count as 0.
ZC_FN float transform_input(float value) {
    return (bits(value) & ~SIGN) < TRANSFORMED_AS_ZERO ? 0.0f : value;
}

// 1 / sqrt(numel), in float32, of a power of two up to 32.
ZC_FN float transform_factor(int numel) {
    u32 root = numel == 1 || numel == 4 || numel == 16 ? bits(1.0f) : 0x3F3504F3u;
    u32 halvings = numel < 4 ? 0u : numel < 16 ? 1u : 2u;
    return flt(root - (halvings << 23));
}

// Transforms, in place, a group of at most 32 values: its first ones, as many as a power of two
// allows. It is its own inverse, up to rounding.
ZC_FN void transform(float* values, int numel) {
    if (numel < 1) return;
    int some = 1;
    while (2 * some <= numel) some *= 2;
    for (int i = 0; i < some; ++i) values[i] = transform_input(values[i]);
    for (int distance = 1; distance < some; distance *= 2)
        for (int i = 0; i < some; ++i)
            if (!(i & distance)) {
                float a = values[i], b = values[i + distance];
                values[i] = add(a, b);
                values[i + distance] = sub(a, b);
            }
    for (int i = 0; i < some; ++i) values[i] = mul(values[i], transform_factor(some));
}

}  // namespace ZC_NS
