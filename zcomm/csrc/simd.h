// LANES elements at a time, in the vectors of the instruction set that this copy is compiled for.
//
// Included by loops.cpp on x86 only. Results have the bits of their scalar siblings in codec.h;
// rounding relies on the default mode, which message.cpp sets. Pointers may have any alignment.
#pragma once

#include <immintrin.h>

#include "codec.h"

namespace ZC_NS {

#if defined(__AVX512F__)

typedef __m512 F;
typedef __m512i I;
enum { LANES = 16 };

ZC_FN F load_lanes(const u8* in) { return _mm512_loadu_ps(in); }
ZC_FN void store_lanes(u8* out, F v) { _mm512_storeu_ps(out, v); }
ZC_FN F splat(float v) { return _mm512_set1_ps(v); }
ZC_FN I splat(u32 v) { return _mm512_set1_epi32(int(v)); }
ZC_FN I bits(F v) { return _mm512_castps_si512(v); }
ZC_FN F flt(I v) { return _mm512_castsi512_ps(v); }
ZC_FN F from_int(I v) { return _mm512_cvtepi32_ps(v); }
ZC_FN I load_patterns(const u8* in) { return _mm512_loadu_si512(in); }
template <int BYTES> ZC_FN I max_unsigned(I a, I b) {
    return BYTES == 4 ? _mm512_max_epu32(a, b) : _mm512_max_epu16(a, b);
}
template <int BYTES> ZC_FN I max_signed(I a, I b) {
    return BYTES == 4 ? _mm512_max_epi32(a, b) : _mm512_max_epi16(a, b);
}
ZC_FN I left_halves(I v) { return _mm512_slli_epi16(v, 1); }
ZC_FN I sign_of_halves(I v) { return _mm512_srli_epi16(v, 15); }
ZC_FN I add(I a, I b) { return _mm512_add_epi32(a, b); }
ZC_FN I both(I a, I b) { return _mm512_and_si512(a, b); }
ZC_FN I either(I a, I b) { return _mm512_or_si512(a, b); }
template <int N> ZC_FN I left(I v) { return _mm512_slli_epi32(v, N); }
template <int N> ZC_FN I right(I v) { return _mm512_srli_epi32(v, N); }
template <int N> ZC_FN I right_signed(I v) { return _mm512_srai_epi32(v, N); }
ZC_FN I where_nan(F v, I yes, I no) {
    return _mm512_mask_mov_epi32(no, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), yes);
}
ZC_FN I load_bytes(const u8* in) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
ZC_FN I load_halves(const u8* in) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}
ZC_FN void store_halves(u8* out, I v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(v));
}
ZC_FN F load_fp16(const u8* in) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}
ZC_FN void store_fp16(u8* out, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
ZC_FN u32 largest_word(I v) { return _mm512_reduce_max_epu32(v); }
ZC_FN F within(F v, float limit) {
    return _mm512_min_ps(_mm512_max_ps(v, splat(-limit)), splat(limit));
}
ZC_FN __m128i round_to_bytes(const F (&v)[1]) {
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v[0]));
}

#elif defined(__AVX2__)

typedef __m256 F;
typedef __m256i I;
enum { LANES = 8 };

