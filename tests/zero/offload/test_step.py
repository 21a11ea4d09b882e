"""The step in blocks, as users see it: hooks, schedulers, closures, groups, refusals, memory."""

import gc
import threading
import weakref

import pytest
import torch
from torch import optim

import zero
from tests.marks import slow
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.offload.runs import BLOCK_NUMEL, compare, offloaded
from tests.zero.runs import SIZES, adamw, on, shard, whole
from tests.zero.test_optimizers import Derived, SignDescent
from zero.engine import engine_of
from zero.memory import report

PLACES = ["nvme both", slow("cpu")]


def backward(model, rank, step):
    loss = loss_of(model, tokens(rank, step))
    loss.backward()
    return loss


@pytest.mark.parametrize("place", PLACES)
def test_hooks_run_once_a_step(place, tmp_path):
    """Those of the optimizer, made before and after, and torch's global ones."""

    def program(comm, config):
        seen = []
        model = make(Tower)
        optimizer = adamw(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        zero.shard(model, optimizer, config, comm=comm)
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
        optimizer.register_step_post_hook(lambda *_: seen.append("post"))
        for step in range(2):
            backward(model, comm.rank, step)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    (seen, _) = compare("2", program, zero.Config(), place, tmp_path)
    assert seen == ["before", "pre", "post"] * 2


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [slow(SignDescent), Derived])
def test_a_users_own_optimizer(kind, place, tmp_path):
    optim.Adam([torch.zeros(1)])  # torch hooks the step of a class at its first instance
    model = make(Tower)

    def program(comm, config):
        sharded, optimizer = shard(comm, model, config, lambda p: kind(p, lr=1e-3))
        for step in range(2):
            backward(sharded, comm.rank, step)
            optimizer.step()
            optimizer.zero_grad()
        return whole(sharded)

    compare("2", program, zero.Config(), place, tmp_path)


class Numbered(optim.Optimizer):
    """Counts its steps in the groups, in itself, and in a tensor, as several packages do."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "k": 0, "weights": [0.0]})
        self.count = 0
        self.total = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        self.total += self.count
        for group in self.param_groups:
            group["k"] += 1
            group["weights"][0] += 0.5
            factor = group["k"] * group["weights"][0] * self.count * self.total
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / float(factor))


@pytest.mark.parametrize("place", PLACES)
def test_what_a_step_counts_is_counted_once(place, tmp_path):
    model = make(Tower, dtype=torch.bfloat16)

    def program(comm, config):
        def made(parameters):
            small, large = [], []
            for parameter in parameters:
                (small if parameter.dim() < 2 else large).append(parameter)
            return Numbered([{"params": small}, {"params": large, "lr": 0.1}], 0.2)

        sharded, optimizer = shard(comm, model, config, made)
        for step in range(3):
            backward(sharded, comm.rank, step)
            optimizer.step()
            optimizer.zero_grad()
        groups = [(group["k"], group["weights"]) for group in optimizer.param_groups]
        return whole(sharded), groups, optimizer.count, optimizer.total

    ((_, groups, count, total), _) = compare("2", program, zero.Config(), place, tmp_path)
    assert groups == [(3, [3.0])] * 2  # torch lets groups share a default that is a list
    assert (count, total.item()) == (3, 6)


class Remembering(optim.Optimizer):
    """Has a momentum outside its state, and finds it by the tensor."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.momentum = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.momentum[p] = p.grad + 0.9 * self.momentum.get(p, 0)
                    p.sub_(self.momentum[p], alpha=group["lr"])


def test_an_optimizer_that_cannot_be_stepped_in_blocks(tmp_path):
    def program(comm):
        model, config = make(Tower), offloaded(zero.Config(), "cpu", tmp_path)
        with pytest.raises(ValueError, match=r"Remembering cannot be stepped block by block"):
            shard(comm, model, config, lambda p: Remembering(p, lr=1e-3))
        shard(comm, model, zero.Config(), lambda p: Remembering(p, lr=1e-3))

    on("1", program)


class Averaging(SignDescent):
    """Has a mode for evaluation, as schedule-free optimizers."""

    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.copy_(self.state[p]["mean"])


def test_an_optimizer_that_reads_states_outside_its_step(tmp_path):
    def program(comm):
        model, config = make(Tower), offloaded(zero.Config(), "nvme", tmp_path)
        with pytest.raises(ValueError, match=r"Averaging has eval\(\), .* on disk"):
            shard(comm, model, config, lambda p: Averaging(p, lr=1e-3))

    on("1", program)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("before", [True, slow(False)])
def test_schedulers(before, place, tmp_path, recwarn):
    """Made before or after, they see that the optimizer stepped: torch warns where they do not."""

    def program(comm, config):
        model = make(Tower)
        optimizer = adamw(model.parameters())
        if before:
            schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        zero.shard(model, optimizer, config, comm=comm)
        if not before:
            schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(2):
            backward(model, comm.rank, step)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return whole(model), optimizer.param_groups[0]["lr"]

    compare("2", program, zero.Config(), place, tmp_path)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.parametrize("place", PLACES)
