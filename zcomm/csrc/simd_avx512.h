// 16 lanes: AVX-512 F, BW, DQ and VL. What each function does is said in simd.h.
#pragma once

namespace ZC_NS {

typedef __m512 F;
typedef __m512i I;
typedef __m256i H;
enum { LANES = 16 };

ZC_FN F load_lanes(const u8* in) { return _mm512_loadu_ps(in); }
ZC_FN void store_lanes(u8* out, F v) { _mm512_storeu_ps(out, v); }
ZC_FN I load_patterns(const u8* in) { return _mm512_loadu_si512(in); }
ZC_FN void store_patterns(u8* out, I v) { _mm512_storeu_si512(out, v); }
ZC_FN void stream_patterns(u8* out, I v) {
    __m128i* at = reinterpret_cast<__m128i*>(out);
    _mm_stream_si128(at, _mm512_castsi512_si128(v));
    _mm_stream_si128(at + 1, _mm512_extracti32x4_epi32(v, 1));
    _mm_stream_si128(at + 2, _mm512_extracti32x4_epi32(v, 2));
    _mm_stream_si128(at + 3, _mm512_extracti32x4_epi32(v, 3));
}
ZC_FN I load_bytes(const u8* in) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
ZC_FN I load_halves(const u8* in) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}
ZC_FN void store_halves(u8* out, H v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), v);
}
ZC_FN void stream_halves(u8* out, H v) {
    __m128i* at = reinterpret_cast<__m128i*>(out);
    _mm_stream_si128(at, _mm256_castsi256_si128(v));
    _mm_stream_si128(at + 1, _mm256_extracti128_si256(v, 1));
}
ZC_FN H halves_of(I v) { return _mm512_cvtepi32_epi16(v); }
ZC_FN F load_fp16(const u8* in) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}
ZC_FN H fp16_of(F v) {
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

ZC_FN F splat(float v) { return _mm512_set1_ps(v); }
ZC_FN I splat(u32 v) { return _mm512_set1_epi32(int(v)); }
ZC_FN I splat_wide(u64 v) { return _mm512_set1_epi64(i64(v)); }
ZC_FN I bits(F v) { return _mm512_castps_si512(v); }
ZC_FN F flt(I v) { return _mm512_castsi512_ps(v); }
ZC_FN F from_int(I v) { return _mm512_cvtepi32_ps(v); }
ZC_FN I nearest(F v) { return _mm512_cvtps_epi32(v); }
ZC_FN I floor(F v) {
    return _mm512_cvt_roundps_epi32(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
ZC_FN I plus_one_where_less(F a, F b, I v) {
    return _mm512_mask_add_epi32(v, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), v, splat(1u));
}
ZC_FN F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
ZC_FN F smaller(F a, F b) { return _mm512_min_ps(a, b); }
ZC_FN F larger(F a, F b) { return _mm512_max_ps(a, b); }

template <int BYTES> ZC_FN I max_unsigned(I a, I b) {
    return BYTES == 4 ? _mm512_max_epu32(a, b) : _mm512_max_epu16(a, b);
}
template <int BYTES> ZC_FN I max_signed(I a, I b) {
    return BYTES == 4 ? _mm512_max_epi32(a, b) : _mm512_max_epi16(a, b);
}
ZC_FN u32 largest_word(I v) { return _mm512_reduce_max_epu32(v); }
template <int N> ZC_FN I left_halves(I v) { return _mm512_slli_epi16(v, N); }
template <int N> ZC_FN I right_halves(I v) { return _mm512_srli_epi16(v, N); }
ZC_FN I add(I a, I b) { return _mm512_add_epi32(a, b); }
ZC_FN I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
ZC_FN I both(I a, I b) { return _mm512_and_si512(a, b); }
ZC_FN I either(I a, I b) { return _mm512_or_si512(a, b); }
ZC_FN I differing(I a, I b) { return _mm512_xor_si512(a, b); }
template <int N> ZC_FN I left(I v) { return _mm512_slli_epi32(v, N); }
template <int N> ZC_FN I right(I v) { return _mm512_srli_epi32(v, N); }
template <int N> ZC_FN I right_signed(I v) { return _mm512_srai_epi32(v, N); }
ZC_FN I where_nan(F v, I yes, I no) {
    return _mm512_mask_mov_epi32(no, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), yes);
}
ZC_FN I where_less(F a, F b, I yes, I no) {
    return _mm512_mask_mov_epi32(no, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), yes);
}
ZC_FN I where_less(I a, I b, I yes, I no) {
    return _mm512_mask_mov_epi32(no, _mm512_cmplt_epi32_mask(a, b), yes);
}

// All 16 products, in the order of the codes' bits: a lookup uses the low four bits of its index.
ZC_FN F nibble_factor(float scale) {
    F values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return values * splat(scale);
}
template <int NIBBLE> ZC_FN F nibble_product(I bytes, F factor) {
    return _mm512_permutexvar_ps(NIBBLE ? right<4>(bytes) : bytes, factor);
}
template <int NIBBLE> ZC_FN F plus_nibble_product(F total, I bytes, F factor) {
    return total + nibble_product<NIBBLE>(bytes, factor);
}

// The 16-bit values of the low codes of 32 bytes, and those of the high codes; values are those of
// all 16 codes. The table holds them twice: an index is five bits, of which four are the code.
ZC_FN void look_up(H values, const u8* codes, I& low, I& high) {
    I table = _mm512_broadcast_i64x4(values);
    __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    I index = _mm512_cvtepu8_epi16(bytes);
    low = _mm512_permutexvar_epi16(index, table);
    high = _mm512_permutexvar_epi16(right_halves<4>(index), table);
}

ZC_FN I wide_product(I a, I b) { return _mm512_mul_epu32(a, b); }
ZC_FN I high_words(I v) { return _mm512_srli_epi64(v, 32); }
ZC_FN I low_words(I low, I high) {
    return _mm512_mask_shuffle_epi32(low, 0xAAAA, high, _MM_PERM_CCAA);
}
ZC_FN I wide_counters() { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }
ZC_FN I low_pairs(I a, I b) { return _mm512_unpacklo_epi64(a, b); }
ZC_FN I high_pairs(I a, I b) { return _mm512_unpackhi_epi64(a, b); }

template <int DISTANCE> ZC_FN F swapped(F v) {
    if (DISTANCE == 1) return _mm512_permute_ps(v, 0xB1);
    if (DISTANCE == 2) return _mm512_permute_ps(v, 0x4E);
    return _mm512_shuffle_f32x4(v, v, DISTANCE == 4 ? 0xB1 : 0x4E);
}

ZC_FN __m128i bytes_of(const I (&v)[1]) { return _mm512_cvtsepi32_epi8(v[0]); }
ZC_FN I mixed_bytes_of(const I (&v)[4]) {
    return _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
}
ZC_FN I in_order(I mixed) {
    const I fours = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(fours, mixed);
}
ZC_FN I within_four_bits(I bytes) {
    return _mm512_min_epi8(_mm512_max_epi8(bytes, _mm512_set1_epi8(-8)), _mm512_set1_epi8(7));
}

}  // namespace ZC_NS
