// A row's codes to values, of one message or summed over several; tiles are those of encode.
//
// Wires are read several at once; each lane adds them in their order, so that no bit depends on how
// many that is. Do not assume that a scale is one that encode would write, or is finite.
#pragma once

#include "cuda_rows.h"

namespace ZC_NS {

// Whether a scale, and its 2^-12th, times any code is exact in float32: one FMA then adds it.
ZC_FN bool exact_products(u32 stored) {
    u32 magnitude = stored & 0x7FFFu;
    const u32 from = FLUSHED_BELOW >> 16, to = (127u + 110u) << 7;
    return magnitude - from < to - from || magnitude == 0;
}

enum : u32 { UNIT_ONE = 0x4B000000u };  // 2^23: the lowest bit of its float is worth 1

// Of V bytes of codes, the value of byte k; of int4 its low nibble, or the high one.
//
// An integer without sign becomes the lowest bits of a float, from which its offset is taken: so
// does no conversion, of which a device does fewer at a time.
template <Code C> ZC_FN float code_value(const u32* words, int k, bool high) {
    u32 word = words[k / 4];
    if constexpr (is_fp8<C>()) {
        return fp8_value<C>(byte_of(words, k));
    } else if constexpr (C == INT8) {
        u32 pattern = __byte_perm(word ^ 0x80808080u, UNIT_ONE, 0x7440 + k % 4);
        return sub(flt(pattern), 8388608.0f + 128.0f);
    } else {
        u32 nibble = word >> (8 * (k % 4) + (high ? 4 : 0));
        return sub(flt((nibble & 0xFu) ^ (UNIT_ONE | 8u)), 8388608.0f + 8.0f);
    }
}

// Adds what V bytes of codes stand for.
template <Code C, bool EXACT, int V>
ZC_FN void add_codes(float (&sums)[V], const Raw<V>& raw, float scale, bool high) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
        float code = code_value<C>(raw.word, i, high);
        sums[i] = EXACT ? fused(code, scale, sums[i]) : add(sums[i], mul(code, scale));
    }
}

// Of int4, where products are exact: a nibble is taken where it lies, times a power of two that the
// scale is divided by. UNIT_ONE is a parameter, which stays in a register: a compiler that knows its
// value spends more instructions on moving it than all others together.
template <int V>
ZC_FN void add_nibbles(float (&low)[V], float (&high)[V], const Raw<V>& raw, float scale,
                       u32 unit_one) {
    float scales[4];
    scales[0] = scale;
#pragma unroll
    for (int p = 1; p < 4; ++p) scales[p] = mul(scale, 1.0f / float(1 << (4 * p)));
#pragma unroll
    for (int i = 0; i < V; ++i) {
        u32 word = raw.word[i / 4] >> (16 * (i / 2 % 2));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int p = 2 * (i % 2) + h;
            float pattern = flt((word & (0xFu << (4 * p))) ^ (unit_one ^ (8u << (4 * p))));
            float code = sub(pattern, 8388608.0f + float(8 << (4 * p)));
            float& sum = h ? high[i] : low[i];
            sum = fused(code, scales[p], sum);
        }
    }
}

// Of int4 V low nibbles to one half of a block, and V high ones to the other.
template <Code C, bool EXACT, int V>
ZC_FN void add_both(float (&low)[V], float (&high)[V], const Raw<V>& raw, float scale,
                    u32 unit_one) {
    if constexpr (C == INT4 && EXACT) {
        add_nibbles(low, high, raw, scale, unit_one);
    } else {
        add_codes<C, EXACT>(low, raw, scale, false);
        if (C == INT4) add_codes<C, EXACT>(high, raw, scale, true);
    }
}

template <int V> ZC_FN void add_values(float (&sums)[V], const float (&values)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) sums[i] = add(sums[i], values[i]);
}

