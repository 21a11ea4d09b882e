"""The caller's arrays: outputs that are given, strides, offsets, borders, and what is refused."""

import numpy as np
import pytest
import torch

from tests.collectives import checks, oracle
from tests.collectives.dtypes import as_array, assert_bits, drawn, filled, raw, stored_in, widen
from tests.collectives.worlds import on
from zcomm import ZcommError

KINDS = ("numpy", "torch")
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def strided(stored, dtype, kind):
    """Return (memory, view): the values in a transposed view, between values that are not ours."""
    shape = stored.shape
    big = filled((shape[1], 2 * shape[0] + 1), dtype, kind, 77)
    view = big[:, 1::2].T
    view[...] = as_array(stored, dtype, kind)
    return big, view


def is_contiguous(array):
    return array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous


@EACH_KIND
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_inputs_and_outputs_that_are_not_contiguous(kind, dtype):
    def program(comm):
        shards = [drawn((4, 3), dtype, 1, rank) for rank in range(comm.size)]
        total = oracle.reduced(shards, dtype, comm.topology)
        _, mine = strided(shards[comm.rank], dtype, kind)
        assert not is_contiguous(mine)
        assert_bits(comm.all_gather(mine), np.concatenate(shards), dtype, kind)
        big, out = strided(np.zeros((4 * comm.size, 3), shards[0].dtype), dtype, kind)
        assert comm.all_gather(mine, out) is out
        assert_bits(out, np.concatenate(shards), dtype)
        assert (widen(stored_in(big[:, ::2])[0], dtype) == 77).all()

        _, mine = strided(shards[comm.rank], dtype, kind)
        at = slice(comm.rank, comm.rank + 1)
        big, out = strided(np.zeros((1, 3), shards[0].dtype), dtype, kind)
        assert comm.reduce_scatter(mine, out) is out
        assert_bits(out, total[at], dtype)
        assert (widen(stored_in(big[:, ::2])[0], dtype) == 77).all()

        big, mine = strided(shards[comm.rank], dtype, kind)
        assert comm.all_reduce(mine) is mine
        assert_bits(mine, total, dtype)
        assert (widen(stored_in(big[:, ::2])[0], dtype) == 77).all()

        _, mine = strided(shards[comm.rank], dtype, kind)
        comm.broadcast(mine, 2)
        assert_bits(mine, shards[2], dtype)

        _, mine = strided(shards[comm.rank], dtype, kind)
        _, out = strided(np.zeros((4, 3), shards[0].dtype), dtype, kind)
        assert comm.all_to_all(mine, out) is out
        assert_bits(out, np.concatenate([one[at] for one in shards]), dtype)

    on("2x2", program)


def test_send_of_a_strided_view():
    def program(comm):
        values = drawn((4, 3), "float32", 1, 0)
        if comm.rank == 0:
            comm.send(strided(values, "float32", "torch")[1], 1)
        else:
            assert_bits(comm.recv(torch.zeros(4, 3), 0), values, "float32")

    on("2", program)


@EACH_KIND
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int16"])
@pytest.mark.parametrize("offset", [1, 3])
def test_views_at_odd_offsets_leave_their_surroundings_alone(kind, dtype, offset):
    numel = 29

    def program(comm):
        shards = [drawn((numel,), dtype, 2, rank) for rank in range(comm.size)]
        total = oracle.reduced(shards, dtype, comm.topology)
        memory = filled((numel + offset + 5,), dtype, kind, 55)
        mine = memory[offset : offset + numel]
        mine[...] = as_array(shards[comm.rank], dtype, kind)
        space = filled((numel * comm.size + offset + 5,), dtype, kind, 55)
        comm.all_gather(mine, space[offset : offset + numel * comm.size])
        comm.all_reduce(mine)
        assert_surrounded(memory, offset, total, dtype)
        assert_surrounded(space, offset, np.concatenate(shards), dtype)

    on("2x2", program)


def assert_surrounded(memory, offset, expected, dtype):
    stored = stored_in(memory)[0]
    assert (raw(stored[offset:-5]) == raw(expected)).all()
    assert (stored[:offset] == 55).all()
    assert (stored[-5:] == 55).all()


