// The loops over one tile, compiled once for every instruction set; the table of this one.
//
// ZC_NS names the copy. Each loop does what it can in vectors (simd.h, where there is one for the
// machine) and the rest one by one (codec.h), with the same bits. Nothing here may have external
// linkage but the table: a shared symbol could end up as the widest copy on a machine that cannot
// run it.
#include "table.h"

#include "casts.h"
#include "decode.h"
#include "encode.h"
#include "hadamard.h"

namespace ZC_NS {

#define ZC_SUMS(name, arg)                                               \
    {                                                                    \
        {name<arg, 1, false>, name<arg, 2, false>, name<arg, 4, false>}, \
        {name<arg, 1, true>, name<arg, 2, true>, name<arg, 4, true>}     \
    }
#define ZC_NEAREST(T) \
    {encode<T, INT8, NEAREST>, encode<T, INT4, NEAREST>, encode<T, E4M3, NEAREST>, \
     encode<T, E5M2, NEAREST>}
#define ZC_STOCHASTIC(T) {encode<T, INT8, STOCHASTIC>, encode<T, INT4, STOCHASTIC>}
#define ZC_DECODE(code) {decode<code, float>, decode<code, bf16>, decode<code, fp16>}

extern const zcomm::Table table;
const zcomm::Table table = {
    {copy<float>, copy<bf16>, copy<fp16>},
    {copy<float>, widen<bf16>, widen<fp16>},
    {narrow<float, false>, narrow<bf16, false>, narrow<fp16, false>},
    narrow<fp16, true>,
    {transform_tile<float, false>, transform_tile<bf16, false>, transform_tile<fp16, false>},
    transform_tile<float, true>,
    {ZC_NEAREST(float), ZC_NEAREST(bf16), ZC_NEAREST(fp16)},
    {ZC_STOCHASTIC(float), ZC_STOCHASTIC(bf16), ZC_STOCHASTIC(fp16)},
    {ZC_DECODE(INT8), ZC_DECODE(INT4), ZC_DECODE(E4M3), ZC_DECODE(E5M2)},
    {ZC_SUMS(sum_cast, float), ZC_SUMS(sum_cast, bf16), ZC_SUMS(sum_cast, fp16),
     ZC_SUMS(sum_codes, INT8), ZC_SUMS(sum_codes, INT4), ZC_SUMS(sum_codes, E4M3),
     ZC_SUMS(sum_codes, E5M2)},
};

}  // namespace ZC_NS
