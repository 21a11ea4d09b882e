"""What collectives must return, written from the definitions: nested sums, codecs, bytes.

Nothing here knows how zcomm moves data. Codecs are called one chunk at a time, as building blocks;
their own bits are tested elsewhere.
"""

import math

import numpy as np

from tests.collectives.dtypes import ITEMSIZE, as_array, exact, once, store, widen
from topology import flat
from zcomm import Codec

BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
COMBINE = {"sum": np.add, "avg": np.add, "product": np.multiply}
COMBINE |= {"min": np.minimum, "max": np.maximum} | BITWISE


def possible_ops(dtype):
    """Return the reductions that a dtype has and whose meaning nobody doubts."""
    if dtype == "bool":
        return ("and", "or", "xor")
    if dtype.startswith("complex"):
        return ("sum",)
    if dtype.startswith("float") or dtype == "bfloat16":
        return ("sum", "avg", "min", "max", "product")
    return ("sum", "min", "max", "product", "and", "or", "xor")


def meetings(topology):
    """Return, level by level from the inside, the lists of parts that meet: parts hold ranks.

    Levels whose groups all consist of one part are left out.
    """
    parts = [(rank,) for rank in range(topology.size)]
    found = []
    for number, level in enumerate(topology.levels):
        groups = [[part for part in parts if part[0] in group] for group in level.groups]
        if any(len(group) > 1 for group in groups):
            found.append((number, groups))
        parts = [tuple(sorted(sum(group, ()))) for group in groups]
    return found


def partial_dtype(dtype, reduce_dtype=None):
    """Return the dtype of partial sums between levels."""
    if dtype == "bfloat16":
        return reduce_dtype or "bfloat16"
    return "float32" if dtype == "float16" else dtype


@once
def reduced(stored, dtype, topology, op="sum", reduce_dtype=None, out_dtype=None):
    """Return the exact reduction of one stored array per rank, stored in ``out_dtype``."""
    between = partial_dtype(dtype, reduce_dtype)
    values = {(rank,): np.atleast_1d(widen(one, dtype)) for rank, one in enumerate(stored)}
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for _, groups in meetings(topology):
            merged = {}
            for group in groups:
                total = _between(values[group[0]], between)
                for part in group[1:]:
                    total = COMBINE[op](total, _between(values[part], between))
                merged[tuple(sorted(sum(group, ())))] = total
            values = merged
        (total,) = values.values()
        if op == "avg":
            total = total / total.dtype.type(topology.size)
    return store(total, out_dtype or dtype).reshape(stored[0].shape)


def _between(values, dtype):
    return widen(store(values, dtype), dtype) if dtype == "bfloat16" else values


def nesting(topology, algorithm):
    """Return the topology that defines the order of exact sums."""
    return flat(topology.size) if algorithm == "ordered" else topology


def even_slices(numel, size):
    """Return where each rank's part of an evenly divided array lies."""
    each = numel // size
    return [slice(rank * each, (rank + 1) * each) for rank in range(size)]


class Quantised:
    """A quantised reduction of one chunk: value, float64 mean and the bound on their distance.

    ``chunks`` are the stored values of every rank, ``codecs`` one per level (one in all: flat).
    """

    def __init__(self, chunks, dtype, topology, codecs, op="avg", out_dtype=None, lengths=None):
        size = topology.size
        divisor = size if op == "avg" else 1
        self.bound = np.zeros(chunks[0].size)
        terms = np.zeros(chunks[0].size)
        values = {(rank,): (chunk, dtype) for rank, chunk in enumerate(chunks)}
        roundings = 2  # the division, and what second order terms add
        for number, groups in meetings(topology):
            merged = {}
            roundings += max(len(group) for group in groups) - 1
            for group in groups:
                decoded = []
                for part in group:
                    value, errors = _through(codecs[number], *values[part], dtype, lengths)
                    decoded.append(value)
                    self.bound += errors / divisor
                    terms += np.abs(value.astype(np.float64)) / divisor
                total = decoded[0]
                for value in decoded[1:]:
                    total = total + value
                merged[tuple(sorted(sum(group, ())))] = (total, "float32")
            values = merged
        ((total, held),) = values.values()
        total = widen(total, held)
        mean = total / np.float32(size) if op == "avg" else total
        out_dtype = out_dtype or dtype
        self.stored = store(mean, out_dtype)
        self.exact = sum(exact(chunk, dtype) for chunk in chunks) / divisor
        self.bound += roundings * 2.0**-24 * terms + rounding_bound(mean, out_dtype)