def test_numpy_memory_at_an_odd_byte():
    def program(comm):
        memory = np.zeros(4 * 10 + 1, np.uint8)
        mine = memory[1:].view(np.float32)
        assert not mine.flags.aligned
        shards = [drawn((10,), "float32", 3, rank) for rank in range(comm.size)]
        mine[...] = shards[comm.rank]
        assert_bits(comm.all_gather(mine), np.concatenate(shards), "float32")
        assert_bits(
            comm.all_reduce(mine), oracle.reduced(shards, "float32", comm.topology), "float32"
        )

    on("2x2", program)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(np.zeros(0, np.float32)),
        lambda: torch.zeros(1).expand(0),
        lambda: torch.zeros(3, 4)[:, 4:],
        lambda: torch.zeros(0, 5).T,
        lambda: np.zeros((3, 4))[:, 4:],
        lambda: np.zeros((0, 5), np.float16).T,
    ],
)
def test_empty_arrays_of_any_strides(make):
    def program(comm):
        x = make()
        assert tuple(comm.all_gather(x).shape) == (2 * x.shape[0], *x.shape[1:])
        assert comm.all_reduce(x) is x
        assert comm.broadcast(x, 1) is x

    on("2", program)


def test_expanded_and_strided_inputs_are_read_as_their_values():
    def program(comm):
        x = torch.full((1, 1), float(comm.rank + 1)).expand(2, 3)
        assert comm.all_gather(x).tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
        assert comm.reduce_scatter(x).tolist() == [[3.0] * 3]
        reversed_ = np.arange(4.0)[::-1]
        assert comm.all_gather(reversed_).tolist() == [3, 2, 1, 0] * 2
        x = np.arange(4.0)
        comm.all_reduce(x[::-1])
        assert x.tolist() == [0, 2, 4, 6]

    on("2", program)


def test_a_tensor_that_requires_grad_is_read_and_its_result_does_not():
    def program(comm):
        x = torch.ones(2, requires_grad=True)
        result = comm.all_gather(x)
        assert result.tolist() == [1.0] * 4
        assert not result.requires_grad
        assert comm.reduce_scatter(x).tolist() == [2.0]

    on("2", program)


@EACH_KIND
def test_reduce_scatter_is_one_dimensional_where_only_the_elements_divide(kind):
    def program(comm):
        fulls = [drawn((3, 8), "float32", 4, rank) for rank in range(comm.size)]
        total = oracle.reduced(fulls, "float32", comm.topology).reshape(-1)
        part = comm.reduce_scatter(as_array(fulls[comm.rank], "float32", kind))
        assert_bits(part, total[comm.rank * 6 : comm.rank * 6 + 6], "float32", kind)

    on("2x2", program)


