"""A disk that fails: one clear error, on all ranks, and nothing goes on with what is left."""

import contextlib

import pytest
import torch

import zero
from tests.marks import slow
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.offload.disk import NEEDS_ROOT, mounted
from tests.zero.offload.runs import offloaded
from tests.zero.runs import on, shard
from tests.zero.test_optimizers import SignDescent
from zcomm.errors import OffloadError, PeerLost
from zero.engine import engine_of


class Failing:
    """Stands in for a method of a rank's file: raises in its call number ``at``."""

    def __init__(self, method, at):
        self.method, self.left = method, at

    def __call__(self, *arguments):
        self.left -= 1
        if self.left == 0:
            raise OffloadError("the disk is broken at offset 4096", path="/nvme", offset=4096)
        return self.method(*arguments)


def break_disk(engine, name, at):
    swap = engine.offload.drive.swap
    owner = swap if name == "allocate" else swap._file
    setattr(owner, name, Failing(getattr(owner, name), at))


@pytest.mark.parametrize(
    ("name", "at"),
    [("read", 4), slow("read", 1), slow("write", 1), ("write", 4), slow("allocate", 2)],
)
def test_a_step_that_fails_is_the_last_call(name, at, tmp_path):
    """Rank 1's disk fails in its middle; step counts and groups are those of before."""
    model = make(Tower, width=64, hidden=128, num_blocks=3)

    def program(comm):
        config = offloaded(zero.Config(), "nvme", tmp_path)
        sharded, optimizer = shard(comm, model, config)
        # The first step asks for the space of the states.
        for step in range(1 if name == "allocate" else 2):
            if step:
                optimizer.step()
                optimizer.zero_grad()
            loss_of(sharded, tokens(comm.rank, step)).backward()
        groups = [list(group["params"]) for group in optimizer.param_groups]
        counts = {t: {k: v.clone() for k, v in s.items()} for t, s in optimizer.state.items()}
        if comm.rank == 0:
            for step in range(2, 9):  # until it hears of rank 1
                optimizer.step()
                loss_of(sharded, tokens(comm.rank, step)).backward()
            return
        break_disk(engine_of(sharded), name, at)
        with pytest.raises(OffloadError, match="the disk is broken at offset 4096") as caught:
            optimizer.step()
        assert caught.value.offset == 4096
        assert [list(group["params"]) for group in optimizer.param_groups] == groups
        assert optimizer.state.keys() == counts.keys()
        for tensor, state in counts.items():
            assert optimizer.state[tensor] == state
        for call in (
            lambda: sharded(tokens(0, 0)),
            optimizer.step,
            lambda: zero.save(tmp_path / "saved", sharded, optimizer),
            lambda: zero.load(tmp_path / "saved", sharded, optimizer),
            lambda: zero.full_state_dict(sharded),
            lambda: zero.full_params(sharded).__enter__(),
            lambda: zero.clip_grad_norm_(optimizer, 1.0),
        ):
            with pytest.raises(OffloadError, match=r"any more.*earlier, OffloadError: the disk"):
                call()
        raise caught.value

    with pytest.raises((OffloadError, PeerLost)):
        on("2", program)


def momentum_of_half(parameters):
    """States in one group only."""
    parameters = list(parameters)
    half = len(parameters) // 2
    groups = [{"params": parameters[:half], "momentum": 0.9}, {"params": parameters[half:]}]
    return torch.optim.SGD(groups, lr=0.01)


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "Adagrad": torch.optim.Adagrad,
    "momentum of half": momentum_of_half,
    "SignDescent": lambda parameters: SignDescent(parameters, lr=1e-3),
}


