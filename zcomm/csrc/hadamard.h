// The Hadamard transform of the groups of a tile.
#pragma once

#include "elements.h"

namespace ZC_NS {
namespace {

#if ZC_SIMD
enum { GROUP_VECTORS = TRANSFORMED / LANES };

// -1 in lanes whose number has the bit DISTANCE, 1 in the others.
template <int DISTANCE> ZC_FN F signs() {
    float sign[LANES];
    for (int lane = 0; lane < LANES; ++lane) sign[lane] = lane & DISTANCE ? -1.0f : 1.0f;
    return load_lanes(reinterpret_cast<const u8*>(sign));
}

// One stage: b + a in the first of two lanes, a - b in the second.
template <int DISTANCE> ZC_FN F butterflies(F v) {
    if constexpr (DISTANCE >= LANES) return v;
    else return multiply_add(v, signs<DISTANCE>(), swapped<DISTANCE>(v));
}

ZC_FN F transformed_lanes(F v) {
    F small = splat(flt(TRANSFORMED_AS_ZERO));
    v = flt(where_less(magnitude(v), small, splat(0u), bits(v)));
    v = butterflies<2>(butterflies<1>(v));
    return butterflies<8>(butterflies<4>(v));
}

template <class T, bool ADD> ZC_FN void transform_group(const u8* in, i64 i, u8* out) {
    F v[GROUP_VECTORS];
    for (int k = 0; k < GROUP_VECTORS; ++k) v[k] = transformed_lanes(lanes<T>(in, i + k * LANES));
    for (int distance = 1; distance < GROUP_VECTORS; distance *= 2)
        for (int k = 0; k < GROUP_VECTORS; ++k)
            if (!(k & distance)) {
                F a = v[k], b = v[k + distance];
                v[k] = a + b;
                v[k + distance] = a - b;
            }
    for (int k = 0; k < GROUP_VECTORS; ++k) {
        u8* at = out + 4 * (i + k * LANES);
        F result = v[k] * splat(transform_factor(TRANSFORMED));
        store_lanes(at, ADD ? load_lanes(at) + result : result);
    }
}
#endif

template <class T, bool ADD> void transform_tile(const u8* in, i64 n, u8* out) {
    i64 i = 0;
#if ZC_SIMD
    for (; i + TRANSFORMED <= n; i += TRANSFORMED) transform_group<T, ADD>(in, i, out);
#endif
    for (; i < n; i += TRANSFORMED) {
        float group[TRANSFORMED];
        int numel = n - i < TRANSFORMED ? int(n - i) : int(TRANSFORMED);
        for (int j = 0; j < numel; ++j) group[j] = to_float(load<T>(in, i + j));
        transform(group, numel);
        for (int j = 0; j < numel; ++j)
            store(out, i + j, ADD ? load<float>(out, i + j) + group[j] : group[j]);
    }
}

}  // namespace
}  // namespace ZC_NS
