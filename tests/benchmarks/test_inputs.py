"""The data of the checks: any part can be made alone, and designed data are exact in any order."""

import itertools

import numpy as np
import pytest
import torch

from benchmarks.collectives import inputs
from benchmarks.collectives.cases import DATA_TYPES
from benchmarks.collectives.perform import to_tensor, to_values
from zcomm.codecs import Codec

FLOATING = [name for name, dtype in DATA_TYPES.items() if dtype.floating]
TORCH = {
    "sum": lambda parts: sum(parts[1:], parts[0]),
    "prod": lambda parts: np.prod(np.stack(parts), axis=0, dtype=parts[0].dtype),
}


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_a_part_made_alone_is_the_part_of_the_whole(dtype):
    dtype = DATA_TYPES[dtype]
    for make in (
        lambda lo, hi: inputs.exact(dtype, "sum", 4, 7, 2, lo, hi),
        lambda lo, hi: inputs.normal(dtype, 7, 2, lo, hi),
        lambda lo, hi: inputs.random_words(7, 2, lo, hi),
    ):
        assert np.array_equal(make(0, 1000)[137:501], make(137, 501))


def test_ranks_and_seeds_draw_different_numbers():
    drawn = [inputs.random_words(seed, rank, 0, 100) for seed in (0, 1) for rank in (0, 1)]
    for a, b in itertools.combinations(drawn, 2):
        assert not np.any(a == b)


def test_normal_data_have_mean_0_and_variance_1():
    values = inputs.normal(DATA_TYPES["double"], 0, 0, 0, 10**6)
    # Of a million independent values the mean has deviation 1e-3, the variance less than 1.5e-3.
    assert abs(values.mean()) < 5e-3
    assert abs(values.var() - 1) < 7.5e-3
    assert np.abs(values).max() < 12**0.5


@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("dtype", DATA_TYPES)
@pytest.mark.parametrize("num_ranks", [1, 3, 4, 64])
def test_designed_data_are_exact_in_any_order(dtype, op, num_ranks):
    dtype = DATA_TYPES[dtype]
    parts = [inputs.exact(dtype, op, num_ranks, 5, rank, 0, 64) for rank in range(num_ranks)]
    true = TORCH[op]([part.astype(np.float64) for part in parts])
    if dtype.signed:
        assert len({part.tobytes() for part in parts}) == num_ranks
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(num_ranks)
        total = to_tensor(parts[order[0]], dtype)
        for rank in order[1:]:
            # In the type itself, so that every partial result is rounded, or wraps around.
            term = to_tensor(parts[rank], dtype)
            if dtype.name.startswith("uint"):
                pair = total.numpy(), term.numpy()
                total = torch.from_numpy(pair[0] + pair[1] if op == "sum" else pair[0] * pair[1])
            else:
                total = total + term if op == "sum" else total * term
        assert np.array_equal(to_values(total, dtype).astype(np.float64), true)


@pytest.mark.parametrize(
    "codec", ["int8", "int4", "int4:block=32", "int8:block=4096", "bf16", "fp16"]
)
@pytest.mark.parametrize("dtype", FLOATING)
def test_a_codec_does_not_change_data_on_its_grid(codec, dtype):
    dtype, codec = DATA_TYPES[dtype], Codec.parse(codec)
    whole = inputs.grid(dtype, 1000, 3, 0, 3000)
    for start in (0, 1000, 2000):
        chunk = whole[start : start + 1000].astype(np.float32)
        decoded = codec.decode(codec.encode(chunk), 1000, np.float32)
        assert np.array_equal(decoded, chunk)
    assert len(np.unique(whole)) == 16


@pytest.mark.parametrize("dtype", FLOATING)
def test_rounding_is_that_of_torch(dtype):
    dtype = DATA_TYPES[dtype]
    bits = np.random.default_rng(0).integers(0, 2**32, 10**5, dtype=np.uint32)
    ties = np.arange(0x3F800000, 0x3F900000, 0x1000, dtype=np.uint32)
    values = np.concatenate([bits, ties, [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000]]).astype(np.uint32)
    values = values.view(np.float32)
    values = values[~np.isnan(values)]
    rounded = inputs.round_to(values, dtype)
    expected = to_values(torch.from_numpy(values).to(dtype.torch), dtype)
    assert rounded.dtype == dtype.carrier
    assert np.array_equal(rounded.view(np.uint8), expected.view(np.uint8))
