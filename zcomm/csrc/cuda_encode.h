// A row's elements to codes: tile by tile, each read once, and the short last block by one warp.
//
// A *tile* is what a warp does at once; the *closing* warp of a row also does its short last block
// and the padding behind it. ALIGNED bodies are the ones for vectors. Do not assume that a tile is
// full: lanes without a block work on another's, and store nothing.
#pragma once

#include "cuda_rows.h"

namespace ZC_NS {

template <Code C> ZC_FN Scale scale_for(u32 largest, bool stochastic) {
    if (is_fp8<C>() || !stochastic) return scale_of<C, NEAREST>(largest);
    return scale_of<C, STOCHASTIC>(largest);
}

template <Code C> ZC_FN u32 code_for(float value, const Scale& scale, bool stochastic, u32 word) {
    float scaled = mul(value, scale.inverse);
    if constexpr (is_fp8<C>()) return fp8_code<C>(scaled);
    else if (stochastic) return stochastic_code<C>(scaled, drawn_from(word));
    else return nearest_code<C>(scaled);
}

// The codes, one in each byte, of V consecutive values, the first of which is element `index`.
template <Code C, int V>
ZC_FN Raw<V> codes_for(const float (&values)[V], const Scale& scale, i64 index, bool stochastic,
                       u64 seed) {
    Raw<V> codes;
    u32 live = scale.live * 0x01010101u;
#pragma unroll
    for (int i = 0; i < V; i += 4) {
        Words drawn = {};
        if (!is_fp8<C>() && stochastic) drawn = philox(u64(index + i) / 4, seed);
        u32 code[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            code[k] = code_for<C>(values[i + k], scale, stochastic, drawn.word[k]);
        u32 low = __byte_perm(code[0], code[1], 0x0040), high = __byte_perm(code[2], code[3], 0x0040);
        codes.word[i / 4] = __byte_perm(low, high, 0x5410) & live;
    }
    return codes;
}

// Encodes V values of each half of a block; at: the address of the block's codes.
template <Code C, bool ALIGNED, int V>
ZC_FN void store_codes(u64 at, int j, int block, i64 index, const float (&low)[V],
                       const float (&high)[V], const Scale& scale, bool stochastic, u64 seed) {
    int half = block / 2;
    Raw<V> first = codes_for<C>(low, scale, index + j, stochastic, seed);
    Raw<V> second = codes_for<C>(high, scale, index + half + j, stochastic, seed);
    if (C == INT4) {
#pragma unroll
        for (int i = 0; i < V / 4; ++i)
            first.word[i] = (first.word[i] & 0x0F0F0F0Fu) | ((second.word[i] << 4) & 0xF0F0F0F0u);
    } else {
        store<V, ALIGNED>(at + half + j, second);
    }
    store<V, ALIGNED>(at + j, first);
}

template <Code C>
ZC_FN u32 staged_code(const float* staged, int i, const Scale& scale, i64 index, bool stochastic,
                      u64 seed) {
    u32 word = 0;
    if (!is_fp8<C>() && stochastic) {
        Words drawn = philox(u64(index + i) / 4, seed);
#pragma unroll
        for (int k = 0; k < 4; ++k) word = i % 4 == k ? drawn.word[k] : word;
    }
    return code_for<C>(staged[i], scale, stochastic, word) & scale.live;
}

// One warp encodes a short block whose values are staged, and whose largest key is known.
template <Code C>
ZC_FN void encode_staged(const float* staged, int numel, u32 largest, const Coded& to, i64 index,
                         bool stochastic, u64 seed) {
    Scale scale = scale_for<C>(largest_of(largest, WARP), stochastic);
    int nbytes = C == INT4 ? (numel + 1) / 2 : numel;
    for (int i = lane_index(); i < nbytes; i += WARP) {
        u32 code = staged_code<C>(staged, i, scale, index, stochastic, seed);
        if (C == INT4) {
            code &= 0xFu;
            if (nbytes + i < numel)
                code |= staged_code<C>(staged, nbytes + i, scale, index, stochastic, seed) << 4;
        }
        store_byte(to.codes + i, code);
    }
    if (lane_index() == 0) store_half(to.scales, scale.stored);
}

template <Code C>
ZC_FN void write_padding(const Coded& to, i64 numel, int log_block, int codes, int scales) {
    u64 at = padding_byte(to.codes + codes_nbytes<C>(numel, log_block), codes,
                          to.scales + scales_nbytes(numel, log_block), scales);
    if (at) store_byte(at, 0);
}

// BLOCK 0: any block, of which halves that need more than one vector a lane are read twice.
template <class T, Code C, int BLOCK, bool ALIGNED>
ZC_FN void encode_row(const Share<Row>& share, const Options& options, float* staged) {
    const int V = 16 / sizeof(T), VECTORS = BLOCK > 2 * WARP * V ? BLOCK / (2 * WARP * V) : 1;
    const bool stochastic = options.stochastic, transformed = options.transformed;
    const int log_block = options.log_block, block = 1 << log_block, half = block / 2;
    const int log_vectors = log_block - (V == 4 ? 3 : 4);
    const int log_lanes = log_vectors < 5 ? log_vectors : 5, lanes = 1 << log_lanes;
    const int vectors = BLOCK ? VECTORS : 1 << (log_vectors - log_lanes);
    const Row& row = share.row;
    i64 num_full = row.numel >> log_block;
    i64 num_tiles = ((num_full << log_lanes) + WARP - 1) / WARP, tile = share.first;
    int lane = lane_index() & (lanes - 1);
    for (; tile < num_tiles; tile += share.stride) {
        i64 which = (tile * WARP + lane_index()) >> log_lanes;
        bool inside = which < num_full;
        which = inside ? which : 0;
        u64 from = row.values + (which << log_block) * sizeof(T);
        float low[VECTORS][V], high[VECTORS][V];
        auto read = [&](int vector, float (&a)[V], float (&b)[V]) {
            u64 at = from + ((vector << log_lanes) + lane) * 16;
            Raw<16> first = load<16, ALIGNED>(at), second = load<16, ALIGNED>(at + half * sizeof(T));
#pragma unroll
            for (int i = 0; i < V; ++i) {
                a[i] = element<T>(first, i);
                b[i] = element<T>(second, i);
            }
            if (transformed) transform_lanes(a, b, block);
        };
        u32 largest = 0;
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
            float(&a)[V] = low[BLOCK ? v : 0];
            float(&b)[V] = high[BLOCK ? v : 0];
            read(v, a, b);
#pragma unroll
            for (int i = 0; i < V; ++i) {
                largest = largest < key(a[i]) ? key(a[i]) : largest;
                largest = largest < key(b[i]) ? key(b[i]) : largest;
            }
        }
        Scale scale = scale_for<C>(largest_of(largest, lanes), stochastic);
        u64 to = row.wire.codes + (which << (C == INT4 ? log_block - 1 : log_block));
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
            float(&a)[V] = low[BLOCK ? v : 0];
            float(&b)[V] = high[BLOCK ? v : 0];
            if (!BLOCK && vectors > 1) read(v, a, b);
            int j = ((v << log_lanes) + lane) * V;
            if (inside)
                store_codes<C, ALIGNED>(to, j, block, which << log_block, a, b, scale, stochastic,
                                        share.row.seed);
        }
        if (inside && lane == 0) store_half(row.wire.scales + 2 * which, scale.stored);
    }
    if (tile != num_tiles) return;
    i64 done = num_full << log_block;
    int rest = int(row.numel - done);
    if (rest) {
        u32 largest = 0;
        for (int base = 0; base < rest; base += WARP) {
            int i = base + lane_index();
            bool inside = i < rest;
            float value = inside ? load_element<T>(row.values + (done + i) * sizeof(T)) : 0.0f;
            if (transformed) value = transform_in_warp(value, rest - base < 32 ? rest - base : 32);
            if (inside) staged[i] = value;
            largest = inside && largest < key(value) ? key(value) : largest;
        }
        __syncwarp();
        Coded to = {row.wire.codes + codes_nbytes<C>(done, log_block),
                    row.wire.scales + 2 * num_full};
        encode_staged<C>(staged, rest, largest, to, done, stochastic, share.row.seed);
    }
    write_padding<C>(row.wire, row.numel, log_block, row.code_padding, row.scale_padding);
}

}  // namespace ZC_NS
