// What a kernel is given: rows, wires and options, as parameters.
//
// A *row* is a segment of a message; every row has a share of the grid's blocks. The structures have
// the layout of their siblings in zcomm/codecs/parameters.py. Do not assume that rows follow each
// other in memory, or that a row fills a block.
#pragma once

#include "cuda_lanes.h"

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

// The messages that are summed; SINGLE: one, and addresses are absolute.
template <bool SINGLE> struct Source {
    const Wires* wires;
    ZC_MEMBER int count() const { return SINGLE ? 1 : wires->count; }
    ZC_MEMBER u64 operator[](int w) const { return SINGLE ? 0 : wires->address[w]; }
};

ZC_FN constexpr int log2_of(int power) { return power < 2 ? 0 : 1 + log2_of(power / 2); }

template <Code C> ZC_FN constexpr bool is_fp8() { return C == E4M3 || C == E5M2; }

template <Code C> ZC_FN i64 codes_nbytes(i64 numel, int log_block) {
    if (C != INT4) return numel;
    i64 full = numel >> log_block, rest = numel - (full << log_block);
    return (full << (log_block - 1)) + (rest + 1) / 2;
}

ZC_FN i64 scales_nbytes(i64 numel, int log_block) {
    return ((numel + (i64(1) << log_block) - 1) >> log_block) * 2;
}

// Lanes below 16 take the bytes behind the codes, the others those behind the scales.
ZC_FN u64 padding_byte(u64 after_codes, int code_padding, u64 after_scales, int scale_padding) {
    int lane = lane_index(), i = lane % 16;
    if (lane < 16) return i < code_padding ? after_codes + i : 0;
    return i < scale_padding ? after_scales + i : 0;
}

}  // namespace ZC_NS
