"""FSDP2's communications through zcomm: codes, sums and segments by the oracle, then trainings.

The first tests call the two communications as FSDP2 does, on threads with a gloo group each; the
launched ones train and compare with plain FSDP2.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.collectives import checks, oracle
from tests.collectives.dtypes import as_array, drawn, stored_in
from tests.torch import groups
from zcomm.torch.fsdp import AllGather, ReduceScatter

SIZE = 4
GRADS = ("int8", "int4:block=64")


def parameter(numel, *, trained=True, size=SIZE):
    """Return what FSDP2 knows of a parameter whose padded shard has ``numel`` elements."""
    return SimpleNamespace(
        padded_sharded_param_size=torch.Size((numel,)),
        sharded_param=SimpleNamespace(requires_grad=trained),
        mesh_info=SimpleNamespace(shard_mesh_size=size),
    )


def places(comm):
    return SimpleNamespace(group=lambda group: comm)


def shard_of(number, numel, dtype, rank):
    return drawn((numel,), dtype, number, rank)


def gathered(comm, numels, dtype="float32", codec="int8", numbers=None, async_op=False, **options):
    """Gather as FSDP2 does, the input inside the output; return the values by (rank, parameter).

    On CPU FSDP2 gets something to wait for in either case: what it prefetches goes on meanwhile.
    """
    numbers = numbers or range(len(numels))
    parameters = [parameter(numel, **options) for numel in numels]
    gather = AllGather(places(comm), parameters, codec, 0, "m")
    each = sum(numels)
    shards = [
        shard_of(n, numel, dtype, comm.rank) for n, numel in zip(numbers, numels, strict=True)
    ]
    full = as_array(np.zeros(each * comm.size, shards[0].dtype), dtype, "torch")
    own = full[comm.rank * each :][:each]
    own.copy_(as_array(np.concatenate(shards), dtype, "torch"))
    work = gather(full, own, None, async_op=async_op)
    assert isinstance(work, dist.Work)
    work.wait()
    parts = full.view(comm.size, each).split(list(numels), 1)
    return {
        (rank, number): stored_in(part[rank].contiguous())[0].tobytes()
        for number, part in zip(numbers, parts, strict=True)
        for rank in range(comm.size)
    }


def decoded(number, numel, dtype, rank, codec="int8"):
    value, _ = oracle.roundtrip(codec, shard_of(number, numel, dtype, rank), dtype)
    return stored_in(as_array(value, "float32", "torch").to(getattr(torch, dtype)))[0].tobytes()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_holds_what_the_receivers_decode(dtype, async_op):
    numels = (300, 1, 4099)

    def program(comm):
        return gathered(comm, numels, dtype, async_op=async_op)

    for found in groups.run(program, SIZE, "2x2"):
        for (rank, number), value in found.items():
            assert value == decoded(number, numels[number], dtype, rank)


def test_codes_of_a_parameter_do_not_depend_on_its_group():
    def program(comm):
        alone = gathered(comm, (700,), numbers=[5])
        later = gathered(comm, (33, 700, 9), numbers=[1, 5, 2])
        return alone, later

    for alone, later in groups.run(program, SIZE, "2x2"):
        assert all(alone[rank, 5] == later[rank, 5] for rank in range(SIZE))


def test_a_smaller_group_sends_what_was_decoded_as_it_is():
    numels = (64, 300)
    for found in groups.run(lambda comm: gathered(comm, numels, size=8), SIZE, "2x2"):
        for (rank, number), value in found.items():
            assert value == shard_of(number, numels[number], "float32", rank).tobytes()


def test_several_dtypes_in_one_buffer_travel_as_bytes():
    for found in groups.run(lambda comm: gathered(comm, (640,), "uint8"), SIZE, "2x2"):
        for (rank, _), value in found.items():
            assert value == shard_of(0, 640, "uint8", rank).tobytes()


def reduced(comm, parameters, numel, dtype, op):
    full = as_array(drawn((numel * comm.size,), dtype, 9, comm.rank), dtype, "torch")
    out = torch.empty(numel, dtype=full.dtype)
    reduce = ReduceScatter(places(comm), parameters, GRADS, 0, "m")
    assert reduce(out, full, None, op) is None
    return stored_in(out)[0]


def expected(comm, lengths, dtype, op):
    """Return the oracle of this rank's part."""
    numel = sum(lengths)
    at = slice(comm.rank * numel, (comm.rank + 1) * numel)
    chunks = [drawn((numel * comm.size,), dtype, 9, rank)[at] for rank in range(comm.size)]
    plan = comm.plans("reduce_scatter", numel * comm.size, dtype, codec=GRADS)[0]
    nesting, codecs = checks.flattened(comm.topology, plan.algorithm, GRADS)
    return oracle.Quantised(chunks, dtype, nesting, codecs, op, lengths=lengths)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("op", "name"), [(dist.ReduceOp.AVG, "avg"), (dist.ReduceOp.SUM, "sum")])
def test_gradients_are_those_of_the_oracle(dtype, op, name):
    lengths = (300, 5, 40_099)

    def program(comm):
        # One that is frozen takes no part.
        parameters = [parameter(300), parameter(77, trained=False), parameter(5), parameter(40_099)]
        found = reduced(comm, parameters, sum(lengths), dtype, op)
        wanted = expected(comm, lengths, dtype, name)
        assert found.tobytes() == wanted.stored.tobytes()
        error = np.abs(oracle.exact(found, dtype) - wanted.exact)
        assert (error <= wanted.bound).all()

    groups.run(program, SIZE, "2x2")


def test_gradients_of_some_parameters_only_are_one_segment():
    def program(comm):
        parameters = [parameter(300), parameter(77)]
        found = reduced(comm, parameters, 300, "float32", dist.ReduceOp.AVG)
        assert found.tobytes() == expected(comm, (300,), "float32", "avg").stored.tobytes()

    groups.run(program, SIZE, "2x2")


def test_a_factor_multiplies_before_the_sum():
    def program(comm):
        full = torch.full((8 * comm.size,), 3.0)
        out = torch.empty(8)
        reduce = ReduceScatter(places(comm), [parameter(8)], None, 0, "m")
        reduce(out, full, None, dist.ReduceOp.PREMUL_SUM(0.25))
        assert out.tolist() == [0.75 * comm.size] * 8
        with pytest.raises(ValueError, match="possible are SUM, AVG, PREMUL_SUM"):
            reduce(out, full, None, dist.ReduceOp.MAX)

    groups.run(program, 2)


def trained(launch, ranks, *cases):
    command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks
    run = launch(*command, "tests/torch/programs/fsdp.py", "gloo", *cases)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:-1] == [f"{case} passed" for case in cases]


def test_two_ranks_train_as_without_zcomm(launch):
    trained(launch, 2, "plain")


@pytest.mark.slow
def test_two_ranks_train_as_without_zcomm_however(launch):
    cases = "frozen", "kept", "bf16", "all bf16", "fp16", "accumulated", "prefetched", "divided"
    trained(launch, 2, *cases)


@pytest.mark.slow
def test_four_ranks_train_as_without_zcomm_however(launch):
    cases = "plain", "kept", "pairs", "bf16", "accumulated", "frozen", "prefetched"
    trained(launch, 4, *cases, "replicated", "replicas")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_of_backend_zcomm_train_as_without_codecs(launch, ranks):
    cases = "plain", "bf16", "prefetched"
    run = launch("tests/torch/programs/fsdp.py", "zcomm", *cases, num_ranks=ranks)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:-1] == [f"{case} passed" for case in cases]