template <Code C, int V>
ZC_FN void add_transformed(float (&sums)[V], const Raw<V>& raw, float scale) {
    float values[V];
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = mul(code_value<C>(raw.word, i, false), scale);
    transform_lanes(values);
    add_values(sums, values);
}

template <Code C, int V>
ZC_FN void add_transformed(float (&low)[V], float (&high)[V], const Raw<V>& raw, float scale,
                           int block) {
    float a[V], b[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
        a[i] = mul(code_value<C>(raw.word, i, false), scale);
        b[i] = mul(code_value<C>(raw.word, i, true), scale);
    }
    transform_lanes(a, b, block);
    add_values(low, a);
    add_values(high, b);
}

// Adding to -0 keeps every bit of the first number.
template <int V> ZC_FN void begin(float (&sums)[V], u64 carry) {
#pragma unroll
    for (int i = 0; i < V; ++i)
        sums[i] = carry ? __ldcg(reinterpret_cast<const float*>(carry) + i) : flt(SIGN);
}

// The reciprocal of a power of two gives the bits of the division.
template <int V> ZC_FN void divide(float (&values)[V], float divisor) {
    bool power_of_two = (bits(divisor) & 0x7FFFFFu) == 0;
    float reciprocal = flt(0x7F000000u - bits(divisor));
    if (bits(divisor) == bits(1.0f)) return;
#pragma unroll
    for (int i = 0; i < V; ++i)
        values[i] = power_of_two ? mul(values[i], reciprocal) : quotient(values[i], divisor);
}

template <bool ALIGNED> ZC_FN u32 load_scale(u64 address) {
    return ALIGNED ? u32(__ldg(reinterpret_cast<const u16*>(address))) : load_half(address);
}

// The sum of one element of a short block, one element per lane, base + lane in it.
template <Code C, bool SINGLE>
ZC_FN float sum_staged(float sum, const Source<SINGLE>& source, const Coded& wire, i64 done,
                       int rest, int base, int log_block, bool transformed) {
    int i = base + lane_index(), half = (rest + 1) / 2;
    bool inside = i < rest, high = C == INT4 && i >= half;
    i64 code = C == INT4 ? codes_nbytes<C>(done, log_block) + (high ? i - half : i) : done + i;
    i64 scale = 2 * ((done + i) >> log_block);
#pragma unroll 4
    for (int w = 0; w < source.count(); ++w) {
        float value = 0.0f;
        if (inside) {
            u32 word = load_byte(source[w] + wire.codes + code);
            u32 stored = load_half(source[w] + wire.scales + scale);
            value = mul(code_value<C>(&word, 0, high), decoding_scale(u16(stored)));
        }
        if (transformed)
            value = transform_in_warp(value, rest - base < WARP ? rest - base : WARP);
        sum = add(sum, value);
    }
    return sum;
}

template <Code C, bool SINGLE>
ZC_FN void check_padding(const Source<SINGLE>& source, const Coded& wire, i64 numel, int log_block,
                         int codes, int scales, u64 complaint) {
    u64 at = padding_byte(wire.codes + codes_nbytes<C>(numel, log_block), codes,
                          wire.scales + scales_nbytes(numel, log_block), scales);
    for (int w = 0; at && w < source.count(); ++w)
        if (load_byte(source[w] + at)) atomicExch(reinterpret_cast<u32*>(complaint), 1u);
}

