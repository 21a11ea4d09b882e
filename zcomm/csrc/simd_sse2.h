// 4 lanes: SSE2, which every x86-64 has. What each function does is said in simd.h.
#pragma once

namespace ZC_NS {

typedef __m128 F;
typedef __m128i I;
typedef __m128i H;
enum { LANES = 4 };

ZC_FN F load_lanes(const u8* in) { return _mm_loadu_ps(reinterpret_cast<const float*>(in)); }
ZC_FN void store_lanes(u8* out, F v) { _mm_storeu_ps(reinterpret_cast<float*>(out), v); }
ZC_FN I load_patterns(const u8* in) { return _mm_loadu_si128(reinterpret_cast<const I*>(in)); }
ZC_FN void store_patterns(u8* out, I v) { _mm_storeu_si128(reinterpret_cast<I*>(out), v); }
ZC_FN void stream_patterns(u8* out, I v) { _mm_stream_si128(reinterpret_cast<I*>(out), v); }
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
ZC_FN void store_halves(u8* out, H v) { _mm_storel_epi64(reinterpret_cast<__m128i*>(out), v); }
ZC_FN void stream_halves(u8* out, H v) { store_halves(out, v); }  // there is none this short
ZC_FN H halves_of(I v) {
    v = _mm_srai_epi32(_mm_slli_epi32(v, 16), 16);
    return _mm_packs_epi32(v, v);
}

ZC_FN F splat(float v) { return _mm_set1_ps(v); }
ZC_FN I splat(u32 v) { return _mm_set1_epi32(int(v)); }
ZC_FN I splat_wide(u64 v) { return _mm_set1_epi64x(i64(v)); }
ZC_FN I bits(F v) { return _mm_castps_si128(v); }
ZC_FN F flt(I v) { return _mm_castsi128_ps(v); }
ZC_FN F from_int(I v) { return _mm_cvtepi32_ps(v); }
ZC_FN I nearest(F v) { return _mm_cvtps_epi32(v); }
ZC_FN F multiply_add(F a, F b, F c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
ZC_FN F smaller(F a, F b) { return _mm_min_ps(a, b); }
ZC_FN F larger(F a, F b) { return _mm_max_ps(a, b); }
ZC_FN I floor(F v) {
    I rounded = _mm_cvtps_epi32(v);
    return _mm_add_epi32(rounded, bits(_mm_cmplt_ps(v, _mm_cvtepi32_ps(rounded))));
}
ZC_FN I plus_one_where_less(F a, F b, I v) { return _mm_sub_epi32(v, bits(_mm_cmplt_ps(a, b))); }

ZC_FN I add(I a, I b) { return _mm_add_epi32(a, b); }
ZC_FN I sub(I a, I b) { return _mm_sub_epi32(a, b); }
ZC_FN I both(I a, I b) { return _mm_and_si128(a, b); }
ZC_FN I either(I a, I b) { return _mm_or_si128(a, b); }
ZC_FN I differing(I a, I b) { return _mm_xor_si128(a, b); }
ZC_FN I select(I mask, I yes, I no) {
    return _mm_or_si128(_mm_and_si128(mask, yes), _mm_andnot_si128(mask, no));
}
template <int BYTES> ZC_FN I max_signed(I a, I b) {
    return BYTES == 4 ? select(_mm_cmpgt_epi32(a, b), a, b) : _mm_max_epi16(a, b);
}
template <int BYTES> ZC_FN I max_unsigned(I a, I b) {
    I sign = splat(BYTES == 4 ? u32(SIGN) : 0x80008000u);
    return differing(sign, max_signed<BYTES>(differing(a, sign), differing(b, sign)));
}
ZC_FN u32 largest_word(I v) {
    v = max_unsigned<4>(v, _mm_shuffle_epi32(v, 0x4E));
    return u32(_mm_cvtsi128_si32(max_unsigned<4>(v, _mm_shuffle_epi32(v, 0xB1))));
}
template <int N> ZC_FN I left_halves(I v) { return _mm_slli_epi16(v, N); }
template <int N> ZC_FN I right_halves(I v) { return _mm_srli_epi16(v, N); }
template <int N> ZC_FN I left(I v) { return _mm_slli_epi32(v, N); }
template <int N> ZC_FN I right(I v) { return _mm_srli_epi32(v, N); }
template <int N> ZC_FN I right_signed(I v) { return _mm_srai_epi32(v, N); }
ZC_FN I where_nan(F v, I yes, I no) { return select(bits(_mm_cmpunord_ps(v, v)), yes, no); }
ZC_FN I where_less(F a, F b, I yes, I no) { return select(bits(_mm_cmplt_ps(a, b)), yes, no); }
ZC_FN I where_less(I a, I b, I yes, I no) { return select(_mm_cmplt_epi32(a, b), yes, no); }

ZC_FN I wide_product(I a, I b) { return _mm_mul_epu32(a, b); }
ZC_FN I high_words(I v) { return _mm_srli_epi64(v, 32); }
ZC_FN I low_words(I low, I high) {
    return either(both(low, splat_wide(0xFFFFFFFFu)), _mm_slli_epi64(high, 32));
}
ZC_FN I wide_counters() { return _mm_set_epi64x(1, 0); }
ZC_FN I low_pairs(I a, I b) { return _mm_unpacklo_epi64(a, b); }
ZC_FN I high_pairs(I a, I b) { return _mm_unpackhi_epi64(a, b); }

template <int DISTANCE> ZC_FN F swapped(F v) {
    return _mm_shuffle_ps(v, v, DISTANCE == 1 ? 0xB1 : 0x4E);
}

// to_float and rounded_fp16 of codec.h; the latter gives NaN its one form.
ZC_FN F load_fp16(const u8* in) {
    I pattern = load_halves(in), size = left<13>(both(pattern, splat(0x7FFFu)));
    I smallest = splat(113u << 23), normal = add(size, splat(112u << 23));
    I subnormal = bits(_mm_sub_ps(flt(either(size, smallest)), flt(smallest)));
    I result = where_less(size, splat(0x400u << 13), subnormal, normal);
    I special = either(size, splat(u32(INFINITY_F32)));
    result = where_less(size, splat(INFINITY_FP16 << 13), result, special);
    return flt(either(result, left<16>(both(pattern, splat(0x8000u)))));
}
ZC_FN H fp16_of(F v) {
    I size = both(bits(v), splat(~u32(SIGN))), odd = both(right<13>(size), splat(1u));
    I normal = right<13>(add(add(size, odd), splat(0xFFFu - (112u << 23))));
    I subnormal = sub(bits(_mm_add_ps(flt(size), splat(0.5f))), splat(bits(0.5f)));
    I result = where_less(size, splat(113u << 23), subnormal, normal);
    result = where_less(size, splat(bits(65520.0f)), result, splat(u32(INFINITY_FP16)));
    result = where_nan(v, splat(u32(NAN_FP16)), result);
    return halves_of(either(result, both(right<16>(bits(v)), splat(0x8000u))));
}

ZC_FN __m128i bytes_of(const I (&v)[4]) {
    return _mm_packs_epi16(_mm_packs_epi32(v[0], v[1]), _mm_packs_epi32(v[2], v[3]));
}
ZC_FN I mixed_bytes_of(const I (&v)[4]) { return bytes_of(v); }
ZC_FN I in_order(I mixed) { return mixed; }
ZC_FN I within_four_bits(I bytes) { return four_bits_of(bytes); }

}  // namespace ZC_NS