def _through(codec, stored, held, dtype, lengths):
    """Send one chunk through a codec; None sends it as it is, partial sums in their own dtype."""
    if codec is None:
        sent = dtype if held == dtype else partial_dtype(dtype)
        value = widen(store(widen(stored, held), sent), sent)
        return value, np.abs(exact(stored, held) - value.astype(np.float64))
    lengths = [stored.size] if lengths is None else lengths
    values, errors = [], []
    for part in np.split(stored, np.cumsum(lengths)[:-1]):
        value, error = roundtrip(codec, part, held)
        values.append(value)
        errors.append(error)
    return np.concatenate(values), np.concatenate(errors)


@once
def roundtrip(codec, stored, dtype):
    """Return the decoded values of one segment, in float32, and the bound of their errors."""
    codec = Codec.parse(codec)
    array = torch_view(stored, dtype)
    decoded = codec.decode(codec.encode(array), stored.size, "float32")
    return decoded, codec.error_bound(array, "float32")


def torch_view(stored, dtype):
    """Return a stored array as something that codecs take."""
    if dtype != "bfloat16":
        return stored
    return as_array(stored, dtype, "torch")


def rounding_bound(values, dtype):
    """Return how far the last rounding moves a float32 value."""
    with np.errstate(over="ignore"):
        size = np.abs(values.astype(np.float64))
    # NUMERICS.md, "Error bound"; float32 itself is what the sum is in.
    if dtype == "bfloat16":
        return 2.0**-8 * size + 2.0**-134
    return 2.0**-11 * size + 2.0**-25 if dtype == "float16" else np.zeros(size.shape)


def chunk_nbytes(numel, dtype, codec=None):
    """Return the bytes of a chunk that is one segment, by the table in NUMERICS.md."""
    if codec is None:
        return numel * ITEMSIZE[dtype]
    name, _, option = codec.partition(":block=")
    if name in ("bf16", "fp16"):
        return 2 * numel
    block = int(option) if option else {"int8": 256, "int4": 128}[name]
    codes = numel
    if name == "int4":
        codes = numel // block * block // 2 + math.ceil(numel % block / 2)
    return round16(codes) + round16(2 * math.ceil(numel / block))


def round16(nbytes):
    return -(-nbytes // 16) * 16


def gather_nbytes(topology, rank, chunk, hierarchical):
    """Return the bytes that ``rank`` sends per level in an all_gather of equal chunks."""
    if not hierarchical:
        return direct_nbytes(topology, rank, chunk)
    sent, held = {}, 1
    for level in reversed(range(len(topology.levels))):
        peers = _extent(topology, level)
        if peers > 1:
            sent[level] = (peers - 1) * held * chunk
            held *= peers
    return sent


def reduce_nbytes(topology, rank, chunks, hierarchical):
    """Return the bytes that ``rank`` sends per level in a reduce_scatter.

    ``chunks``: bytes of one destination's chunk at each level; the flat algorithm uses the first.
    """
    if not hierarchical:
        return direct_nbytes(topology, rank, chunks[0])
    sent, carried = {}, topology.size
    for level in range(len(topology.levels)):
        peers = _extent(topology, level)
        if peers > 1:
            carried //= peers
            sent[level] = (peers - 1) * carried * chunks[level]
    return sent


def direct_nbytes(topology, rank, chunk):
    """Return the bytes per level when ``rank`` sends one chunk straight to every other rank."""
    sent = {}
    for peer in range(topology.size):
        if peer != rank:
            level = between(topology, rank, peer)
            sent[level] = sent.get(level, 0) + chunk
    return sent


def between(topology, a, b):
    """Return the innermost level with a group that holds both ranks."""
    return next(
        number
        for number, level in enumerate(topology.levels)
        if any(a in group and b in group for group in level.groups)
    )


def _extent(topology, level):
    inner = 1 if level == 0 else len(topology.levels[level - 1].groups[0])
    return len(topology.levels[level].groups[0]) // inner