template <class T, Code C, bool TRANSFORM, bool SINGLE, bool ALIGNED>
ZC_FN void decode_row(const Share<Row>& share, const Source<SINGLE>& source,
                      const Options& options) {
    const int V = 16 / sizeof(T), PARTS = C == INT4 ? 2 : 1, VECTORS = 16 / PARTS / V;
    const int BATCH = SINGLE || TRANSFORM ? 1 : 4;
    const Row& row = share.row;
    const u32 unit_one = options.unit_one;
    const int log_block = options.log_block, block = 1 << log_block;
    const int log_nbytes = C == INT4 ? log_block - 1 : log_block;
    i64 num_full = row.numel >> log_block, nbytes = num_full << log_nbytes;
    i64 num_tiles = (nbytes + WARP * VECTORS * V - 1) / (WARP * VECTORS * V), tile = share.first;
    for (; tile < num_tiles; tile += share.stride) {
        i64 at[VECTORS], element[VECTORS];
        bool inside[VECTORS];
        float sums[VECTORS][PARTS][V];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            at[v] = (tile * VECTORS + v) * WARP * V + lane_index() * V;
            inside[v] = at[v] < nbytes;
            at[v] = inside[v] ? at[v] : 0;
            i64 first = (at[v] >> log_nbytes) << log_block;
            element[v] = C == INT4 ? first + (at[v] & (block / 2 - 1)) : at[v];
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
                begin(sums[v][p], SINGLE || !row.carry
                                      ? 0
                                      : row.carry + 4 * (element[v] + p * block / 2));
        }
#pragma unroll 1
        for (int w = 0; w < source.count(); w += BATCH) {
            Raw<V> raw[BATCH][VECTORS];
            u32 stored[BATCH][VECTORS];
            bool exact = true;
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (BATCH > 1 && w + i >= source.count()) continue;
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    u64 wire = source[w + i];
                    raw[i][v] = load<V, ALIGNED>(wire + row.wire.codes + at[v]);
                    stored[i][v] = load_scale<ALIGNED>(wire + row.wire.scales +
                                                       2 * (at[v] >> log_nbytes));
                    exact = exact && exact_products(stored[i][v]);
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (BATCH > 1 && w + i >= source.count()) continue;
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    float scale = decoding_scale(u16(stored[i][v]));
                    float(&low)[V] = sums[v][0];
                    float(&high)[V] = sums[v][PARTS - 1];
                    if constexpr (TRANSFORM && C == INT4)
                        add_transformed<C>(low, high, raw[i][v], scale, block);
                    else if constexpr (TRANSFORM) add_transformed<C>(low, raw[i][v], scale);
                    else if (exact) add_both<C, true>(low, high, raw[i][v], scale, unit_one);
                    else add_both<C, false>(low, high, raw[i][v], scale, unit_one);
                }
            }
        }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                if (!SINGLE) divide(sums[v][p], options.divisor);
                u64 to = row.values + (element[v] + p * block / 2) * sizeof(T);
                if (inside[v]) store_elements<T, ALIGNED>(to, sums[v][p], options.saturate);
            }
    }
    if (tile != num_tiles) return;
    i64 done = num_full << log_block;
    int rest = int(row.numel - done);
    for (int base = 0; base < rest; base += WARP) {
        i64 i = done + base + lane_index();
        bool inside = i < row.numel;
        float sum[1];
        begin(sum, inside && row.carry ? row.carry + 4 * i : 0);
        sum[0] = sum_staged<C>(sum[0], source, row.wire, done, rest, base, log_block, TRANSFORM);
        if (!SINGLE) divide(sum, options.divisor);
        if (inside) store_element<T>(row.values + i * sizeof(T), sum[0], options.saturate);
    }
    check_padding<C>(source, row.wire, row.numel, log_block, row.code_padding, row.scale_padding,
                     options.complaint);
}

template <class T, Code C, bool TRANSFORM, bool SINGLE>
ZC_FN void decode_rows(const Rows& rows, const Source<SINGLE>& source, const Options& options) {
    Share<Row> share = share_of(rows);
    const int V = 16 / sizeof(T);
    u64 of_wires = options.misalignment | share.row.wire.codes;
    u64 of_scales = options.misalignment | share.row.wire.scales;
    if (is_aligned<16>(share.row.values) && is_aligned<V>(of_wires) && is_aligned<2>(of_scales))
        return decode_row<T, C, TRANSFORM, SINGLE, true>(share, source, options);
    decode_row<T, C, TRANSFORM, SINGLE, false>(share, source, options);
}

}  // namespace ZC_NS
