"""Functional collectives on backend zcomm, eager and compiled: C++ calls the group by its name."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings(
        "ignore:.*deprecated:FutureWarning"
    ),  # names of torch 2.12 and before
]


def everything(x: torch.Tensor) -> list[torch.Tensor]:
    """Return what each collective makes of ``x``, whose rows are as many as ranks."""
    group, size = dist.group.WORLD, dist.get_world_size()
    rows = [1] * size
    results = [
        funcol.all_reduce(x, "sum", group),
        funcol.all_reduce(x, "avg", group),
        funcol.all_gather_tensor(x, 0, group),
        funcol.reduce_scatter_tensor(x, "sum", 0, group),
        funcol.all_to_all_single(x, rows, rows, group),
        funcol.broadcast(x, size - 1, group),
        *funcol.all_reduce_coalesced([x, x + 1], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([x, x + 1], group),
        *funcol.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group),
    ]
    return [result * 1 for result in results]  # waits


def expected(rows: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    total = sum(rows)
    size = len(rows)
    return [
        total,
        total / size,
        torch.cat(rows),
        total[rank : rank + 1],
        torch.cat([each[rank : rank + 1] for each in rows]),
        rows[-1],
        total,
        total + size,
        torch.cat(rows),
        torch.cat(rows) + 1,
        total[rank : rank + 1],
        total[rank : rank + 1] + size,
    ]


def check(function) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [torch.arange(size * 3.0).reshape(size, 3) + 10 * peer for peer in range(size)]
    for got, right in zip(function(rows[rank]), expected(rows, rank), strict=True):
        assert torch.equal(got, right)


def test_eager():
    check(everything)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    torch._dynamo.reset()
    check(torch.compile(everything, backend=backend, fullgraph=True))


@pytest.mark.slow
def test_operations_in_place_in_a_compiled_function():
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        out = torch.empty(y.numel() * dist.get_world_size())
        dist.all_gather_single(out, y)
        return out + 1

    size = dist.get_world_size()
    assert torch.equal(step(torch.ones(3)), torch.full((3 * size,), 2.0 * size + 1))
