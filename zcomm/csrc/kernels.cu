// The codec's kernels for CUDA devices: encode, decode, decode_reduce, decode_reduce_encode.
//
// Compiled at run time by NVRTC, and by the tests for an emulator on the host. A *row* is a segment
// of a message, a *tile* what a warp does at once, and the *closing* warp of a row also does its
// short last block and the padding behind it. Every row has a share of the grid's blocks. All
// kernels read their input once; where two bodies are compiled, ALIGNED is the one for vectors.
// Do not assume that addresses are aligned, that rows follow each other, or that a row has a block.
#include "lanes.h"

#ifndef ZC_SHARED
#define ZC_SHARED(type, name, numel) __shared__ type name[numel]
#endif
#define ZC_MEMBER __device__ __forceinline__

namespace ZC_NS {

enum { MAX_ROWS = 56, MAX_WIRES = 96, MAX_THREADS = 256 };

// Codes and scales: addresses, or distances from the start of each wire.
struct Coded {
    u64 codes;
    u64 scales;
};

struct Row {
    Coded wire;
    u64 values;  // the elements to encode, or where decoded ones go
    u64 carry;   // float32 sums to begin with, or 0
    u64 seed;
    i64 numel;
    u32 first;  // block of the grid
    u8 code_padding;   // bytes of zero behind the codes of a message's last row
    u8 scale_padding;
};

// A row that is decoded and encoded again.
struct PassedRow {
    Coded wire;
    Coded out;
    u64 seed;
    i64 numel;
    u32 first;
    u8 code_padding;
    u8 scale_padding;
    u8 out_code_padding;
    u8 out_scale_padding;
};

template <class R> struct List {
    R row[MAX_ROWS];
    int count;
};
typedef List<Row> Rows;
typedef List<PassedRow> PassedRows;

struct Wires {
    u64 address[MAX_WIRES];
    int count;
};

struct Options {
    u64 complaint;  // address of a word that is set where padding of a wire is not zero
    float divisor;
    int log_block;  // of the wires that are read; of the one written by encode
    int stochastic;
    int transformed;
    int saturate;
    int misalignment;  // the lowest bits of all wires' addresses, together
    u32 unit_one;      // UNIT_ONE; see add_nibbles
};

// The part of a row's tiles that a warp does: first, first + stride, ...
template <class R> struct Share {
    R row;
    i64 first;
    i64 stride;
};

template <class R> ZC_FN Share<R> share_of(const List<R>& rows) {
    int r = 0;
    while (r + 1 < rows.count && rows.row[r + 1].first <= blockIdx.x) ++r;
    u32 end = r + 1 < rows.count ? rows.row[r + 1].first : gridDim.x;
    int warps = int(blockDim.x) / WARP;
    i64 block = blockIdx.x - rows.row[r].first;
    return {rows.row[r], block * warps + int(threadIdx.x) / WARP,
            i64(end - rows.row[r].first) * warps};
}

// ---- Codes of values

template <Code C> ZC_FN constexpr bool is_fp8() { return C == E4M3 || C == E5M2; }

template <Code C> ZC_FN i64 codes_nbytes(i64 numel, int log_block) {
    if (C != INT4) return numel;
    i64 full = numel >> log_block, rest = numel - (full << log_block);
    return (full << (log_block - 1)) + (rest + 1) / 2;
}

ZC_FN i64 scales_nbytes(i64 numel, int log_block) {
    return ((numel + (i64(1) << log_block) - 1) >> log_block) * 2;
}

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

// Lanes below 16 take the bytes behind the codes, the others those behind the scales.
ZC_FN u64 padding_byte(u64 after_codes, int code_padding, u64 after_scales, int scale_padding) {
    int lane = lane_index(), i = lane % 16;
    if (lane < 16) return i < code_padding ? after_codes + i : 0;
    return i < scale_padding ? after_scales + i : 0;
}

template <Code C>
ZC_FN void write_padding(const Coded& to, i64 numel, int log_block, int codes, int scales) {
    u64 at = padding_byte(to.codes + codes_nbytes<C>(numel, log_block), codes,
                          to.scales + scales_nbytes(numel, log_block), scales);
    if (at) store_byte(at, 0);
}

// ---- encode

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

ZC_FN constexpr int log2_of(int power) { return power < 2 ? 0 : 1 + log2_of(power / 2); }

// Blocks that a multiprocessor has room for: more hide the latency of memory, fewer spill nothing.
template <Code C, int BLOCK, Rounding R, bool TRANSFORM> ZC_FN constexpr int resident_blocks() {
    if (BLOCK == 0) return 2;
    return R == STOCHASTIC || TRANSFORM ? 3 : is_fp8<C>() ? 5 : 6;
}

template <class T, Code C, int BLOCK, Rounding R, bool TRANSFORM>
__global__ void __launch_bounds__(MAX_THREADS, (resident_blocks<C, BLOCK, R, TRANSFORM>()))
    encode(const __grid_constant__ Rows rows, const __grid_constant__ Options options) {
    ZC_SHARED(float, staged, BLOCK ? BLOCK : LARGEST_BLOCK);
    Share<Row> share = share_of(rows);
    Options chosen = options;
    if (BLOCK) {
        chosen.log_block = log2_of(BLOCK);
        chosen.stochastic = R == STOCHASTIC;
        chosen.transformed = TRANSFORM;
        const int V = 16 / sizeof(T);
        if (is_aligned<16>(share.row.values) && is_aligned<V>(share.row.wire.codes))
            return encode_row<T, C, BLOCK, true>(share, chosen, staged);
    }
    encode_row<T, C, BLOCK, false>(share, chosen, staged);
}

// ---- Values of codes

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

// The messages that are summed; SINGLE: one, and addresses are absolute.
template <bool SINGLE> struct Source {
    const Wires* wires;
    ZC_MEMBER int count() const { return SINGLE ? 1 : wires->count; }
    ZC_MEMBER u64 operator[](int w) const { return SINGLE ? 0 : wires->address[w]; }
};

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

// ---- decode, decode_reduce

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

template <class T, Code C, bool TRANSFORM>
__global__ void __launch_bounds__(MAX_THREADS, TRANSFORM ? 2 : 3)
    decode(const __grid_constant__ Rows rows, const __grid_constant__ Options options) {
    decode_rows<T, C, TRANSFORM>(rows, Source<true>{}, options);
}

template <class T, Code C, bool TRANSFORM>
__global__ void __launch_bounds__(MAX_THREADS, 2)
    decode_reduce(const __grid_constant__ Rows rows, const __grid_constant__ Wires wires,
                  const __grid_constant__ Options options) {
    decode_rows<T, C, TRANSFORM>(rows, Source<false>{&wires}, options);
}

// ---- decode_reduce_encode

template <Code IN, Code OUT, int BLOCK, Rounding R, bool TRANSFORM_IN, bool TRANSFORM, bool ALIGNED>
ZC_FN void pass_row(const Share<PassedRow>& share, const Source<false>& source,
                    const Options& options, float* staged) {
    const int V = 16, HALF = BLOCK / 2, LANES = BLOCK / (2 * V), PIECES = IN == INT4 ? 1 : 2;
    const int BATCH = TRANSFORM_IN ? 1 : 4 / PIECES, LOG_BLOCK = log2_of(BLOCK);
    const bool stochastic = R == STOCHASTIC;
    const u32 unit_one = options.unit_one;
    const PassedRow& row = share.row;
    i64 num_full = row.numel >> LOG_BLOCK;
    i64 num_tiles = (num_full * LANES + WARP - 1) / WARP, tile = share.first;
    int j = lane_index() % LANES * V;
    for (; tile < num_tiles; tile += share.stride) {
        i64 which = (tile * WARP + lane_index()) / LANES;
        bool inside = which < num_full;
        which = inside ? which : 0;
        float low[V], high[V];
        begin(low, 0);
        begin(high, 0);
#pragma unroll 1
        for (int w = 0; w < source.count(); w += BATCH) {
            Raw<V> raw[BATCH][PIECES];
            u32 stored[BATCH][PIECES];
            bool exact = true;
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (BATCH > 1 && w + i >= source.count()) continue;
#pragma unroll
                for (int p = 0; p < PIECES; ++p) {
                    i64 code = IN == INT4 ? which * HALF + j : which * BLOCK + p * HALF + j;
                    i64 scale = IN == INT4 ? which : code >> options.log_block;
                    raw[i][p] = load<V, ALIGNED>(source[w + i] + row.wire.codes + code);
                    stored[i][p] =
                        load_scale<ALIGNED>(source[w + i] + row.wire.scales + 2 * scale);
                    exact = exact && exact_products(stored[i][p]);
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (BATCH > 1 && w + i >= source.count()) continue;
                float scale = decoding_scale(u16(stored[i][0]));
                float other = decoding_scale(u16(stored[i][PIECES - 1]));
                if constexpr (TRANSFORM_IN && IN == INT4) {
                    add_transformed<IN>(low, high, raw[i][0], scale, BLOCK);
                } else if constexpr (TRANSFORM_IN) {
                    add_transformed<IN>(low, raw[i][0], scale);
                    add_transformed<IN>(high, raw[i][PIECES - 1], other);
                } else if (IN == INT4) {
                    if (exact) add_both<IN, true>(low, high, raw[i][0], scale, unit_one);
                    else add_both<IN, false>(low, high, raw[i][0], scale, unit_one);
                } else if (exact) {
                    add_codes<IN, true>(low, raw[i][0], scale, false);
                    add_codes<IN, true>(high, raw[i][PIECES - 1], other, false);
                } else {
                    add_codes<IN, false>(low, raw[i][0], scale, false);
                    add_codes<IN, false>(high, raw[i][PIECES - 1], other, false);
                }
            }
        }
        if (TRANSFORM) transform_lanes(low, high, BLOCK);
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < V; ++i) {
            largest = largest < key(low[i]) ? key(low[i]) : largest;
            largest = largest < key(high[i]) ? key(high[i]) : largest;
        }
        Scale scale = scale_for<OUT>(largest_of(largest, LANES), stochastic);
        u64 to = row.out.codes + which * (OUT == INT4 ? HALF : BLOCK);
        if (inside)
            store_codes<OUT, ALIGNED>(to, j, BLOCK, which * BLOCK, low, high, scale, stochastic,
                                      share.row.seed);
        if (inside && j == 0) store_half(row.out.scales + 2 * which, scale.stored);
    }
    if (tile != num_tiles) return;
    i64 done = num_full * BLOCK;
    int rest = int(row.numel - done);
    if (rest) {
        u32 largest = 0;
        for (int base = 0; base < rest; base += WARP) {
            int i = base + lane_index();
            float value = sum_staged<IN>(flt(SIGN), source, row.wire, done, rest, base,
                                         options.log_block, TRANSFORM_IN);
            if (TRANSFORM)
                value = transform_in_warp(value, rest - base < WARP ? rest - base : WARP);
            if (i < rest) staged[i] = value;
            largest = i < rest && largest < key(value) ? key(value) : largest;
        }
        __syncwarp();
        Coded to = {row.out.codes + codes_nbytes<OUT>(done, LOG_BLOCK),
                    row.out.scales + 2 * num_full};
        encode_staged<OUT>(staged, rest, largest, to, done, stochastic, share.row.seed);
    }
    write_padding<OUT>(row.out, row.numel, LOG_BLOCK, row.out_code_padding,
                       row.out_scale_padding);
    check_padding<IN>(source, row.wire, row.numel, options.log_block, row.code_padding,
                      row.scale_padding, options.complaint);
}

