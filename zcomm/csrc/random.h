// The random numbers of stochastic rounding, for a run of elements.
#pragma once

#include "elements.h"

namespace ZC_NS {
namespace {

#if ZC_SIMD
// What philox gives for the counters from a multiple of 2 * LANES / 4 on, word after word.
ZC_FN void philox_lanes(u64 counter, u64 seed, I (&words)[2]) {
    I a = either(splat_wide(u32(counter)), wide_counters()), b = splat_wide(counter >> 32);
    I c = splat(0u), d = splat(0u);
    u32 key = u32(seed), other_key = u32(seed >> 32);
    for (int round = 0; round < 10; ++round) {  // in 64-bit lanes, of which the low words matter
        I of_a = wide_product(a, splat(0xD2511F53u)), of_c = wide_product(c, splat(0xCD9E8D57u));
        a = differing(differing(high_words(of_c), b), splat(key));
        c = differing(differing(high_words(of_a), d), splat(other_key));
        b = of_c;
        d = of_a;
        key += 0x9E3779B9u;
        other_key += 0xBB67AE85u;
    }
    I first = low_words(a, b), second = low_words(c, d);
    words[0] = low_pairs(first, second);
    words[1] = high_pairs(first, second);
}
#endif

// Writes a number within (0, 1) for each of n elements and up to the next multiple of 32. The first
// element's number in its segment is a multiple of 32.
void draw(Random random, i64 n, u8* out) {
    for (i64 i = 0; i < n; i += 32)
#if ZC_SIMD
        for (i64 k = i; k < i + 32; k += 2 * LANES) {
            I words[2];
            philox_lanes((random.first + k) / 4, random.seed, words);
            for (int half = 0; half < 2; ++half) {
                I pattern = either(right<9>(words[half]), splat(bits(1.0f)));
                store_lanes(out + 4 * (k + half * LANES), flt(pattern) - splat(flt(0x3F7FFFFFu)));
            }
        }
#else
        for (i64 k = i; k < i + 32; k += 4) {
            Words drawn = philox((random.first + k) / 4, random.seed);
            for (int j = 0; j < 4; ++j) store(out, k + j, drawn_from(drawn.word[j]));
        }
#endif
}

}  // namespace
}  // namespace ZC_NS
