"""The operations of torch.distributed on backend zcomm, against NumPy.

Every rank knows the inputs of all.
"""

from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("world")]

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
SUMS = {
    dist.ReduceOp.SUM: lambda rows: rows.sum(0),
    dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0),
    dist.ReduceOp.MIN: lambda rows: rows.min(0),
    dist.ReduceOp.MAX: lambda rows: rows.max(0),
}
BITS = {
    dist.ReduceOp.BAND: np.bitwise_and,
    dist.ReduceOp.BOR: np.bitwise_or,
    dist.ReduceOp.BXOR: np.bitwise_xor,
}
SIZES = [0, 7, 5000]


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of a rank: small whole numbers, so that every sum is exact."""
    draws = torch.Generator().manual_seed(rank)
    made = torch.randint(0, 4, (numel,), generator=draws)
    if dtype.is_complex:
        return torch.complex(made.double(), -made.double()).to(dtype)
    return made.to(dtype)


def everybodys(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(rank, numel, dtype) for rank in range(dist.get_world_size())]


def stacked(tensors: list[torch.Tensor]) -> np.ndarray:
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    return np.stack([x.to(wide).numpy() for x in tensors])


def assert_equal(got: torch.Tensor, expected: np.ndarray | torch.Tensor) -> None:
    expected = torch.as_tensor(expected)
    assert torch.equal(got, expected.to(got.dtype).reshape(got.shape)), (got, expected)


@pytest.mark.parametrize("op", SUMS, ids=str)
def test_all_reduce(op):
    for dtype, numel in product([*INTEGERS, *FLOATS], SIZES):
        x = values(dist.get_rank(), numel, dtype)
        dist.all_reduce(x, op)
        assert_equal(x, SUMS[op](stacked(everybodys(numel, dtype))))


def test_all_reduce_of_complex_numbers():
    for dtype in COMPLEX:
        x = values(dist.get_rank(), 9, dtype)
        dist.all_reduce(x)
        assert_equal(x, stacked(everybodys(9, dtype)).sum(0))


def test_all_reduce_average():
    for dtype in FLOATS:
        x = values(dist.get_rank(), 33, dtype)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert_equal(x, stacked(everybodys(33, dtype)).mean(0))


@pytest.mark.parametrize("op", BITS, ids=str)
def test_all_reduce_of_bits(op):
    for dtype in INTEGERS:
        x = values(dist.get_rank(), 33, dtype)
        dist.all_reduce(x, op)
        rows = np.stack([each.numpy() for each in everybodys(33, dtype)])
        assert_equal(x, BITS[op].reduce(rows))


def test_all_reduce_of_bool_is_a_logical_or():
    x = values(dist.get_rank(), 33, torch.bool)
    dist.all_reduce(x)
    assert_equal(x, stacked(everybodys(33, torch.bool)).any(0))


def test_all_reduce_with_a_factor():
    x = values(dist.get_rank(), 33, torch.float32)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert_equal(x, stacked(everybodys(33, torch.float32)).sum(0) / 2)


def test_all_reduce_of_a_transposed_tensor_writes_the_tensor():
    x = values(dist.get_rank(), 12, torch.float32).reshape(3, 4)
    y = x.clone().t()
    dist.all_reduce(y)
    total = stacked(everybodys(12, torch.float32)).sum(0).reshape(3, 4)
    assert_equal(y.t(), total)


def test_all_reduce_of_sparse_tensors():
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.sparse_coo_tensor([[rank, size]], [[1.0, 2.0], [10.0, 20.0]], (size + 1, 2))
    dist.all_reduce(x)
    expected = torch.tensor([[1.0, 2.0]] * size + [[10.0 * size, 20.0 * size]])
    assert_equal(x.to_dense(), expected)


@pytest.mark.parametrize("op", SUMS, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_reduce(op, numel: int):
    root = dist.get_world_size() - 1
    x = values(dist.get_rank(), numel, torch.float32)
    before = x.clone()
    dist.reduce(x, root, op)
    if dist.get_rank() == root:
        assert_equal(x, SUMS[op](stacked(everybodys(numel, torch.float32))))
    else:
        assert_equal(x, before)


def test_broadcast():
    for dtype, numel in product(DTYPES, SIZES):
        root = dist.get_world_size() - 1
        x = values(dist.get_rank(), numel, dtype)
        dist.broadcast(x, root)
        assert_equal(x, values(root, numel, dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex32, torch.uint16], ids=str)
def test_dtypes_that_are_only_moved(dtype: torch.dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    nbytes = torch.arange(24, dtype=torch.uint8) + rank
    outs = [torch.zeros(24, dtype=torch.uint8).view(dtype) for _ in range(size)]
    dist.all_gather(outs, nbytes.view(dtype))
    for peer, out in enumerate(outs):
        assert_equal(out.view(torch.uint8), torch.arange(24) + peer)


def test_all_gather():
    for dtype, numel in product(DTYPES, SIZES):
        own = values(dist.get_rank(), numel, dtype)
        outs = [torch.zeros(numel, dtype=dtype) for _ in range(dist.get_world_size())]
        dist.all_gather(outs, own)
        for out, expected in zip(outs, everybodys(numel, dtype), strict=True):
            assert_equal(out, expected)
        whole = torch.zeros(numel * len(outs), dtype=dtype)
        dist.all_gather_single(whole, own)
        assert_equal(whole, torch.cat(everybodys(numel, dtype)))


def test_all_gather_of_uneven_tensors():
    rank, size = dist.get_rank(), dist.get_world_size()
    outs = [torch.zeros(peer * 3, 2) for peer in range(size)]
    dist.all_gather(outs, torch.full((rank * 3, 2), float(rank)))
    for peer, out in enumerate(outs):
        assert_equal(out, torch.full((peer * 3, 2), float(peer)))


def test_all_gather_into_the_tensor_that_holds_the_own_part():
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(size, 70000)
    whole[rank] = rank + 1
    dist.all_gather_single(whole.view(-1), whole[rank])
    assert_equal(whole, torch.arange(1.0, size + 1)[:, None].expand(-1, 70000))


def test_all_gather_of_a_list_per_rank():
    rank, size = dist.get_rank(), dist.get_world_size()
    outs = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    with pytest.warns(FutureWarning):
        dist.all_gather_coalesced(outs, [torch.full((2,), float(rank)), torch.full((3,), -1.0)])
    for peer, row in enumerate(outs):
        assert_equal(row[0], torch.full((2,), float(peer)))
        assert_equal(row[1], torch.full((3,), -1.0))


def test_coalesced_operations_travel_together():
    rank, size = dist.get_rank(), dist.get_world_size()
    ins = [torch.full((n,), float(rank)) for n in (3, 5)]
    outs = [torch.zeros(size * x.numel()) for x in ins]
    with dist._coalescing_manager(async_ops=True) as block:
        for out, own in zip(outs, ins, strict=True):
            dist.all_gather_single(out, own)
    block.wait()
    for out, own in zip(outs, ins, strict=True):
        assert_equal(out, torch.arange(size).repeat_interleave(own.numel()))
    sums = [torch.ones(4) * rank, torch.ones(2)]
    with dist._coalescing_manager():
        for x in sums:
            dist.all_reduce(x)
    assert_equal(sums[0], torch.full((4,), size * (size - 1) / 2))
    assert_equal(sums[1], torch.full((2,), float(size)))


@pytest.mark.parametrize("op", SUMS, ids=str)
def test_reduce_scatter(op):
    for dtype in FLOATS:
        rank, size = dist.get_rank(), dist.get_world_size()
        full = values(rank, size * 5, dtype)
        expected = SUMS[op](stacked(everybodys(size * 5, dtype)))[rank * 5 : rank * 5 + 5]
        out = torch.zeros(5, dtype=dtype)
        dist.reduce_scatter(out, list(full.chunk(size)), op)
        assert_equal(out, expected)
        out.zero_()
        dist.reduce_scatter_single(out, full, op)
        assert_equal(out, expected)


def test_reduce_scatter_of_uneven_tensors():
    rank, size = dist.get_rank(), dist.get_world_size()
    ins = [torch.full((peer + 1,), float(peer + rank)) for peer in range(size)]
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, ins)
    assert_equal(out, torch.full((rank + 1,), size * rank + size * (size - 1) / 2))


def test_gather_and_scatter():
    for dtype in DTYPES:
        rank, size = dist.get_rank(), dist.get_world_size()
        root = size - 1
        own = values(rank, 6, dtype).reshape(2, 3)
        outs = [torch.zeros(2, 3, dtype=dtype) for _ in range(size)] if rank == root else None
        dist.gather(own, outs, root)
        for out, expected in zip(outs or [], everybodys(6, dtype), strict=rank == root):
            assert_equal(out, expected)
        back = torch.zeros(2, 3, dtype=dtype)
        dist.scatter(back, outs, root)
        assert_equal(back, own)


def test_all_to_all():
    for dtype in DTYPES:
        rank, size = dist.get_rank(), dist.get_world_size()
        out = torch.zeros(size * 2, dtype=dtype)
        dist.all_to_all_single(out, values(rank, size * 2, dtype))
        expected = [values(peer, size * 2, dtype)[rank * 2 : rank * 2 + 2] for peer in range(size)]
        assert_equal(out, torch.cat(expected))


def test_all_to_all_with_splits_and_of_lists():
    rank, size = dist.get_rank(), dist.get_world_size()
    # Rank i sends j + 1 rows of 10 i + j to rank j.
    ins = [torch.full((peer + 1, 2), 10.0 * rank + peer) for peer in range(size)]
    expected = [torch.full((rank + 1, 2), 10.0 * peer + rank) for peer in range(size)]
    out = torch.zeros(size * (rank + 1), 2)
    dist.all_to_all_single(
        out, torch.cat(ins), [rank + 1] * size, [peer + 1 for peer in range(size)]
    )
    assert_equal(out, torch.cat(expected))
    outs = [torch.zeros(rank + 1, 2) for _ in range(size)]
    dist.all_to_all(outs, ins)
    for got, right in zip(outs, expected, strict=True):
        assert_equal(got, right)


def test_objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * rank * 100}
    everybody = [{"rank": peer, "text": "x" * peer * 100} for peer in range(size)]
    found = [None] * size
    dist.all_gather_object(found, mine)
    assert found == everybody
    found = [None] * size if rank == 0 else None
    dist.gather_object(mine, found, 0)
    assert found == (everybody if rank == 0 else None)
    given = [mine]
    dist.broadcast_object_list(given, size - 1)
    assert given == [everybody[-1]]
    got = [None]
    dist.scatter_object_list(got, everybody if rank == 0 else None, 0)
    assert got == [mine]


def test_barrier_and_monitored_barrier():
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.group.WORLD.monitored_barrier()