ZC_FN F load_lanes(const u8* in) { return _mm256_loadu_ps(reinterpret_cast<const float*>(in)); }
ZC_FN void store_lanes(u8* out, F v) { _mm256_storeu_ps(reinterpret_cast<float*>(out), v); }
ZC_FN F splat(float v) { return _mm256_set1_ps(v); }
ZC_FN I splat(u32 v) { return _mm256_set1_epi32(int(v)); }
ZC_FN I bits(F v) { return _mm256_castps_si256(v); }
ZC_FN F flt(I v) { return _mm256_castsi256_ps(v); }
ZC_FN F from_int(I v) { return _mm256_cvtepi32_ps(v); }
ZC_FN I load_patterns(const u8* in) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
}
template <int BYTES> ZC_FN I max_unsigned(I a, I b) {
    return BYTES == 4 ? _mm256_max_epu32(a, b) : _mm256_max_epu16(a, b);
}
template <int BYTES> ZC_FN I max_signed(I a, I b) {
    return BYTES == 4 ? _mm256_max_epi32(a, b) : _mm256_max_epi16(a, b);
}
ZC_FN I left_halves(I v) { return _mm256_slli_epi16(v, 1); }
ZC_FN I sign_of_halves(I v) { return _mm256_srli_epi16(v, 15); }
ZC_FN I add(I a, I b) { return _mm256_add_epi32(a, b); }
ZC_FN I both(I a, I b) { return _mm256_and_si256(a, b); }
ZC_FN I either(I a, I b) { return _mm256_or_si256(a, b); }
template <int N> ZC_FN I left(I v) { return _mm256_slli_epi32(v, N); }
template <int N> ZC_FN I right(I v) { return _mm256_srli_epi32(v, N); }
template <int N> ZC_FN I right_signed(I v) { return _mm256_srai_epi32(v, N); }
ZC_FN I where_nan(F v, I yes, I no) {
    return bits(_mm256_blendv_ps(flt(no), flt(yes), _mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}
ZC_FN I load_bytes(const u8* in) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
}
ZC_FN I load_halves(const u8* in) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
ZC_FN void store_halves(u8* out, I v) {
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), packed);
}
ZC_FN F load_fp16(const u8* in) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
ZC_FN void store_fp16(u8* out, F v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
ZC_FN u32 largest_word(I v) {
    __m128i r = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    r = _mm_max_epu32(r, _mm_shuffle_epi32(r, 0x4E));
    return u32(_mm_cvtsi128_si32(_mm_max_epu32(r, _mm_shuffle_epi32(r, 0xB1))));
}
ZC_FN F within(F v, float limit) {
    return _mm256_min_ps(_mm256_max_ps(v, splat(-limit)), splat(limit));
}
ZC_FN __m256i round_to_halves(const F (&v)[2]) {
    return _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
}
// Packing works within 128 bits: fours of codes come out of order and are put back at the end.
ZC_FN void store_codes8(u8* out, const F (&first)[2], const F (&second)[2], u8 live) {
    I codes = _mm256_packs_epi16(round_to_halves(first), round_to_halves(second));
    codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    codes = _mm256_and_si256(codes, _mm256_set1_epi8(char(live)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), codes);
}
ZC_FN void store_codes4(u8* out, const F (&first)[2], const F (&second)[2], u8 live) {
    const I lowest = _mm256_set1_epi16(-8), highest = _mm256_set1_epi16(7);
    I low = _mm256_min_epi16(_mm256_max_epi16(round_to_halves(first), lowest), highest);
    I high = _mm256_min_epi16(_mm256_max_epi16(round_to_halves(second), lowest), highest);
    low = _mm256_and_si256(low, _mm256_set1_epi16(short(live & 15)));
    high = _mm256_and_si256(_mm256_slli_epi16(high, 4), _mm256_set1_epi16(short(live & 240)));
    I codes = _mm256_packus_epi16(_mm256_or_si256(low, high), _mm256_setzero_si256());
    codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(codes));
}

#else

typedef __m128 F;
typedef __m128i I;
enum { LANES = 4 };

