"""Messages to test on: values of every kind, segments anywhere, memory at any address."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from zcomm import Codec
from zcomm.codecs import reference
from zcomm.codecs.wire import ITEMSIZE, layout

CODECS = [
    Codec.parse(text)
    for text in (
        "int8",
        "int4",
        "int8:block=32",
        "int4:block=32",
        "int8:block=2048",
        "int4:block=4096",
        "fp8_e4m3",
        "fp8_e5m2:block=32",
        "fp8_e4m3:block=256,transform=hadamard",
        "int8:transform=hadamard",
        "int8:block=1024,rounding=stochastic",
        "int4:block=64,rounding=stochastic,transform=hadamard",
        "bf16",
        "fp16",
        "none",
    )
]
DTYPES = list(ITEMSIZE)
KINDS = (
    "normal",
    "heavy",
    "wide",
    "bits",
    "special",
    "level",
    "constant",
    "ties",
    "tiny",
    "edge",
    "edge_hadamard",
    "subnormal",
    "huge",
    "zero",
)
LARGEST_CODES = (7, 8, 127, 128, 448, 57344)
SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-38, 3.4028235e38, -3.4028235e38]


@dataclass(frozen=True)
class Message:
    """Segments in a memory of ``numel`` elements, and what seeds its values."""

    codec: Codec
    dtype: str
    starts: np.ndarray
    lengths: np.ndarray
    numel: int
    kind: str
    seed: int
    offset: int

    @property
    def wire_nbytes(self):
        return layout(self.codec, self.lengths).nbytes

    def values(self, dtype=None, *, stream=0):
        """Memory of ``dtype`` with values of this message's kind."""
        dtype = dtype or self.dtype
        rng = np.random.default_rng([self.seed, stream])
        return drawn(rng, self.kind, self.numel, dtype, self.offset)

    def wires(self, count):
        """Messages to decode: most encoded by the reference, some with random bytes."""
        rng = np.random.default_rng([self.seed, 12345])
        return [self._wire(stream, rng.random() < 0.3) for stream in range(count)]

    def _wire(self, stream, random):
        wire = memory(self.wire_nbytes, self.offset + stream)
        values = self.values("float32", stream=stream)
        reference.encode(self.codec, values, "float32", self.starts, self.lengths, wire)
        if random:
            noise = np.random.default_rng([self.seed, stream]).integers(0, 256, wire.size, np.uint8)
            parts = layout(self.codec, self.lengths)
            noise[int(parts.codes[-1]) : int(parts.scales[0])] = 0
            noise[int(parts.scales[-1]) :] = 0
            wire[:] = noise
        return wire


def memory(nbytes, offset=0, fill=0):
    """A 1-D uint8 array ``offset`` bytes into an allocation that ends where it ends."""
    return np.full(offset + nbytes, fill, np.uint8)[offset:]


def drawn(rng, kind, numel, dtype, offset=0):
    """Memory with ``numel`` values of one kind."""
    result = memory(numel * ITEMSIZE[dtype], offset)
    if kind == "bits":
        result[:] = rng.integers(0, 256, result.size, np.uint8)
        return result
    with np.errstate(all="ignore"):
        values = _values(rng, kind, numel).astype(np.float32)
    rounded = reference.from_float32(values, dtype, saturate=False)
    result[:] = rounded.view(np.uint8)
    return result


def _values(rng, kind, numel):
    normal = rng.standard_normal(numel)
    if kind == "special":
        return np.where(rng.random(numel) < 0.05, rng.choice(SPECIAL, numel), normal)
    if kind in _GENERATORS:
        return _GENERATORS[kind](rng, numel)
    return normal * _FACTORS[kind](rng, normal)


_FACTORS = {
    "normal": lambda rng, x: 1,
    "wide": lambda rng, x: 2.0 ** rng.integers(-149, 128, x.size),
    "tiny": lambda rng, x: 2.0 ** rng.integers(-104, -80),
    "huge": lambda rng, x: 3.4028235e38 / np.abs(x).max(initial=1e-9),
    "zero": lambda rng, x: 0,
}


