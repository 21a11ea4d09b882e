// The random numbers of stochastic rounding, for a run of elements.
#pragma once

#include "elements.h"

namespace ZC_NS {
namespace {

// The keys of the rounds.
struct Keys {
    u32 of_a[10], of_c[10];
};

ZC_FN Keys keys_of(u64 seed) {
    Keys keys;
    for (u32 round = 0; round < 10; ++round) {
        keys.of_a[round] = u32(seed) + round * 0x9E3779B9u;
        keys.of_c[round] = u32(seed >> 32) + round * 0xBB67AE85u;
    }
    return keys;
}

#if ZC_SIMD
// What philox gives for the counters from `counter` on, word after word, CHAINS runs side by side:
// one alone waits for its multiplications. The high words of counters are that of the first.
template <int CHAINS>
ZC_FN void philox_lanes(u64 counter, const Keys& keys, I (&words)[2 * CHAINS]) {
    I a[CHAINS], b[CHAINS], c[CHAINS], d[CHAINS];  // in 64-bit lanes, of which the low words matter
    for (int k = 0; k < CHAINS; ++k) {
        a[k] = add(splat_wide(u32(counter) + k * LANES / 2), wide_counters());
        b[k] = splat_wide(counter >> 32);
        c[k] = d[k] = splat(0u);
    }
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round)
        for (int k = 0; k < CHAINS; ++k) {
            I of_a = wide_product(a[k], splat(0xD2511F53u));
            I of_c = wide_product(c[k], splat(0xCD9E8D57u));
            a[k] = differing(differing(high_words(of_c), b[k]), splat(keys.of_a[round]));
            c[k] = differing(differing(high_words(of_a), d[k]), splat(keys.of_c[round]));
            b[k] = of_c;
            d[k] = of_a;
        }
    for (int k = 0; k < CHAINS; ++k) {
        I first = low_words(a[k], b[k]), second = low_words(c[k], d[k]);
        words[2 * k] = low_pairs(first, second);
        words[2 * k + 1] = high_pairs(first, second);
    }
}
#endif

// Writes a number within (0, 1) for each of n elements, and something up to the next multiple of
// DRAWN. The elements are those of one tile; meanwhile they are fetched from `elements`.
#if ZC_SIMD
const int CHAINS = LANES == 16 ? 5 : 3, DRAWN = CHAINS * 2 * LANES;

template <int ITEMSIZE> void draw(Random random, i64 n, u8* out, const u8* elements) {
    const Keys keys = keys_of(random.seed);
    for (i64 i = 0; i < n; i += DRAWN) {
        const u8* ahead = elements + ITEMSIZE * i;
        for (int k = 0; k < ITEMSIZE * DRAWN; k += 64) __builtin_prefetch(ahead + k);
        I words[2 * CHAINS];
        philox_lanes<CHAINS>((random.first + i) / 4, keys, words);
        for (int k = 0; k < 2 * CHAINS; ++k) {
            I pattern = either(right<9>(words[k]), splat(bits(1.0f)));
            store_lanes(out + 4 * (i + k * LANES), flt(pattern) - splat(flt(0x3F7FFFFFu)));
        }
    }
}
#else
const int DRAWN = 4;

template <int ITEMSIZE> void draw(Random random, i64 n, u8* out, const u8*) {
    for (i64 i = 0; i < n; i += DRAWN) {
        Words drawn = philox((random.first + i) / 4, random.seed);
        for (int j = 0; j < DRAWN; ++j) store(out, i + j, drawn_from(drawn.word[j]));
    }
}
#endif

}  // namespace
}  // namespace ZC_NS