ZC_FN F load_lanes(const u8* in) { return _mm_loadu_ps(reinterpret_cast<const float*>(in)); }
ZC_FN void store_lanes(u8* out, F v) { _mm_storeu_ps(reinterpret_cast<float*>(out), v); }
ZC_FN F splat(float v) { return _mm_set1_ps(v); }
ZC_FN I splat(u32 v) { return _mm_set1_epi32(int(v)); }
ZC_FN I bits(F v) { return _mm_castps_si128(v); }
ZC_FN F flt(I v) { return _mm_castsi128_ps(v); }
ZC_FN F from_int(I v) { return _mm_cvtepi32_ps(v); }
ZC_FN I add(I a, I b) { return _mm_add_epi32(a, b); }
ZC_FN I both(I a, I b) { return _mm_and_si128(a, b); }
ZC_FN I either(I a, I b) { return _mm_or_si128(a, b); }
ZC_FN I select(I mask, I yes, I no) {
    return _mm_or_si128(_mm_and_si128(mask, yes), _mm_andnot_si128(mask, no));
}
ZC_FN I load_patterns(const u8* in) { return _mm_loadu_si128(reinterpret_cast<const I*>(in)); }
template <int BYTES> ZC_FN I max_signed(I a, I b) {
    return BYTES == 4 ? select(_mm_cmpgt_epi32(a, b), a, b) : _mm_max_epi16(a, b);
}
template <int BYTES> ZC_FN I max_unsigned(I a, I b) {
    I sign = splat(BYTES == 4 ? u32(SIGN) : 0x80008000u);
    return _mm_xor_si128(sign, max_signed<BYTES>(_mm_xor_si128(a, sign), _mm_xor_si128(b, sign)));
}
ZC_FN I left_halves(I v) { return _mm_slli_epi16(v, 1); }
ZC_FN I sign_of_halves(I v) { return _mm_srli_epi16(v, 15); }
template <int N> ZC_FN I left(I v) { return _mm_slli_epi32(v, N); }
template <int N> ZC_FN I right(I v) { return _mm_srli_epi32(v, N); }
template <int N> ZC_FN I right_signed(I v) { return _mm_srai_epi32(v, N); }
ZC_FN I where_nan(F v, I yes, I no) { return select(bits(_mm_cmpunord_ps(v, v)), yes, no); }
ZC_FN I load_bytes(const u8* in) {
    int four;
    __builtin_memcpy(&four, in, 4);
    I v = _mm_cvtsi32_si128(four);
    v = _mm_unpacklo_epi8(v, v);
    return _mm_srai_epi32(_mm_unpacklo_epi16(v, v), 24);
}
ZC_FN I load_halves(const u8* in) {
    I v = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in));
    return _mm_unpacklo_epi16(v, _mm_setzero_si128());
}
ZC_FN void store_halves(u8* out, I v) {
    v = _mm_srai_epi32(_mm_slli_epi32(v, 16), 16);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi32(v, v));
}
ZC_FN u32 largest_word(I v) {
    v = max_unsigned<4>(v, _mm_shuffle_epi32(v, 0x4E));
    return u32(_mm_cvtsi128_si32(max_unsigned<4>(v, _mm_shuffle_epi32(v, 0xB1))));
}
ZC_FN F within(F v, float limit) {
    return _mm_min_ps(_mm_max_ps(v, splat(-limit)), splat(limit));
}
ZC_FN __m128i round_to_bytes(const F (&v)[4]) {
    I low = _mm_packs_epi32(_mm_cvtps_epi32(v[0]), _mm_cvtps_epi32(v[1]));
    I high = _mm_packs_epi32(_mm_cvtps_epi32(v[2]), _mm_cvtps_epi32(v[3]));
    return _mm_packs_epi16(low, high);
}

#endif

#if defined(__AVX512F__) || !defined(__AVX2__)
// Rounds 32 values, first and then second, to 32 codes, or to none where live is 0.
ZC_FN void store_codes8(u8* out, const F (&first)[16 / LANES], const F (&second)[16 / LANES],
                        u8 live) {
    __m128i *at = reinterpret_cast<__m128i*>(out), mask = _mm_set1_epi8(char(live));
    _mm_storeu_si128(at, _mm_and_si128(round_to_bytes(first), mask));
    _mm_storeu_si128(at + 1, _mm_and_si128(round_to_bytes(second), mask));
}

// -8..7, by the saturation of sums: SSE2 has no limits for bytes.
ZC_FN __m128i limited(__m128i codes) {
    codes = _mm_subs_epi8(_mm_adds_epi8(codes, _mm_set1_epi8(120)), _mm_set1_epi8(120));
    return _mm_adds_epi8(_mm_subs_epi8(codes, _mm_set1_epi8(120)), _mm_set1_epi8(120));
}

// Rounds 16 pairs to 16 bytes: codes of first in the low four bits, of second in the high ones.
ZC_FN void store_codes4(u8* out, const F (&first)[16 / LANES], const F (&second)[16 / LANES],
                        u8 live) {
    __m128i low = limited(round_to_bytes(first)), high = limited(round_to_bytes(second));
    low = _mm_and_si128(low, _mm_set1_epi8(char(live & 15)));
    high = _mm_and_si128(_mm_slli_epi16(high, 4), _mm_set1_epi8(char(live & 240)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_or_si128(low, high));
}
#endif

// Every pattern rotated left by one, as key() does: the sign comes last.
template <int BYTES> ZC_FN I sign_last(I v) {
    return BYTES == 4 ? either(left<1>(v), right<31>(v))
                      : either(left_halves(v), sign_of_halves(v));
}

// The largest of all unsigned numbers of BYTES bytes.
template <int BYTES> ZC_FN u32 largest_unsigned(I v) {
    if (BYTES == 4) return largest_word(v);
    return largest_word(max_unsigned<4>(left<16>(v), both(v, splat(0xFFFF0000u)))) >> 16;
}

// A finite value beyond float16 becomes its largest one; infinity and NaN, whose difference with
// themselves is NaN, stay.
ZC_FN F within_fp16(F v) { return flt(where_nan(v - v, bits(v), bits(within(v, 65504.0f)))); }

}  // namespace ZC_NS
