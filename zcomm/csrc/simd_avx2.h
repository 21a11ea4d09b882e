// 8 lanes: AVX2, FMA and F16C. What each function does is said in simd.h.
#pragma once

namespace ZC_NS {

typedef __m256 F;
typedef __m256i I;
typedef __m128i H;
enum { LANES = 8 };

ZC_FN F load_lanes(const u8* in) { return _mm256_loadu_ps(reinterpret_cast<const float*>(in)); }
ZC_FN void store_lanes(u8* out, F v) { _mm256_storeu_ps(reinterpret_cast<float*>(out), v); }
ZC_FN I load_patterns(const u8* in) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
}
ZC_FN void store_patterns(u8* out, I v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), v);
}
ZC_FN void stream_patterns(u8* out, I v) {
    __m128i* at = reinterpret_cast<__m128i*>(out);
    _mm_stream_si128(at, _mm256_castsi256_si128(v));
    _mm_stream_si128(at + 1, _mm256_extracti128_si256(v, 1));
}
ZC_FN I load_bytes(const u8* in) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
}
ZC_FN I load_halves(const u8* in) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
ZC_FN void store_halves(u8* out, H v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), v); }
ZC_FN void stream_halves(u8* out, H v) { _mm_stream_si128(reinterpret_cast<__m128i*>(out), v); }
ZC_FN H halves_of(I v) {
    return _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}
ZC_FN F load_fp16(const u8* in) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
ZC_FN H fp16_of(F v) {
    return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

ZC_FN F splat(float v) { return _mm256_set1_ps(v); }
ZC_FN I splat(u32 v) { return _mm256_set1_epi32(int(v)); }
ZC_FN I splat_wide(u64 v) { return _mm256_set1_epi64x(i64(v)); }
ZC_FN I bits(F v) { return _mm256_castps_si256(v); }
ZC_FN F flt(I v) { return _mm256_castsi256_ps(v); }
ZC_FN F from_int(I v) { return _mm256_cvtepi32_ps(v); }
ZC_FN I nearest(F v) { return _mm256_cvtps_epi32(v); }
ZC_FN I floor(F v) { return _mm256_cvtps_epi32(_mm256_floor_ps(v)); }
ZC_FN I plus_one_where_less(F a, F b, I v) {
    return _mm256_sub_epi32(v, _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
}
ZC_FN F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
ZC_FN F smaller(F a, F b) { return _mm256_min_ps(a, b); }
ZC_FN F larger(F a, F b) { return _mm256_max_ps(a, b); }

template <int BYTES> ZC_FN I max_unsigned(I a, I b) {
    return BYTES == 4 ? _mm256_max_epu32(a, b) : _mm256_max_epu16(a, b);
}
template <int BYTES> ZC_FN I max_signed(I a, I b) {
    return BYTES == 4 ? _mm256_max_epi32(a, b) : _mm256_max_epi16(a, b);
}
ZC_FN u32 largest_word(I v) {
    __m128i r = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    r = _mm_max_epu32(r, _mm_shuffle_epi32(r, 0x4E));
    return u32(_mm_cvtsi128_si32(_mm_max_epu32(r, _mm_shuffle_epi32(r, 0xB1))));
}
template <int N> ZC_FN I left_halves(I v) { return _mm256_slli_epi16(v, N); }
template <int N> ZC_FN I right_halves(I v) { return _mm256_srli_epi16(v, N); }
ZC_FN I add(I a, I b) { return _mm256_add_epi32(a, b); }
ZC_FN I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
ZC_FN I both(I a, I b) { return _mm256_and_si256(a, b); }
ZC_FN I either(I a, I b) { return _mm256_or_si256(a, b); }
ZC_FN I differing(I a, I b) { return _mm256_xor_si256(a, b); }
template <int N> ZC_FN I left(I v) { return _mm256_slli_epi32(v, N); }
template <int N> ZC_FN I right(I v) { return _mm256_srli_epi32(v, N); }
template <int N> ZC_FN I right_signed(I v) { return _mm256_srai_epi32(v, N); }
ZC_FN I select(F mask, I yes, I no) { return bits(_mm256_blendv_ps(flt(no), flt(yes), mask)); }
ZC_FN I where_nan(F v, I yes, I no) {
    return select(_mm256_cmp_ps(v, v, _CMP_UNORD_Q), yes, no);
}
ZC_FN I where_less(F a, F b, I yes, I no) {
    return select(_mm256_cmp_ps(a, b, _CMP_LT_OQ), yes, no);
}
ZC_FN I where_less(I a, I b, I yes, I no) {
    return select(flt(_mm256_cmpgt_epi32(b, a)), yes, no);
}

ZC_FN I wide_product(I a, I b) { return _mm256_mul_epu32(a, b); }
ZC_FN I high_words(I v) { return _mm256_srli_epi64(v, 32); }
ZC_FN I low_words(I low, I high) {
    return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xAA);
}
ZC_FN I wide_counters() { return _mm256_setr_epi64x(0, 2, 1, 3); }
ZC_FN I low_pairs(I a, I b) { return _mm256_unpacklo_epi64(a, b); }
ZC_FN I high_pairs(I a, I b) { return _mm256_unpackhi_epi64(a, b); }

template <int DISTANCE> ZC_FN F swapped(F v) {
    if (DISTANCE == 1) return _mm256_permute_ps(v, 0xB1);
    if (DISTANCE == 2) return _mm256_permute_ps(v, 0x4E);
    return _mm256_permute2f128_ps(v, v, 1);
}

ZC_FN __m128i bytes_of(const I (&v)[2]) {
    I halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[0], v[1]), 0xD8);
    return _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
ZC_FN I mixed_bytes_of(const I (&v)[4]) {
    return _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
}
ZC_FN I in_order(I mixed) {
    return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
ZC_FN I within_four_bits(I bytes) {
    return _mm256_min_epi8(_mm256_max_epi8(bytes, _mm256_set1_epi8(-8)), _mm256_set1_epi8(7));
}

}  // namespace ZC_NS