@EACH_KIND
def test_outputs_in_lists(kind):
    def program(comm):
        shards = [filled((2,), "float32", kind, comm.rank), filled((1,), "float16", kind, 1)]
        outs = [filled((8,), "float32", kind), filled((4,), "float32", kind)]
        result = comm.all_gather(shards, outs)
        assert result[0] is outs[0]
        assert result[1] is outs[1]
        assert outs[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert outs[1].tolist() == [1] * 4

    on("2x2", program)


def test_a_list_of_nothing_and_of_one():
    def program(comm):
        assert comm.all_gather([]) == []
        assert comm.reduce_scatter([]) == []
        (one,) = comm.all_gather([np.ones(1)])
        assert one.tolist() == [1, 1]

    on("2", program)


REFUSED = {
    "out too small": (
        lambda c: c.all_gather(np.zeros(2), np.zeros(7)),
        r"\b7\b.*\b8\b|\b8\b.*\b7\b",
    ),
    "out of another dtype": (
        lambda c: c.all_gather(np.zeros(2), np.zeros(8, np.float32)),
        "float32.*float64|float64.*float32",
    ),
    "integers widened": (
        lambda c: c.all_gather(np.zeros(2, np.int16), np.zeros(8, np.float32)),
        "float32.*int16|int16.*float32",
    ),
    "16-bit out of float32": (
        lambda c: c.reduce_scatter(torch.zeros(8), torch.zeros(2, dtype=torch.bfloat16)),
        "float32.*bfloat16|bfloat16.*float32",
    ),
    "out of a list is not a list": (
        lambda c: c.all_gather([np.zeros(2)], [np.zeros(8), np.zeros(8)]),
        r"\b1\b.*\b2\b|\b2\b.*\b1\b",
    ),
    "out shape of reduce_scatter": (
        lambda c: c.reduce_scatter(np.zeros((8, 3)), np.zeros(3)),
        r"\(?2, 3\)?",
    ),
    "elements that do not divide": (lambda c: c.reduce_scatter(np.zeros(7)), r"\b7\b.*\b4\b"),
    "all_to_all that does not divide": (lambda c: c.all_to_all(np.zeros((6, 4))), r"\b6\b.*\b4\b"),
    "all_to_all of 0-d": (lambda c: c.all_to_all(np.zeros(())), r"\b4\b"),
    "reduce_scatter of 0-d": (lambda c: c.reduce_scatter(np.zeros(())), r"\b4\b"),
    "average of integers": (lambda c: c.all_reduce(np.zeros(4, np.int32), op="avg"), "avg.*int32"),
    "average of integers, scattered": (
        lambda c: c.reduce_scatter(np.zeros(4, np.int64), op="avg"),
        "avg.*int64",
    ),
    "bits of floats": (lambda c: c.all_reduce(np.zeros(4), op="xor"), "xor.*float64"),
    "order of complex": (lambda c: c.all_reduce(np.zeros(4, complex), op="max"), "max.*complex128"),
    "an op that is unknown": (lambda c: c.all_reduce(np.zeros(4), op="mean"), "mean.*avg"),
    "an algorithm that is unknown": (
        lambda c: c.all_gather(np.zeros(4), algorithm="ring"),
        "ring.*hierarchical",
    ),
    "a root that is not there": (lambda c: c.broadcast(np.zeros(4), 4), r"\b4\b.*\b3\b"),
    "a negative root": (lambda c: c.broadcast(np.zeros(4), -1), r"-1.*\b3\b"),
    "a peer that is not there": (lambda c: c.send(np.zeros(4), 9), r"\b9\b.*\b3\b"),
    "itself as a peer": (lambda c: c.recv(np.zeros(4), c.rank), "peer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_named_with_what_is_possible(case):
    call, message = REFUSED[case]

    def program(comm):
        with pytest.raises(ValueError, match=message) as caught:
            call(comm)
        assert "\n" not in str(caught.value)
        checks.all_reduce(comm, "numpy", "float32", "sum", (3,))  # it still works

    on("2x2", program)


@pytest.mark.parametrize("x", [[1.0, 2.0], "text", 3.0, np.array(["a"]), np.array([None])])
def test_what_is_not_an_array_is_a_type_error(x):
    def program(comm):
        with pytest.raises(TypeError):
            comm.all_reduce(x)

    on("2", program)


def test_hierarchical_needs_equal_groups_and_uneven_ones_are_warned_of_once(caplog):
    def program(comm):
        with pytest.raises(ValueError, match=r"hierarchical.*possible: auto, flat, ordered"):
            comm.all_gather(np.zeros(4), algorithm="hierarchical")
        for _ in range(3):
            comm.all_gather(np.zeros(4))
            comm.all_reduce(np.zeros(4))

    on("3+5", program)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "3" in warnings[0].getMessage()
    assert "5" in warnings[0].getMessage()


def test_use_after_close_is_an_error_that_says_so():
    def program(comm):
        comm.close()
        with pytest.raises(ZcommError, match="closed"):
            comm.barrier()
        with pytest.raises(ZcommError, match="closed"):
            comm.send(np.zeros(1), 1 - comm.rank)
        with pytest.raises(ZcommError, match="closed"):
            comm.recv(np.zeros(1), 1 - comm.rank)
        comm.close()

    on("2", program)


@EACH_KIND
def test_recv_needs_memory_that_it_can_write(kind):
    def program(comm):
        place = filled((4, 4), "float32", kind)[:, ::2]
        with pytest.raises(ValueError, match="contiguous"):
            comm.recv(place, 1 - comm.rank)

    on("2", program)


def test_read_only_arrays_are_inputs_but_never_written():
    def program(comm):
        x = np.arange(4.0)
        x.flags.writeable = False
        assert comm.all_gather(x).tolist() == [0, 1, 2, 3] * 2
        calls = (
            lambda: comm.all_reduce(x),
            lambda: comm.all_reduce([np.ones(3), x]),
            lambda: comm.reduce_scatter(np.ones(8), x),
            lambda: comm.all_gather(np.ones(2), x),
            lambda: comm.recv(x, 1 - comm.rank),
            lambda: comm.all_reduce(torch.ones(1).expand(4)),
        )
        for call in calls:
            with pytest.raises(ValueError, match="cannot be written"):
                call()
        assert x.tolist() == [0, 1, 2, 3]
        # Nothing was sent.
        assert comm.all_reduce(np.ones(4)).tolist() == [2] * 4

    on("2", program)