@pytest.mark.parametrize(
    "kind", ["AdamW", "momentum of half", *map(slow, ("amsgrad", "Adagrad", "SignDescent"))]
)
def test_a_step_needs_no_more_disk_than_shard_took(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("zero.offload.swap._GROWTH_NBYTES", 0)
    model = make(Tower, dtype=torch.bfloat16)

    def program(comm):
        config = offloaded(zero.Config(), "nvme both", tmp_path)
        sharded, optimizer = shard(comm, model, config, OPTIMIZERS[kind])
        swap = engine_of(sharded).offload.drive.swap
        taken = swap.stats.reserved_nbytes
        for step in range(2):
            loss_of(sharded, tokens(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = swap.stats
        assert stats.used_nbytes == stats.reserved_nbytes == taken

    on("2", program)


@NEEDS_ROOT
def test_a_disk_that_holds_no_states_is_refused_by_shard(tmp_path):
    model = make(Tower)
    nbytes = 4 * sum(p.numel() for p in model.parameters())

    def program(comm):
        config = offloaded(zero.Config(), "nvme", disk)
        with pytest.raises(OffloadError, match=r"cannot reserve .*No space left"):
            shard(comm, model, config)

    with mounted(tmp_path / "disk", f"size={2 * nbytes}") as disk:
        on("1", program)


@pytest.mark.parametrize("prefetch", [slow(0), 1])
def test_a_gather_that_fails(prefetch, tmp_path):
    def program(comm):
        config = offloaded(zero.Config(prefetch=prefetch), "nvme both", tmp_path)
        sharded, optimizer = shard(comm, make(Tower), config)
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        optimizer.step()
        break_disk(engine_of(sharded), "read", 3)
        with pytest.raises(OffloadError, match="the disk is broken"):
            loss_of(sharded, tokens(comm.rank, 1)).backward()
        with pytest.raises(OffloadError, match="earlier, OffloadError: the disk is broken"):
            sharded(tokens(comm.rank, 1))
        ended.append(True)

    ended = []
    # What failed ahead of its use may be raised again when the communicator is closed.
    with contextlib.suppress(OffloadError):
        on("1", program)
    assert ended


def test_a_flipped_bit_is_found(tmp_path):
    """On the real disk, through the file's own descriptor."""

    def program(comm):
        config = offloaded(zero.Config(), "nvme", tmp_path)
        sharded, optimizer = shard(comm, make(Tower), config)
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        optimizer.step()
        column = next(b for u in engine_of(sharded).units for b in u.trainable).columns
        extent = column._columns[0]["value"].extent
        swap = engine_of(sharded).offload.drive.swap
        # The file has no name, and its own descriptor may take whole pages only.
        with open(f"/proc/self/fd/{swap._file.descriptor}", "r+b") as file:
            file.seek(extent.offset + 7)
            (byte,) = file.read(1)
            file.seek(extent.offset + 7)
            file.write(bytes([byte ^ 16]))
        with pytest.raises(OffloadError, match=r"value was damaged on the disk") as caught:
            optimizer.step()
        assert caught.value.offset == extent.offset

    on("1", program)


def test_a_folder_that_is_not_there(tmp_path):
    config = offloaded(zero.Config(), "nvme", tmp_path / "none")

    def program(comm):
        with pytest.raises(OffloadError, match="none"):
            shard(comm, make(Tower), config)

    on("1", program)


def test_an_optimizer_that_raises(tmp_path):
    """Not the disk's fault, but some blocks are stepped and some are not."""

    class Odd(torch.optim.SGD):
        left = 3

        def step(self, closure=None):
            Odd.left -= 1
            if Odd.left == 0:
                raise ArithmeticError("odd")
            return super().step(closure)

    def program(comm):
        config = offloaded(zero.Config(), "cpu", tmp_path)
        Odd.left = 10**6
        sharded, optimizer = shard(comm, make(Tower), config, lambda p: Odd(p, lr=0.1))
        loss_of(sharded, tokens(comm.rank, 0)).backward()
        Odd.left = 3
        with pytest.raises(ArithmeticError, match="odd"):
            optimizer.step()
        with pytest.raises(OffloadError, match="earlier, ArithmeticError: odd"):
            sharded(tokens(0, 0))

    on("1", program)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_at_any_moment(launch, tmp_path):
    """Eight lives; what they train is what one that is never killed does, without offload."""
    run = launch("-m", "tests.zero.offload.trainer", tmp_path, 8, 0, timeout=220)
    assert run.returncode == 0, run.stdout + run.stderr
    killed, resumed, same = run.stdout.split()[-3:]
    assert int(killed) >= 4
    assert int(resumed) > 0
    assert same == "same"
