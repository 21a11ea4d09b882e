// What the loops of one instruction set offer: a table of functions, chosen once at run time.
//
// Pointers to bytes may have any alignment. Values are float32. A *tile* is a run of whole blocks,
// at most TILE elements, or what is left of a segment. Inputs and outputs must not overlap.
#pragma once

namespace zcomm {

typedef unsigned char u8;
typedef long long i64;

enum Dtype { FLOAT32, BFLOAT16, FLOAT16, DTYPES };
enum Format { NONE, BF16, FP16, INT8, INT4, FORMATS };  // the first three in the order of Dtype

const i64 TILE = 4096;  // divides into blocks of every size; 16 KiB of float32 stay in the L1 cache
const int MOST_WIRES = 4;  // that one pass over a tile sums

// Reads n values.
typedef void (*Widen)(const u8* in, i64 n, u8* out);
// Writes n float32 values divided by divisor, NaN in its one form.
typedef void (*Narrow)(const u8* in, i64 n, float divisor, u8* out);
// Writes codes and scales of n values.
typedef void (*Encode)(const u8* in, i64 n, i64 block, u8* codes, u8* scales);
// Writes, or adds to, n float32 values: the sum of 1, 2 or 4 wires in ascending order.
typedef void (*Sum)(const u8* const* codes, const u8* const* scales, i64 n, i64 block, u8* out);

struct Table {
    Widen copy[DTYPES];        // same dtype, NaN in its one form
    Widen widen[DTYPES];       // to float32, as it is
    Narrow narrow[DTYPES];     // a value beyond float16 becomes infinite
    Narrow saturate;           // to float16; a finite value beyond it becomes the largest one
    Encode encode[DTYPES][2];  // to int8, int4
    Sum sum[FORMATS][2][3];    // [][adds to what is there][1, 2, 4 wires]
};

}  // namespace zcomm
