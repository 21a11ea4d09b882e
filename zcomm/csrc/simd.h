// LANES elements at a time, in the vectors of the instruction set that this copy is compiled for.
//
// F holds LANES float32, I as many 32-bit patterns, H as many 16-bit ones. Results have the bits of
// their scalar siblings in codec.h; rounding relies on the default mode, which message.cpp sets.
// Pointers may have any alignment, but streams want multiples of 16.
//
// Each instruction set offers
//   load_bytes        sign-extended bytes; load_halves zero-extended 16-bit patterns
//   stream_*          stores past the caches, where there are such
//   halves_of         32-bit numbers below 2^16 as H; fp16_of rounded floats
//   nearest, floor    rounded to an integer; of a value beyond 2^31, or NaN: anything
//   smaller, larger   the second value where one is NaN
//   multiply_add      a * b + c, rounded once or twice: for exact products only
//   max_*<BYTES>      of numbers of 2 or 4 bytes; largest_word of unsigned 32-bit numbers
//   left, right       shifts of 32-bit patterns, left_halves and right_halves of 16-bit ones
//   where_*           yes or no, lane by lane; plus_one_where_less adds to the third value
//   wide_product      64-bit products of every second lane, the low words of 64-bit lanes
//   low_words         low words of 64-bit lanes of two vectors side by side, high_words moves down
//   low_pairs, ...    interleave 64-bit lanes such that wide_counters() come out in order
//   swapped<D>        lanes at distance D exchanged
//   bytes_of          16 integers as saturated bytes
//   mixed_bytes_of    four vectors of integers as saturated bytes, which in_order() puts in order
//   within_four_bits  bytes limited to -8..7
//   nibble_product    the low (0) or high (1) codes of int4 in bytes, times the scale of the factor
#pragma once

#include <immintrin.h>

#include "codec.h"

namespace ZC_NS {

// -8..7, by the saturation of sums: SSE2 has no limits for signed bytes.
ZC_FN __m128i four_bits_of(__m128i bytes) {
    const __m128i most = _mm_set1_epi8(120);
    bytes = _mm_subs_epi8(_mm_adds_epi8(bytes, most), most);
    return _mm_adds_epi8(_mm_subs_epi8(bytes, most), most);
}

}  // namespace ZC_NS

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_sse2.h"
#endif

