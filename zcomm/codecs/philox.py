"""Random numbers for stochastic rounding: Philox4x32-10, a function of a counter and a key.

Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), section 3.3. A
*counter* is four 32-bit words, a *key* is two; both are held in 64 bits here. Do not assume a
state: element i of every segment draws the same number from the same seed, whoever asks and when.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Counter = tuple[Words, Words, Words, Words]

NUM_ROUNDS = 10
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
LOW, WORD = np.uint64(0xFFFFFFFF), np.uint64(32)


def uniform(seed: int, first: int, numel: int) -> npt.NDArray[np.float32]:
    """Return the numbers of elements ``first``, ``first + 1``, ..., each above 0 and below 1.

    They are odd multiples of 2^-24. ``first`` is a multiple of 4; 0 <= ``seed`` < 2^64.
    """
    index = np.arange(first // 4, first // 4 + -(-numel // 4), dtype=np.uint64)
    zero = np.zeros_like(index)
    words = philox4x32((index & LOW, index >> WORD, zero, zero), (seed & 0xFFFFFFFF, seed >> 32))
    drawn = np.stack(words, axis=1).reshape(-1)[:numel].astype(np.uint32)
    odd = ((drawn >> np.uint32(9)) << np.uint32(1)) | np.uint32(1)
    return odd.astype(np.float32) * np.float32(2.0**-24)


def philox4x32(counter: Counter, key: tuple[int, int]) -> Counter:
    """Return the four words of every counter after ten rounds."""
    a, b, c, d = counter
    for i in range(NUM_ROUNDS):
        k, m = ((word + i * step) & 0xFFFFFFFF for word, step in zip(key, KEY_STEPS, strict=True))
        p, q = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b = (q >> WORD) ^ b ^ np.uint64(k), q & LOW
        c, d = (p >> WORD) ^ d ^ np.uint64(m), p & LOW
    return a, b, c, d
