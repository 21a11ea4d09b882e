"""Gathers ahead and reductions behind: the order in which they are issued, memory, and bits."""

import functools
import time
from collections import Counter

import pytest
import torch
from torch import nn

import zero
from tests.marks import one_in, slow
from tests.zero.models import Reordered, Tower, loss_of, make, tokens
from tests.zero.runs import adamw, assert_same_bits, on, shard, train, whole
from zero.order import MOST_EVENTS, Order

NUM_BLOCKS = 4


@functools.cache
def reference(dtype):
    model = make(Tower, num_blocks=NUM_BLOCKS, dtype=dtype)
    config = zero.Config(stage=0, prefetch=0)
    return on("2x2", train, model, config, steps=4, micro=2, clip=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "prefetch", [0, 1, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 9))]
)
@pytest.mark.parametrize(("stage", "secondary"), [(0, None), (1, None), (3, None), (3, "node")])
def test_no_bit_depends_on_prefetch(stage, secondary, prefetch, dtype):
    model = make(Tower, num_blocks=NUM_BLOCKS, dtype=dtype)
    config = zero.Config(stage=stage, secondary=secondary, prefetch=prefetch)
    outcomes = on("2x2", train, model, config, steps=4, micro=2, clip=0.5)
    for outcome, wanted in zip(outcomes, reference(dtype), strict=True):
        assert outcome.losses == wanted.losses
        assert outcome.norms == wanted.norms
        assert_same_bits(outcome.parameters, wanted.parameters)


@pytest.mark.parametrize("codes", [None, "int8"])
def test_no_bit_of_a_quantised_secondary_depends_on_prefetch(codes):
    def program(comm, prefetch):
        config = zero.Config(
            weights="int8",
            grads=("int8", "int4"),
            secondary="node",
            secondary_codec=codes,
            min_numel=0,
            prefetch=prefetch,
        )
        return train(comm, make(Tower, num_blocks=NUM_BLOCKS), config, steps=4, micro=2)

    for found, wanted in zip(
        on("2x2", program, prefetch=2), on("2x2", program, prefetch=0), strict=True
    ):
        assert found.losses == wanted.losses
        assert_same_bits(found.parameters, wanted.parameters)


class Spy:
    """Records what is issued; ``delay`` holds up the stream of operations before each."""

    def __init__(self, comm, delay=0.0):
        self.issued = []
        for name in ("gather_layout", "reduce_layout"):
            setattr(comm, name, self._recorded(comm, getattr(comm, name), name[:6], delay))

    def _recorded(self, comm, method, kind, delay):
        def recorded(*arguments, label="", **options):
            self.issued.append((kind, label))
            if delay:
                comm.enqueue(lambda: time.sleep(delay))
            return method(*arguments, label=label, **options)

        return recorded


def unit(k):
    return f"unit blocks.{k}" if isinstance(k, int) else "the root unit"