// int4 wires have blocks of the size that is written, 8-bit ones any.
template <Code IN, Code OUT, int BLOCK, Rounding R, bool TRANSFORM_IN, bool TRANSFORM>
__global__ void __launch_bounds__(MAX_THREADS, 2)
    decode_reduce_encode(const __grid_constant__ PassedRows rows,
                         const __grid_constant__ Wires wires,
                         const __grid_constant__ Options options) {
    ZC_SHARED(float, staged, BLOCK);
    Share<PassedRow> share = share_of(rows);
    Source<false> source{&wires};
    u64 of_wires = options.misalignment | share.row.wire.codes | share.row.out.codes;
    u64 of_scales = options.misalignment | share.row.wire.scales;
    if (is_aligned<16>(of_wires) && is_aligned<2>(of_scales))
        pass_row<IN, OUT, BLOCK, R, TRANSFORM_IN, TRANSFORM, true>(share, source, options, staged);
    else
        pass_row<IN, OUT, BLOCK, R, TRANSFORM_IN, TRANSFORM, false>(share, source, options, staged);
}

// ---- Casts: elements of W, each for itself, are all there is in a message

template <class W, class T, bool ALIGNED>
ZC_FN void cast_row(const Share<Row>& share, const Wires& wires, const Options& options) {
    const int V = 16 / (sizeof(W) < sizeof(T) ? sizeof(T) : sizeof(W)), VECTORS = 4, BATCH = 2;
    const Row& row = share.row;
    i64 num_vectors = row.numel / V, tile = share.first;
    i64 num_tiles = (num_vectors + WARP * VECTORS - 1) / (WARP * VECTORS);
    for (; tile < num_tiles; tile += share.stride) {
        float sums[VECTORS][V];
        i64 at[VECTORS];
        bool inside[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            at[v] = (tile * VECTORS + v) * WARP + lane_index();
            inside[v] = at[v] < num_vectors;
            at[v] = inside[v] ? at[v] * V : 0;
            begin(sums[v], row.carry ? row.carry + 4 * at[v] : 0);
        }
#pragma unroll 1
        for (int w = 0; w < wires.count; w += BATCH) {
            Raw<V * int(sizeof(W))> raw[BATCH][VECTORS];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (w + i >= wires.count) continue;
                u64 wire = wires.address[w + i] + row.wire.codes;
#pragma unroll
                for (int v = 0; v < VECTORS; ++v)
                    raw[i][v] = load<V * int(sizeof(W)), ALIGNED>(wire + at[v] * sizeof(W));
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (w + i >= wires.count) continue;
#pragma unroll
                for (int v = 0; v < VECTORS; ++v)
#pragma unroll
                    for (int k = 0; k < V; ++k)
                        sums[v][k] = add(sums[v][k], element<W>(raw[i][v], k));
            }
        }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            divide(sums[v], options.divisor);
            u64 to = row.values + at[v] * sizeof(T);
            if (inside[v]) store_elements<T, ALIGNED>(to, sums[v], options.saturate);
        }
    }
    i64 i = num_vectors * V + lane_index();
    if (tile != num_tiles || i >= row.numel) return;
    float sum[1];
    begin(sum, row.carry ? row.carry + 4 * i : 0);
    for (int w = 0; w < wires.count; ++w)
        sum[0] = add(sum[0], load_element<W>(wires.address[w] + row.wire.codes + i * sizeof(W)));
    divide(sum, options.divisor);
    store_element<T>(row.values + i * sizeof(T), sum[0], options.saturate);
}

// Sums of elements of W as elements of T; with one wire a conversion.
template <class W, class T>
__global__ void __launch_bounds__(MAX_THREADS, 2)
    reduce_casts(const __grid_constant__ Rows rows, const __grid_constant__ Wires wires,
                 const __grid_constant__ Options options) {
    Share<Row> share = share_of(rows);
    u64 of_all = options.misalignment | share.row.wire.codes | share.row.values;
    if (is_aligned<16>(of_all)) cast_row<W, T, true>(share, wires, options);
    else cast_row<W, T, false>(share, wires, options);
}

}  // namespace ZC_NS
