"""One check per exact operation: right for any communicator, whatever carries it.

Each draws the values of all ranks, so that every rank knows what must come out, and looks at bits.
"""

import numpy as np

from tests.collectives import oracle
from tests.collectives.dtypes import (
    HALF,
    as_array,
    assert_bits,
    drawn,
    exact,
    filled,
    store,
    stored_in,
    widen,
)
from tests.collectives.worlds import algorithms

SHAPES = ((), (1,), (5,), (3, 2), (0,), (2, 0), (2, 3, 5))


def all_gather(comm, kind, dtype, shape, algorithm="auto", seed=1, **options):
    """Gather, and compare with the shards one after the other."""
    shards = [drawn(shape, dtype, seed, rank) for rank in range(comm.size)]
    mine = as_array(shards[comm.rank], dtype, kind)
    result = comm.all_gather(mine, algorithm=algorithm, **options)
    expected = np.stack(shards) if shape == () else np.concatenate(shards)
    assert_bits(_finished(result, options), expected, dtype, kind)
    assert_bits(mine, shards[comm.rank], dtype, kind)


def reduce_scatter(comm, kind, dtype, op, shape, algorithm="auto", seed=2, **options):
    """Reduce and scatter; ``shape`` is that of one rank's part."""
    whole = (comm.size * shape[0], *shape[1:])
    fulls = [drawn(whole, dtype, seed, rank) for rank in range(comm.size)]
    mine = as_array(fulls[comm.rank], dtype, kind)
    result = comm.reduce_scatter(mine, op=op, algorithm=algorithm, **options)
    nesting = oracle.nesting(comm.topology, algorithm)
    total = oracle.reduced(fulls, dtype, nesting, op, options.get("reduce_dtype"))
    expected = total[comm.rank * shape[0] : (comm.rank + 1) * shape[0]]
    assert_bits(_finished(result, options), expected, dtype, kind)
    assert_bits(mine, fulls[comm.rank], dtype, kind)


def all_reduce(comm, kind, dtype, op, shape, algorithm="auto", seed=3, **options):
    """Reduce in place, and get the same object back."""
    inputs = [drawn(shape, dtype, seed, rank) for rank in range(comm.size)]
    mine = as_array(inputs[comm.rank], dtype, kind)
    result = comm.all_reduce(mine, op=op, algorithm=algorithm, **options)
    assert _finished(result, options) is mine
    nesting = oracle.nesting(comm.topology, algorithm)
    expected = oracle.reduced(inputs, dtype, nesting, op, options.get("reduce_dtype"))
    assert_bits(mine, expected, dtype, kind)


def all_to_all(comm, kind, dtype, shape, seed=4, **options):
    """Exchange; ``shape`` is that of one part."""
    whole = (comm.size * shape[0], *shape[1:])
    sends = [drawn(whole, dtype, seed, rank) for rank in range(comm.size)]
    result = comm.all_to_all(as_array(sends[comm.rank], dtype, kind), **options)
    part = slice(comm.rank * shape[0], (comm.rank + 1) * shape[0])
    assert_bits(
        _finished(result, options), np.concatenate([one[part] for one in sends]), dtype, kind
    )


def broadcast(comm, kind, dtype, shape, root, seed=5, **options):
    """Copy the root's array over what the others hold, in place."""
    inputs = [drawn(shape, dtype, seed, rank) for rank in range(comm.size)]
    mine = as_array(inputs[comm.rank], dtype, kind)
    result = comm.broadcast(mine, root, **options)
    assert _finished(result, options) is mine
    assert_bits(mine, inputs[root], dtype, kind)


def send_and_recv(comm, kind, dtype, shape, seed=6):
    """Pass an array around the ring, even ranks sending first."""
    if comm.size == 1:
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine = as_array(drawn(shape, dtype, seed, comm.rank), dtype, kind)
    place = filled(shape, dtype, kind)
    if comm.rank % 2 == 0:
        comm.send(mine, after)
    result = comm.recv(place, before)
    if comm.rank % 2:
        comm.send(mine, after)
    assert result is place
    assert_bits(place, drawn(shape, dtype, seed, before), dtype, kind)


def every_algorithm(comm, check, *arguments, **options):
    """Run a check once per algorithm that the communicator's topology allows."""
    for algorithm in algorithms(comm.topology):
        check(comm, *arguments, algorithm=algorithm, **options)


def lists(comm, kind, algorithm="auto"):
    """Send several arrays of several dtypes in one call of each operation."""
    size = comm.size
    items = [("float32", (3,)), ("int64", (1, 2)), ("float16", (5,)), ("bool", (2,))]
    if kind == "torch":
        items.append(("bfloat16", (4, 3)))
    shards = [[drawn(shape, dtype, 7, rank) for dtype, shape in items] for rank in range(size)]
    mine = [as_array(one, d, kind) for one, (d, _) in zip(shards[comm.rank], items, strict=True)]
    gathered = comm.all_gather(mine, algorithm=algorithm)
    assert isinstance(gathered, list)
    for number, (dtype, _) in enumerate(items):
        expected = np.concatenate([one[number] for one in shards])
        assert_bits(gathered[number], expected, dtype, kind)
    _reduced_lists(comm, kind, [item for item in items if item[0] != "bool"], algorithm)


