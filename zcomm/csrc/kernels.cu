// The codec's kernels for CUDA devices: encode, decode, decode_reduce, decode_reduce_encode, and
// reduce_casts, which is all four for codecs without blocks.
//
// Compiled at run time by NVRTC, and by the tests for an emulator on the host; instances.py names
// what is compiled. Every kernel reads its input once, at any alignment, with vectors where it can;
// where two bodies are compiled, ALIGNED is the one for vectors. Do not assume an order among blocks.
#include "cuda_decode.h"
#include "cuda_encode.h"

namespace ZC_NS {

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

// Elements of W, each for itself, are all there is in a message of a cast.
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
