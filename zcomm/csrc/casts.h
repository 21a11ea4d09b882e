// Loops between dtypes, and sums of cast wires.
#pragma once

#include "elements.h"

namespace ZC_NS {
namespace {

template <class T> void copy(const u8* __restrict in, i64 n, u8* __restrict out) {
    for (i64 i = 0; i < n; ++i) store(out, i, canonical(load<T>(in, i)));
}

template <class T> void widen(const u8* __restrict in, i64 n, u8* __restrict out) {
    i64 i = 0;
#if ZC_SIMD
    for (; i + LANES <= n; i += LANES) store_rounded<float, false>(out, i, lanes<T>(in, i));
#endif
    for (; i < n; ++i) store(out, i, to_float(canonical(load<T>(in, i))));
}

enum Division { BY_ONE, BY_POWER_OF_TWO, BY_ANY };

// divisor: its reciprocal for a power of two, which gives the same bits and is faster.
template <Division D, class V> ZC_FN V divided(V v, V divisor) {
    return D == BY_ONE ? v : D == BY_POWER_OF_TWO ? v * divisor : v / divisor;
}

template <class T, bool SATURATE, Division D>
ZC_FN void narrow_loop(const u8* __restrict in, i64 n, float divisor, u8* __restrict out) {
    i64 i = 0;
#if ZC_SIMD
    for (F by = splat(divisor); i + LANES <= n; i += LANES)
        store_rounded<T, SATURATE>(out, i, divided<D>(lanes<float>(in, i), by));
#endif
    for (; i < n; ++i)
        store(out, i, from_float<T, SATURATE>(divided<D>(load<float>(in, i), divisor)));
}

template <class T, bool SATURATE>
void narrow(const u8* __restrict in, i64 n, float divisor, u8* __restrict out) {
    bool power_of_two = (bits(divisor) & 0x7FFFFFu) == 0;
    if (divisor == 1.0f) narrow_loop<T, SATURATE, BY_ONE>(in, n, divisor, out);
    else if (power_of_two) narrow_loop<T, SATURATE, BY_POWER_OF_TWO>(in, n, 1.0f / divisor, out);
    else narrow_loop<T, SATURATE, BY_ANY>(in, n, divisor, out);
}

template <class T, int N, bool ADD>
void sum_cast(const u8* const* codes, const u8* const*, i64 n, i64, u8* __restrict out) {
    const u8* wires[N];
    for (int w = 0; w < N; ++w) wires[w] = codes[w];
    i64 i = 0;
#if ZC_SIMD
    for (; i + LANES <= n; i += LANES) {
        F total = lanes<T>(wires[0], i);
        if (ADD) total = lanes<float>(out, i) + total;
        for (int w = 1; w < N; ++w) total = total + lanes<T>(wires[w], i);
        store_lanes(out + 4 * i, total);
    }
#endif
    for (; i < n; ++i) {
        float total = to_float(load<T>(wires[0], i));
        if (ADD) total = load<float>(out, i) + total;
        for (int w = 1; w < N; ++w) total += to_float(load<T>(wires[w], i));
        store(out, i, total);
    }
}

}  // namespace
}  // namespace ZC_NS
