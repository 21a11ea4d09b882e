"""Scripts against trainings: the same operations in the same order, the same bytes."""

import dataclasses
import threading
from collections import Counter

import pytest
import torch

import zcomm
import zero
from tests.marks import slow
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import shard
from topology import parse
from zcomm.planner import Planner
from zcomm.tuning import assume
from zero.layout import find_units
from zero.rehearsal import Compute, Issue, Operation, Values, Wait, rehearse
from zero.simulate import sent

WIDE = {"width": 96, "hidden": 256, "num_blocks": 3, "vocabulary": 512}
CONFIGS = {
    "exact": zero.Config(),
    "one after the other": zero.Config(prefetch=0),
    "qwZ": zero.Config(weights="int8"),
    "hpZ": zero.Config(secondary="node"),
    "qgZ": zero.Config(grads=("int4", "int4")),
    "ZeRO++": zero.Config.zeropp(),
    "safe4": zero.Config.safe4(),
    "safe4, one after the other": dataclasses.replace(zero.Config.safe4(), prefetch=0),
    "persistent": zero.Config(secondary="persistent", grads=("int4", "int4")),
    "accumulate": zero.Config(accumulate="node", weights="int8", grads=("int8", "int4")),
    "two ahead": zero.Config(prefetch=2, secondary=2),
    "five ahead": zero.Config(prefetch=5),
    "codes": zero.Config(weights="int8", secondary="node", secondary_codec="int8", grads="int8"),
    "stage 0": zero.Config(stage=0),
    "stage 0, quantised": zero.Config(stage=0, grads=("int8", "int4")),
    "stage 1": zero.Config(stage=1, accumulate="node"),
    "stage 2": zero.Config(stage=2, weights="int8", grads=("int8", "int4"), grads_feedback=True),
}


def config_of(name):
    return dataclasses.replace(CONFIGS[name], min_numel=0)


def model(**options):
    return make(Tower, **{**WIDE, **options}, dtype=torch.bfloat16)


def train(comm, given, config, micro, record=None, *, steps=3):
    """Take some steps; return the bytes of the last, by operation and level, but handshakes."""
    sharded, optimizer = shard(comm, given, config)
    for _ in range(steps):
        comm.traffic.reset()
        if record is not None and comm.rank == 0:
            record.clear()
        for part in range(micro):
            x = tokens(comm.rank, part, vocabulary=WIDE["vocabulary"])
            loss_of(sharded, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    counted = comm.traffic.snapshot().items()
    return {key: counter.wire_nbytes for key, counter in counted if key[0] != "guard"}


def script_of(given, config, topology, rank=0, micro=1):
    units = find_units(given, config.units)
    return rehearse(units, config, assume(topology, "local"), rank=rank, micro=micro)


def bytes_of(script):
    total = Counter()
    for event in script:
        if isinstance(event, Issue):
            operation = event.operation
            name = "values" if isinstance(operation, Values) else operation.plan.counted_as
            for level, nbytes in sent(operation, cut=True).items():
                total[name, level] += nbytes
    return dict(total)


def compare(name, topology, micro, given, **options):
    config = config_of(name)
    known = parse(topology)

    def program(comm):
        return train(comm, given, config, micro, **options)

    real = zcomm.run_local(program, known.size, topology)
    for rank in range(known.size):
        assert bytes_of(script_of(given, config, known, rank, micro)) == real[rank], rank


FAST = [
    ("ZeRO++", "2x2", 1),
    ("safe4", "2x2", 2),
    ("persistent", "2x2", 1),
    ("codes", "2x2", 1),
    ("stage 0", "2x2", 1),
    ("stage 1", "2x2", 2),
    ("stage 2", "2x2", 1),
]
REST = [
    (name, topology, micro)
    for name in CONFIGS
    for topology in ("2x2", "4x1", "1x3", "2x2x2")
    for micro in (1, 2)
    if (name, topology, micro) not in FAST and (topology != "1x3" or name != "two ahead")
]


@pytest.mark.parametrize(("name", "topology", "micro"), [*FAST, *(slow(*case) for case in REST)])
def test_the_bytes_of_every_rank_are_those_of_a_training(name, topology, micro):
    compare(name, topology, micro, model())


ODD = [
    (name, topology)
    for name in ("exact", "ZeRO++", "safe4", "persistent", "stage 2")
    for topology in ("3x5", "1x7", "5x1", "3x2x2")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "topology"), [*ODD, ("exact", "3+2")])
@pytest.mark.parametrize("shape", [{"width": 3, "hidden": 5, "num_blocks": 1}, {"num_blocks": 5}])
def test_bytes_of_odd_jobs_and_models(name, topology, shape):
    compare(name, topology, 1, model(**shape))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "ZeRO++", "persistent"])
def test_the_bytes_of_64_ranks_are_those_of_a_training(name):
    compare(name, "8x8", 1, model(num_blocks=1), steps=2)


@pytest.mark.parametrize(
    "name", ["exact", *map(slow, ("one after the other", "ZeRO++", "accumulate", "two ahead"))]
)
def test_operations_are_issued_in_the_order_of_a_training(monkeypatch, name):
    config, given = config_of(name), model()
    record, rank_0 = [], []
    plan = Planner.plan

    def noted(self, *arguments):
        made = plan(self, *arguments)
        if threading.get_ident() in rank_0:
            record.append(shape_of(made))
        return made

    def program(comm):
        if comm.rank == 0:
            rank_0.append(threading.get_ident())
        train(comm, given, config, 2, record)

    monkeypatch.setattr(Planner, "plan", noted)
    zcomm.run_local(program, 4, "2x2")
    script = script_of(given, config, parse("2x2"), micro=2)
    operations = [event.operation for event in script if isinstance(event, Issue)]
    wanted = [shape_of(each.plan) for each in operations if isinstance(each, Operation)]
    assert record == wanted


def shape_of(plan):
    return plan.operation, [layout.key for layout in plan.layouts], plan.route


@pytest.mark.parametrize(("prefetch", "hidden"), [(0, False), (1, True)])
def test_a_unit_ahead_is_issued_before_the_unit_before_it_computes(prefetch, hidden):
    script = script_of(model(), zero.Config(prefetch=prefetch), parse("2x2"))
    second = [event for event in script if event == Compute(1, backward=False)]
    assert len(second) == 1
    at = script.index(second[0])
    wait = max(i for i, event in enumerate(script[:at]) if isinstance(event, Wait))
    issue = next(
        i
        for i, event in enumerate(script)
        if isinstance(event, Issue) and event.operation is script[wait].operation
    )
    between = script[issue:wait]
    assert any(isinstance(event, Compute) for event in between) is hidden