def test_a_closure(place, tmp_path):
    model = make(Tower)

    def program(comm, config):
        sharded, optimizer = shard(comm, model, config)
        calls = []

        def closure():
            calls.append(1)
            optimizer.zero_grad()
            return backward(sharded, comm.rank, len(calls))

        losses = [optimizer.step(closure).item() for _ in range(2)]
        assert len(calls) == 2
        return losses, whole(sharded)

    compare("2", program, zero.Config(), place, tmp_path)


def test_a_step_that_somebody_else_replaced(tmp_path):
    def program(comm):
        model = make(Tower)
        optimizer = adamw(model.parameters())
        optimizer.step = lambda: None
        config = offloaded(zero.Config(), "cpu", tmp_path)
        with pytest.raises(ValueError, match=r"AdamW was replaced by .*lambda.* after zero.shard"):
            zero.shard(model, optimizer, config, comm=comm)

    on("1", program)


def test_states_on_disk_have_no_state_dict(tmp_path):
    def program(comm):
        config = offloaded(zero.Config(), "nvme", tmp_path)
        _, optimizer = shard(comm, make(Tower), config)
        with pytest.raises(ValueError, match=r"AdamW are on disk .* use zero.save"):
            optimizer.state_dict()
        with pytest.raises(ValueError, match="on disk"):
            optimizer.load_state_dict({})

    on("1", program)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [slow(optim.AdamW), optim.SGD])