namespace ZC_NS {

enum { ROW = 32 };              // elements: the smallest block fills whole vectors
enum { SIXTEEN = 16 / LANES };  // vectors that hold 16 elements
enum { QUAD = 4 * LANES };      // elements whose bytes fill a vector

// The low four bits of every byte of low, and those of high above them.
ZC_FN I nibbles(I low, I high) {
    return either(both(low, splat(0x0F0F0F0Fu)), both(left_halves<4>(high), splat(0xF0F0F0F0u)));
}

// 16 bytes of codes, or 0 where live is 0.
ZC_FN void store_sixteen(u8* out, __m128i bytes, u8 live) {
    bytes = _mm_and_si128(bytes, _mm_set1_epi8(char(live)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
}

// nibbles of 16 pairs.
ZC_FN __m128i nibbles_of(__m128i low, __m128i high) {
    low = _mm_and_si128(four_bits_of(low), _mm_set1_epi8(0x0F));
    high = _mm_and_si128(_mm_slli_epi16(four_bits_of(high), 4), _mm_set1_epi8(char(0xF0)));
    return _mm_or_si128(low, high);
}

ZC_FN F magnitude(F v) { return flt(both(bits(v), splat(~u32(SIGN)))); }

#if !defined(__AVX512F__)
ZC_FN F nibble_factor(float scale) { return splat(scale); }
template <int NIBBLE> ZC_FN F nibble_values(I bytes) {
    return from_int(right_signed<NIBBLE ? 4 : 28>(NIBBLE ? bytes : left<28>(bytes)));
}
template <int NIBBLE> ZC_FN F nibble_product(I bytes, F factor) {
    return nibble_values<NIBBLE>(bytes) * factor;
}
template <int NIBBLE> ZC_FN F plus_nibble_product(F total, I bytes, F factor) {
    return multiply_add(nibble_values<NIBBLE>(bytes), factor, total);
}
#endif

// Every pattern rotated left by one, as key() does: the sign comes last.
template <int BYTES> ZC_FN I sign_last(I v) {
    return BYTES == 4 ? either(left<1>(v), right<31>(v))
                      : either(left_halves<1>(v), right_halves<15>(v));
}

// The largest of all unsigned numbers of BYTES bytes.
template <int BYTES> ZC_FN u32 largest_unsigned(I v) {
    if (BYTES == 4) return largest_word(v);
    return largest_word(max_unsigned<4>(left<16>(v), both(v, splat(0xFFFF0000u)))) >> 16;
}

// A finite value beyond float16 becomes its largest one; infinity and NaN, whose difference with
// themselves is NaN, stay.
ZC_FN F within_fp16(F v) {
    F bounded = smaller(larger(v, splat(-65504.0f)), splat(65504.0f));
    return flt(where_nan(v - v, bits(v), bits(bounded)));
}

// stochastic_code as a number; its upper limit is left to the packing of bytes.
template <Code C> ZC_FN I stochastic_codes(F scaled, F drawn) {
    I below = floor(scaled);
    I rounded = plus_one_where_less(drawn, scaled - from_int(below), below);
    return max_signed<4>(rounded, splat(C == INT8 ? u32(-127) : u32(-7)));
}

// What float32 has and fp8 lacks: bits of the mantissa, and a part of the exponent's bias.
template <Code C> constexpr int DROPPED_BITS = C == E4M3 ? 20 : 21;
template <Code C> constexpr u32 DROPPED_BIAS = (C == E4M3 ? 120u : 112u) << 23;
template <Code C> constexpr u32 SMALLEST_NORMAL = DROPPED_BIAS<C> + (1u << 23);

// fp8_code, sign-extended.
template <Code C> ZC_FN I fp8_codes(F value) {
    const u32 half = (1u << (DROPPED_BITS<C> - 1)) - 1u;
    const float unit_subnormal = C == E4M3 ? 16384.0f : 128.0f;
    F size = smaller(magnitude(value), splat(largest_magnitude<C, NEAREST>()));
    I odd = both(right<DROPPED_BITS<C>>(bits(size)), splat(1u));
    I normal = right<DROPPED_BITS<C>>(add(add(bits(size), odd), splat(half - DROPPED_BIAS<C>)));
    I subnormal = sub(bits(size + splat(unit_subnormal)), splat(bits(unit_subnormal)));
    I code = where_less(size, splat(flt(SMALLEST_NORMAL<C>)), subnormal, normal);
    return either(code, both(right_signed<24>(bits(value)), splat(0xFFFFFF80u)));
}

// fp8_value of sign-extended codes; NaN in any form.
template <Code C> ZC_FN F fp8_values(I codes) {
    const u32 first_normal = C == E4M3 ? 0x08u : 0x04u, first_special = C == E4M3 ? 0x7Fu : 0x7Cu;
    I size = left<DROPPED_BITS<C>>(both(codes, splat(0x7Fu))), smallest = splat(SMALLEST_NORMAL<C>);
    I normal = add(size, splat(DROPPED_BIAS<C>));
    I subnormal = bits(flt(either(size, smallest)) - flt(smallest));
    I special = either(size, splat(u32(INFINITY_F32)));
    I result = where_less(size, splat(first_normal << DROPPED_BITS<C>), subnormal, normal);
    result = where_less(size, splat(first_special << DROPPED_BITS<C>), result, special);
    return flt(either(result, both(codes, splat(u32(SIGN)))));
}

}  // namespace ZC_NS