def _ties(rng, numel):
    """Halfway between codes, in blocks whose extreme is the largest code times a power of two."""
    largest = rng.choice(LARGEST_CODES)
    steps = rng.integers(0, 32, numel) * 2.0 ** rng.integers(-18, 11, numel)
    if largest < 448:
        steps = rng.integers(0, 2 * largest + 1, numel) / 2
    signed = np.minimum(steps, largest) * rng.choice([-1, 1], numel)
    signed[:: rng.choice([7, 32])] = rng.choice([-1, 1]) * largest
    return signed * 2.0 ** rng.choice([0, 0, -3, 40, -70])


def _edge(rng, numel):
    """Blocks whose scale is at the flush, 2^-100, or a few roundings beside it."""
    beside = 1 + np.array([-(2.0**-7), -(2.0**-8), -(2.0**-9), -(2.0**-23), 0, 2.0**-23, 2.0**-9])
    extreme = rng.choice(LARGEST_CODES) * 2.0**-100 * _runs(rng, numel, beside)
    return extreme * rng.choice([-1, 1, 0.5, 0.3, 0.001, 2.0**-3], numel)


def _edge_hadamard(rng, numel):
    """Values at the flush of the transform, 2^-102, among others that keep the block alive."""
    beside = 1 + np.array([-(2.0**-23), 0, 2.0**-23, -0.5, 0.5])
    small = 2.0**-102 * rng.choice(beside, numel) * rng.choice([-1, 1], numel)
    large = rng.standard_normal(numel) * 2.0 ** rng.integers(-99, -80)
    return np.where(rng.random(numel) < _runs(rng, numel, np.array([0.02, 0.5])), large, small)


def _runs(rng, numel, choices):
    """Random choices, each kept for a number of elements that is random too."""
    lengths = rng.choice([32, 64, 256, 4096], numel // 32 + 1)
    return np.repeat(rng.choice(choices, lengths.size), lengths)[:numel]


_GENERATORS = {
    "heavy": lambda rng, numel: rng.standard_t(3, numel),
    "level": lambda rng, numel: rng.choice([-1, 1], numel) * rng.standard_normal(),
    "constant": lambda rng, numel: np.full(numel, rng.standard_normal()),
    "ties": _ties,
    "edge": _edge,
    "edge_hadamard": _edge_hadamard,
    "subnormal": lambda rng, numel: rng.integers(-(2**23), 2**23, numel) * 2.0**-149,
}


@st.composite
def messages(draw, codecs=CODECS, longest=9000):
    """Any message: up to five segments, in any order, with gaps, at any address."""
    codec = draw(st.sampled_from(codecs))
    edges = {1, 2, 31, 32, 33, codec.block - 1, codec.block, codec.block + 1, 2 * codec.block + 17}
    length = st.one_of(
        st.sampled_from([0, *sorted(n for n in edges if 0 < n <= longest)]),
        st.integers(0, min(longest, 600)),
        st.integers(0, longest),
    )
    lengths = draw(st.lists(length, max_size=5))
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(lengths) + 1, max_size=len(lengths) + 1))
    ends = np.cumsum(np.array(gaps[:-1], np.int64) + np.array(lengths, np.int64))
    order = draw(st.permutations(range(len(lengths))))
    starts = (ends - np.array(lengths, np.int64))[order].astype(np.int64)
    return Message(
        codec=codec,
        dtype=draw(st.sampled_from(DTYPES)),
        starts=starts,
        lengths=np.array(lengths, np.int64)[order],
        numel=int(ends[-1] if len(lengths) else 0) + gaps[-1],
        kind=draw(st.sampled_from(KINDS)),
        seed=draw(st.integers(0, 2**32 - 1)),
        offset=draw(st.integers(0, 63)),
    )
