// The functions of codec.h that differ on a device, each applied to arrays of 32-bit patterns.
#include "codec.h"

namespace zc {

enum Function { ADD, SUB, MUL, QUOTIENT, FUSED, INVERSE, FROM_FP16, TO_FP16, FLOOR, HIGH_PRODUCT };

template <Function F> ZC_FN u32 applied(u32 a, u32 b, u32 c) {
    if (F == ADD) return bits(add(flt(a), flt(b)));
    if (F == SUB) return bits(sub(flt(a), flt(b)));
    if (F == MUL) return bits(mul(flt(a), flt(b)));
    if (F == QUOTIENT) return bits(quotient(flt(a), flt(b)));
    if (F == FUSED) return bits(fused(flt(a), flt(b), flt(c)));
    if (F == INVERSE) return bits(inverse_of(flt(a)));
    if (F == FROM_FP16) return bits(to_float(fp16{u16(a)}));
    if (F == TO_FP16) return rounded_fp16(flt(a));
    if (F == FLOOR) return floor_code(flt(a));
    return high_product(a, b);
}

template <Function F> __global__ void apply(u64 a, u64 b, u64 c, u64 out, i64 numel) {
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < numel; i += gridDim.x * blockDim.x)
        reinterpret_cast<u32*>(out)[i] =
            applied<F>(reinterpret_cast<const u32*>(a)[i], reinterpret_cast<const u32*>(b)[i],
                       reinterpret_cast<const u32*>(c)[i]);
}

}  // namespace zc