def _reduced_lists(comm, kind, items, algorithm):
    size, nesting = comm.size, oracle.nesting(comm.topology, algorithm)
    shapes = [(dtype, (size * shape[0], *shape[1:])) for dtype, shape in items]
    inputs = [[drawn(shape, dtype, 8, rank) for dtype, shape in shapes] for rank in range(size)]
    totals = [
        oracle.reduced([one[number] for one in inputs], dtype, nesting)
        for number, (dtype, _) in enumerate(items)
    ]
    mine = [as_array(one, d, kind) for one, (d, _) in zip(inputs[comm.rank], items, strict=True)]
    parts = comm.reduce_scatter(mine, algorithm=algorithm)
    results = comm.all_reduce(mine, algorithm=algorithm)
    for (dtype, shape), total, part, result in zip(items, totals, parts, results, strict=True):
        at = slice(comm.rank * shape[0], (comm.rank + 1) * shape[0])
        assert_bits(part, total[at], dtype, kind)
        assert_bits(result, total, dtype, kind)


def wide_outputs(comm, dtype, kind, algorithm="auto"):
    """Let 16-bit arrays arrive in float32: gathered as they are, reduced without rounding."""
    assert dtype in HALF
    shards = [drawn((7,), dtype, 9, rank) for rank in range(comm.size)]
    out = filled((7 * comm.size,), "float32", kind, np.nan)
    mine = as_array(shards[comm.rank], dtype, kind)
    assert comm.all_gather(mine, out, algorithm=algorithm) is out
    assert_bits(out, np.concatenate([widen(one, dtype) for one in shards]), "float32", kind)
    fulls = [drawn((7 * comm.size,), dtype, 10, rank) for rank in range(comm.size)]
    out = filled((7,), "float32", kind, np.nan)
    mine = as_array(fulls[comm.rank], dtype, kind)
    assert comm.reduce_scatter(mine, out, op="avg", algorithm=algorithm) is out
    nesting = oracle.nesting(comm.topology, algorithm)
    mean = oracle.reduced(fulls, dtype, nesting, "avg", out_dtype="float32")
    assert_bits(out, mean[comm.rank * 7 :][:7], "float32", kind)


def same_everywhere(comm, array):
    """Check that all ranks hold the same bits."""
    stored, _ = stored_in(array)
    words = np.frombuffer(stored.tobytes() + bytes(-stored.nbytes % 8), np.int64)
    rows = comm.all_gather_values(words)
    assert (rows == rows[0]).all()


def quantised_reduce_scatter(comm, stored, dtype, codecs, op="avg", algorithm="auto", kind="torch"):
    """Reduce through codecs: the bits of the composition, and inside the bound of the mean.

    ``stored``: one array per rank, whose elements W divides; ``codecs``: one per level.
    """
    mine = as_array(stored[comm.rank], dtype, kind)
    result = comm.reduce_scatter(mine, op=op, codec=codecs, algorithm=algorithm)
    nesting, per_level = flattened(comm.topology, algorithm, codecs)
    at = oracle.even_slices(stored[0].size, comm.size)[comm.rank]
    chunks = [one.reshape(-1)[at] for one in stored]
    expected = oracle.Quantised(chunks, dtype, nesting, per_level, op)
    found, name = stored_in(result)
    assert name == dtype
    assert_inside(found.reshape(-1), expected, dtype)
    assert_bits(found.reshape(-1).view(store(0, dtype).dtype), expected.stored, dtype_of(dtype))
    return result


def quantised_gather(comm, shards, dtype, codec, algorithm="auto", kind="torch", out_dtype=None):
    """Gather through a codec: what the receivers decode, on all ranks, inside the bound."""
    mine = as_array(shards[comm.rank], dtype, kind)
    out_dtype = out_dtype or dtype
    out = None
    if out_dtype != dtype:
        out = filled(
            (comm.size * shards[0].shape[0], *shards[0].shape[1:]), out_dtype, kind, np.nan
        )
    result = comm.all_gather(mine, out, codec=codec, algorithm=algorithm)
    expected = [oracle.roundtrip(codec, one.reshape(-1), dtype) for one in shards]
    decoded = np.concatenate([value for value, _ in expected])
    limits = np.concatenate([bound for _, bound in expected])
    found, name = stored_in(result)
    assert name == out_dtype
    error = np.abs(
        exact(found, name).reshape(-1) - exact(np.concatenate(shards), dtype).reshape(-1)
    )
    assert (error <= limits + oracle.rounding_bound(decoded, name)).all()
    if name == "float16":  # a codec does not invent an overflow
        decoded = np.where(np.isfinite(decoded), np.clip(decoded, -65504, 65504), decoded)
    assert_bits(result, store(decoded, name).reshape(found.shape), name, kind)
    return result


def per_level(codec, comm):
    return (codec,) * len(comm.topology.levels)


def dtype_of(dtype):
    """Return the name that NumPy gives to a stored array."""
    return "uint16" if dtype == "bfloat16" else dtype


def assert_inside(stored, expected, dtype):
    """Check a quantised result against the float64 reduction and its bound."""
    error = np.abs(widen(stored, dtype).astype(np.float64) - expected.exact)
    worst = int(np.argmax(error - expected.bound)) if error.size else 0
    assert (error <= expected.bound).all(), (
        f"element {worst}: error {error[worst]} above the bound {expected.bound[worst]}"
    )


def flattened(topology, algorithm, codecs):
    """Return the topology whose levels are the hops of an algorithm, and a codec for each."""
    from tests.collectives.worlds import used
    from topology import flat

    if used(topology, algorithm):
        return topology, codecs
    return flat(topology.size), codecs[-1:]


def _finished(result, options):
    if not options.get("async_op"):
        return result
    finished = result.wait()
    assert result.done()
    return finished