def test_states_that_the_user_drops(kind, place, tmp_path):
    """``state.clear()`` begins anew, as without offload; saved are none, then those since."""
    model = make(Tower, dtype=torch.bfloat16)
    options = {"momentum": 0.9} if kind is optim.SGD else {}

    def program(comm, config):
        sharded, optimizer = shard(comm, model, config, lambda p: kind(p, lr=0.01, **options))
        for step in range(4):
            backward(sharded, comm.rank, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.state.clear()
                zero.save(tmp_path / "saved", sharded, optimizer)
                zero.load(tmp_path / "saved", sharded, optimizer)
        zero.save(tmp_path / "saved", sharded, optimizer)
        optimizer.state.clear()
        zero.load(tmp_path / "saved", sharded, optimizer)
        backward(sharded, comm.rank, 4)
        optimizer.step()
        return whole(sharded)

    compare("2", program, zero.Config(), place, tmp_path)


def test_step_counts_are_where_they_were(tmp_path):
    """In the state of each master; everything else is on disk, and masters cannot be read."""

    def program(comm):
        config = offloaded(zero.Config(), "nvme", tmp_path)
        sharded, optimizer = shard(comm, make(Tower), config)
        for step in range(3):
            backward(sharded, comm.rank, step)
            optimizer.step()
            optimizer.zero_grad()
        for tensor in optimizer.param_groups[0]["params"]:
            assert optimizer.state[tensor].keys() == {"step"}
            assert optimizer.state[tensor]["step"].item() == 3
            assert tensor.isnan().all()
            if tensor.numel() > 1:
                with pytest.raises(RuntimeError, match="single memory location"):
                    tensor.add_(1)

    on("2", program)


def test_a_skipped_step_moves_nothing(tmp_path):
    def program(comm):
        config = offloaded(zero.Config(), "nvme both", tmp_path)
        sharded, optimizer = shard(comm, make(Tower), config)
        backward(sharded, comm.rank, 0)
        optimizer.step()
        optimizer.zero_grad()
        (loss_of(sharded, tokens(comm.rank, 0)) * float("inf")).backward()
        swap = engine_of(sharded).offload.drive.swap
        before = swap.stats
        optimizer.step()
        assert zero.step_was_skipped(optimizer)
        assert swap.stats.read_nbytes == before.read_nbytes
        assert swap.stats.written_nbytes == before.written_nbytes

    on("2", program)


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16])
def test_bytes_of_a_step(dtype, tmp_path):
    """Read: masters and two states; written: those and the new shard. At most three blocks."""
    model = make(Tower, width=64, hidden=256, dtype=dtype)
    numel = sum(p.numel() for p in model.parameters())

    def program(comm):
        config = offloaded(zero.Config(prefetch=0), "nvme both", tmp_path)
        sharded, optimizer = shard(comm, model, config)
        swap = engine_of(sharded).offload.drive.swap
        for step in range(3):
            backward(sharded, comm.rank, step)
            before = swap.stats
            optimizer.step()
            after = swap.stats
            optimizer.zero_grad()
        read = after.read_nbytes - before.read_nbytes
        written = after.written_nbytes - before.written_nbytes
        return read, written, report(sharded, optimizer)

    outcomes = on("2", program)
    assert sum(read for read, _, _ in outcomes) == 12 * numel
    assert sum(written for _, written, _ in outcomes) == (12 + dtype.itemsize) * numel
    assert sum(found.disk for _, _, found in outcomes) == (12 + dtype.itemsize) * numel
    largest_unit = sum(p.numel() for p in model.blocks[0].parameters())
    shard_nbytes = 2 * (largest_unit / 2 + 255) * dtype.itemsize
    for _, _, found in outcomes:
        # Three blocks of three columns, the shards of two units, each rounded up to a page.
        most = 9 * (4 * (BLOCK_NUMEL + 255) + 4096) + 2 * (shard_nbytes + 4096)
        assert found.transfers <= most
        assert found.states.masters == found.states.parameters == 0
        assert found.held < 0.02 * found.disk  # step counts
        assert "on disk" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["2", "2x2"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_without_what_is_on_disk(stage, topology, tmp_path):
    """Between backward and step parameters, as far as they are here, and 16-bit gradients."""
    model = make(Tower, width=128, hidden=512, num_blocks=4, dtype=torch.bfloat16)
    numel, size = sum(p.numel() for p in model.parameters()), SIZES[topology]

    def program(comm):
        config = offloaded(zero.Config(stage=stage), "nvme both", tmp_path)
        sharded, optimizer = shard(comm, model, config)
        for step in range(2):
            backward(sharded, comm.rank, step)
            found = report(sharded, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return found

    outcomes = on(topology, program)
    wanted = {1: 4 * size, 2: 2 * size + 2, 3: 2}[stage] * numel
    assert sum(found.held for found in outcomes) == pytest.approx(wanted, rel=0.03)
    assert sum(f.disk for f in outcomes) == {1: 12, 2: 12, 3: 14}[stage] * numel


def test_float32_gradients_exist_of_one_block(tmp_path, monkeypatch):
    """``cpu``: what the step needs beside model states does not grow with the model."""
    model = make(Tower, dtype=torch.bfloat16)
    given = []
    stepped = SignDescent.step

    def watched(optimizer, closure=None):
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        given.append(sum(p.numel() for p in tensors))
        return stepped(optimizer, closure)

    monkeypatch.setattr(SignDescent, "step", watched)

    def program(comm):
        config = offloaded(zero.Config(), "cpu", tmp_path)
        sharded, optimizer = shard(comm, model, config, lambda p: SignDescent(p, lr=1e-3))
        given.clear()
        backward(sharded, comm.rank, 0)
        optimizer.step()

    on("1", program)
    assert sum(given) == sum(p.numel() for p in model.parameters())
    assert max(given) <= BLOCK_NUMEL + 255 < sum(given) / 4


class Counting(optim.Adam):
    """Notes how many tensors each call of its step is given."""

    def step(self, closure=None):
        self.calls = [*self.__dict__.get("calls", []), len(self.param_groups[0]["params"])]
        return super().step(closure)


@pytest.mark.parametrize(
    ("fused", "dtype", "whole_at"),
    [
        (True, torch.float32, [True, True]),
        (False, torch.float32, [False, False]),
        (True, torch.bfloat16, [False, False]),
    ],
)
def test_one_call_where_blocks_would_save_nothing(fused, dtype, whole_at, tmp_path):
    """The same bits, and no more memory: a fused step of masters with float32 gradients."""
    model = make(Tower, dtype=dtype)
    calls = {}

    def program(comm, config):
        sharded, optimizer = shard(comm, model, config, lambda p: Counting(p, lr=1e-3, fused=fused))
        for step in range(2):
            zero.scale_loss(optimizer, loss_of(sharded, tokens(comm.rank, step))).backward()
            optimizer.calls = []
            optimizer.step()
            optimizer.zero_grad()
            calls.setdefault(config.offload_optimizer, []).append(optimizer.calls)
        return whole(sharded)

    compare("1", program, zero.Config(loss_scale=8.0), "cpu", tmp_path)
    assert calls[None] == [calls[None][0]] * 2
    assert [found == calls[None][0] for found in calls["cpu"]] == whole_at


@pytest.mark.parametrize("place", [slow(None), "nvme both"])
def test_a_model_that_is_dropped_is_freed(place, tmp_path):
    """And with it, on disk, its space and its threads."""
    found = []
    before = set(threading.enumerate())

    def program(comm):
        config = zero.Config() if place is None else offloaded(zero.Config(), place, tmp_path)
        sharded, optimizer = shard(comm, make(Tower), config)
        backward(sharded, comm.rank, 0)
        optimizer.step()
        engine = engine_of(sharded)
        found.append(weakref.ref(sharded))
        if engine.offload is not None:
            found.append(weakref.ref(engine.offload.drive.swap))

    on("2", program)
    gc.collect()
    assert [reference() for reference in found] == [None] * len(found)
    workers = [t for t in set(threading.enumerate()) - before if t.name.startswith("swap-")]
    for thread in workers:  # told to end, they do so when they get to run
        thread.join(60)
    assert not any(thread.is_alive() for thread in workers)
