// What the loops of one instruction set offer: a table of functions, chosen once at run time.
//
// Pointers to bytes may have any alignment. Values are float32. A *tile* is a run of whole blocks,
// at most TILE elements, or what is left of a segment. Inputs and outputs must not overlap, except
// where they may be the same.
#pragma once

namespace zcomm {

typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;

enum Dtype { FLOAT32, BFLOAT16, FLOAT16, DTYPES };
enum Format { NONE, BF16, FP16, INT8, INT4, E4M3, E5M2, FORMATS };
// The first formats are casts, in the order of Dtype; the others have codes.
enum { CASTS = DTYPES, CODES = FORMATS - CASTS, INTEGERS = 2 };

const i64 TILE = 4096;  // divides into blocks of every size; 16 KiB of float32 stay in the L1 cache
const int MOST_WIRES = 4;  // that one pass over a tile sums

// Where the random numbers of a tile come from: `first` counts its first element in its segment.
struct Random {
    u64 first, seed;
};

// Reads n values.
typedef void (*Widen)(const u8* in, i64 n, u8* out);
// Writes n float32 values divided by divisor, NaN in its one form.
typedef void (*Narrow)(const u8* in, i64 n, float divisor, u8* out);
// Writes codes and scales of n values; codes past the caches where streamed.
typedef void (*Encode)(const u8* in, i64 n, i64 block, Random, bool streamed, u8* codes,
                       u8* scales);
// Writes the n values of one wire, NaN in its one form; past the caches where streamed.
typedef void (*Decode)(const u8* codes, const u8* scales, i64 n, i64 block, bool streamed, u8* out);
// Writes, or adds to, n float32 values: the sum of 1, 2 or 4 wires in ascending order.
typedef void (*Sum)(const u8* const* codes, const u8* const* scales, i64 n, i64 block, u8* out);

struct Table {
    Widen copy[DTYPES];         // same dtype, NaN in its one form
    Widen widen[DTYPES];        // to float32, as it is
    Narrow narrow[DTYPES];      // a value beyond float16 becomes infinite
    Narrow saturate;            // to float16; a finite value beyond it becomes the largest one
    Widen transform[DTYPES];    // to float32, each group of 32 transformed; out may be in
    Widen add_transform;        // the same of float32 values, added to what is there
    Encode nearest[DTYPES][CODES];
    Encode stochastic[DTYPES][INTEGERS];
    Decode decode[CODES][DTYPES];  // a finite value beyond float16 becomes its largest one
    Sum sum[FORMATS][2][3];        // [][adds to what is there][1, 2, 4 wires]
};

}  // namespace zcomm