def test_the_second_step_gathers_one_ahead_and_reduces_one_behind():
    def program(comm):
        spy = Spy(comm)
        sharded, optimizer = shard(comm, make(Tower, num_blocks=3), zero.Config())
        order = []
        for k, block in enumerate(sharded.blocks):
            block.up.register_forward_hook(lambda *_, k=k: order.append(("forward", k)))
            block.up.register_full_backward_hook(lambda *_, k=k: order.append(("backward", k)))
        for step in range(2):
            spy.issued.clear()
            order.clear()
            spy.issued = order
            loss_of(sharded, tokens(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return order

    wanted = [
        ("gather", "root"),
        ("gather", 0),
        ("gather", 1),
        ("forward", 0),
        ("gather", 2),
        ("forward", 1),
        ("forward", 2),
        ("gather", 2),
        ("gather", "root"),
        ("gather", 1),
        ("backward", 2),
        ("reduce", 2),
        ("gather", 0),
        ("backward", 1),
        ("reduce", 1),
        ("backward", 0),
        ("reduce", 0),
        ("reduce", "root"),
    ]
    for order in on("2", program):
        assert order == [(kind, k if kind.endswith("ward") else unit(k)) for kind, k in wanted]


@pytest.mark.parametrize("prefetch", [slow(1), 3, slow(6), 40])
def test_a_unit_travels_once_for_each_time_that_it_is_whole(prefetch):
    """However many are ahead: what the forward gathers for the backward waits for it."""

    def program(comm):
        spy = Spy(comm)
        sharded, optimizer = shard(comm, make(Tower, num_blocks=6), zero.Config(prefetch=prefetch))
        for step in range(3):
            spy.issued.clear()
            loss_of(sharded, tokens(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return Counter(label for kind, label in spy.issued if kind == "gather")

    expected = {unit("root"): 2} | {unit(k): 2 for k in range(6)}
    assert on("2", program) == [expected] * 2


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("secondary", [None, "node"])
def test_memory_is_bounded(prefetch, secondary):
    """Whole: the root, the unit that computes, those ahead. Gradients: two units and the root."""
    model = make(Tower, num_blocks=6)

    def program(comm):
        config = zero.Config(secondary=secondary, prefetch=prefetch)
        sharded, optimizer = shard(comm, model, config)
        engine = sharded._zero_engine
        whole_units, gradients = [], []

        def look(*_):
            whole_units.append(engine.gathering.pool.lent)
            gradients.append(engine.reducer.pool.lent)

        for block in sharded.blocks:
            block.up.register_forward_hook(look)
            block.norm.register_full_backward_hook(look)
        for step in range(3):
            loss_of(sharded, tokens(comm.rank, step)).backward()
            assert engine.gathering.pool.lent == engine.gathering.num_ahead == 0
            assert engine.reducer.pool.lent == 0
            optimizer.step()
            optimizer.zero_grad()
        largest = max(engine.gathering.pool.free_nbytes, engine.gathering.pool.peak_nbytes)
        return max(whole_units), max(gradients), largest

    def nbytes(module):
        return sum(-(-4 * p.numel() // 64) * 64 for p in module.parameters())

    block = nbytes(model.blocks[0])
    root = nbytes(model) - 6 * block
    for whole_units, gradients, largest in on("2x2", program):
        assert whole_units == 2 + prefetch
        assert gradients <= 3
        assert largest == root + (1 + prefetch) * block


ORDERS = [(0, 1, 2), (2, 0), (2,), (0, 0, 2), (1, 2), (0, 1, 2), (2, 1, 0), (0, 1, 2)]


@pytest.mark.parametrize(("secondary", "prefetch"), one_in(3, [None, "node"], [2, 1, 4]))
def test_wrong_hints_cost_no_bit(secondary, prefetch):
    """Another order in every step, modules left out or called twice; slow messages."""

    def program(comm, config, delay):
        spy = Spy(comm, delay)
        sharded, optimizer = shard(comm, make(Reordered), config)
        outputs = []
        for step, order in enumerate(ORDERS):
            y = sharded(normal(comm.rank, step), order)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                outputs.append(sharded(normal(0, step), order[::-1]))
        return whole(sharded), outputs, spy.issued

    wanted = on("2x2", program, zero.Config(stage=0), 0)
    found = on("2x2", program, zero.Config(secondary=secondary, prefetch=prefetch), 1e-3)
    for parameters, outputs, issued in found:
        assert_same_bits(parameters, wanted[0][0])
        assert all(map(torch.equal, outputs, wanted[0][1]))
        assert issued == found[0][2]


def normal(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, 33, generator=generator)


def test_a_forward_that_only_one_rank_makes_inside_full_params_is_no_hint():
    def program(comm):
        spy = Spy(comm)
        sharded, optimizer = shard(comm, make(Tower), zero.Config())
        for step in range(3):
            loss_of(sharded, tokens(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with zero.full_params(sharded):
                if comm.rank == step:
                    sharded(tokens(0, 0))
        return whole(sharded), spy.issued

    found = on("2x2", program)
    wanted = on("2x2", train, make(Tower), zero.Config(stage=0), steps=3)
    for parameters, issued in found:
        assert_same_bits(parameters, wanted[0].parameters)
        assert issued == found[0][1]


@pytest.mark.parametrize("event", ["step", "edit", "load"])
def test_what_was_gathered_ahead_is_dropped_when_parameters_change(event):
    """Root and last block are on their way, for a backward that does not come."""

    def program(comm):
        sharded, optimizer = shard(comm, make(Tower), zero.Config())
        for step in range(2):
            loss_of(sharded, tokens(comm.rank, step)).backward()
            if step == 1:
                sharded(tokens(0, 0))
                assert sharded._zero_engine.gathering.num_ahead == 2
                if event == "edit":
                    with zero.full_params(sharded), torch.no_grad():
                        sharded.scale.add_(1)
                if event == "load":  # other values in the shards, a new version
                    for unit in sharded._zero_engine.units:
                        for buffer in unit.buffers:
                            buffer.shard.mul_(2)
                        unit.note_edit()
                ahead = sharded(tokens(0, 0))
                with zero.full_params(sharded):
                    assert torch.equal(ahead, sharded(tokens(0, 0)))
            optimizer.step()
            optimizer.zero_grad()
        assert sharded._zero_engine.gathering.num_ahead == 0
        with torch.no_grad():
            found = sharded(tokens(0, 1))
        with zero.full_params(sharded), torch.no_grad():
            return found, sharded(tokens(0, 1))

    for found, wanted in on("2", program):
        assert torch.equal(found, wanted)


class Leaky(nn.Linear):
    """Gives its weight away."""

    def forward(self, x):
        return super().forward(x[0]), [*x[1], self.weight.detach()]


def test_memory_that_somebody_looks_into_is_not_used_again():
    def layers():
        return nn.Sequential(*(Leaky(8, 8) for _ in range(3)))

    wanted = [layer.weight.detach().clone() for layer in make(layers)]

    def program(comm):
        mine = make(layers)
        sharded, _ = zero.shard(mine, adamw(mine.parameters()), comm=comm)
        kept = []
        for _ in range(3):
            x, given = sharded((torch.ones(1, 8), []))
            x.sum().backward()
            kept += given
        return kept

    for kept in on("2", program):
        assert all(map(torch.equal, kept, wanted * 3))


def test_order_finds_its_place_again():
    order = Order()
    a, b, c = "abc"
    for event in (a, b, c, b):
        order.note(event, backward=False)
        assert order.next(1) == []
    order.note(a, backward=True)
    order.stepped()
    order.note(a, backward=False)
    assert order.next(2) == [b, c]
    order.note(c, backward=False)  # b was left out
    assert order.next(9) == [b, a]
    order.note(c, backward=True)  # never seen
    assert order.next(1) == []
    order.note(b, backward=False)
    assert order.next(1) == [c]


def test_order_without_steps_is_learned_from_the_first_round_and_stays_short():
    order = Order()
    predicted = []
    for event in "abcabc":
        order.note(event, backward=False)
        predicted.append(order.next(1))
    assert predicted == [[], [], [], ["b"], ["c"], []]
    for _ in range(MOST_EVENTS + 5):
        order.note("a", backward=False)
    assert len(order._now) + len(order._last) <= 2 * MOST_EVENTS
