"""A save that is killed leaves the checkpoint before it (C3), and random state comes back."""

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import zero
import zero.checkpoint.save as save_module
from tests.zero.models import Tower, make
from tests.zero.runs import assert_same_bits, on, shard, whole
from tests.zero.test_checkpoint import one_step
from zcomm.errors import CheckpointError, OffloadError


def kill_saves(launch, folder, lives, seed):
    run = launch("-m", "tests.zero.saver", folder, lives, seed, timeout=220)
    assert run.returncode == 0, run.stderr
    steps, hit = (int(word) for word in run.stdout.split()[-3::2])
    return steps, hit


@pytest.mark.slow
def test_killed_saves(launch, tmp_path):
    steps, _ = kill_saves(launch, tmp_path, 5, seed=0)
    assert steps > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [1, 2])
def test_fifty_killed_saves(launch, tmp_path, seed):
    """Two times 25, so many that some are hit while they write."""
    steps, hit = kill_saves(launch, tmp_path, 25, seed)
    assert steps > 0
    assert hit > 0


class KilledError(Exception):
    """What stops a save in the tests below, at a chosen point."""


@pytest.mark.parametrize("point", ["write_tensors", "write_text", "sync_directory", "write_index"])
def test_a_save_that_stops_at_any_point_leaves_the_one_before(point, tmp_path, monkeypatch):
    """The file system is as it was at that moment; then the rest of the save never happens."""
    model = make(Tower)
    mine_too = tmp_path / "data-set"
    mine_too.mkdir()

    def program(comm):
        mine, optimizer = shard(comm, model, zero.Config())
        zero.save(tmp_path, mine, optimizer, step=1)
        before = whole(mine)
        one_step(mine, optimizer, comm.rank, 0)
        comm.barrier()
        if comm.rank == 0:

            def stop(*arguments, **options):
                raise KilledError("here")

            monkeypatch.setattr(f"zero.checkpoint.save.{point}", stop)
        comm.barrier()
        with pytest.raises((KilledError, CheckpointError), match="here"):
            zero.save(tmp_path, mine, optimizer, step=2)
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.undo()
        comm.barrier()
        assert zero.load(tmp_path, mine, optimizer, random_state=False).step == 1
        assert_same_bits(whole(mine), before)
        zero.save(tmp_path, mine, optimizer, step=3)
        assert zero.load(tmp_path, mine, optimizer, random_state=False).step == 3

    on("1x2", program)
    # What the stopped save left is gone; what is not ours is not touched.
    assert mine_too.is_dir()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("place", [None, "nvme"])
def test_ctrl_c_in_a_save_ends_the_save(place, tmp_path, monkeypatch):
    """Whoever goes on training does not write into a checkpoint that somebody else completes."""
    writers = []

    def interrupted(*arguments):
        writers.append(threading.current_thread())
        raise KeyboardInterrupt

    def program(comm):
        config = zero.Config(offload_optimizer=place, nvme_path=place and tmp_path)
        mine, optimizer = shard(comm, make(Tower), config)
        zero.save(tmp_path / "saved", mine, optimizer, step=1)
        one_step(mine, optimizer, comm.rank, 0)
        with monkeypatch.context() as patch:
            patch.setattr("zero.checkpoint.save.write_tensors", interrupted)
            with pytest.raises(KeyboardInterrupt):
                zero.save(tmp_path / "saved", mine, optimizer, step=2)
        assert writers == [threading.current_thread()]
        one_step(mine, optimizer, comm.rank, 1)
        assert zero.load(tmp_path / "saved", mine, optimizer, random_state=False).step == 1
        assert len(list((tmp_path / "saved").iterdir())) == 2

    on("1", program)


@pytest.mark.parametrize("place", [None, "cpu", "nvme"])
def test_a_save_in_the_middle_of_a_step_is_refused(place, tmp_path):
    """Of a handler of SIGTERM, say: half of its tensors would be of the next step."""

    class Interrupted(torch.optim.SGD):
        handle = None

        def step(self, closure=None):
            super().step(closure)
            if Interrupted.handle is not None:
                Interrupted.handle()

    def program(comm):
        path = tmp_path if place == "nvme" else None
        config = zero.Config(offload_optimizer=place, nvme_path=path)
        Interrupted.handle = None
        mine, optimizer = shard(comm, make(Tower), config, lambda p: Interrupted(p, lr=0.1))
        one_step(mine, optimizer, comm.rank, 0)
        zero.save(tmp_path / "saved", mine, optimizer, step=1)
        Interrupted.handle = lambda: zero.save(tmp_path / "saved", mine, optimizer, step=2)
        with pytest.raises(ValueError, match=r"zero.save in the middle of a step"):
            one_step(mine, optimizer, comm.rank, 1)
        with pytest.raises((ValueError, OffloadError), match=r"zero.save in the middle of a step"):
            zero.save(tmp_path / "saved", mine, optimizer, step=2)
        if place is None:
            assert zero.load(tmp_path / "saved", mine, optimizer).step == 1
            zero.save(tmp_path / "saved", mine, optimizer, step=3)

    on("1", program)


def test_a_save_is_waited_for_again_where_that_was_interrupted(tmp_path, monkeypatch):
    """Else the next one would write beside it, and the first to end remove the other's files."""
    may_write, real = threading.Event(), save_module.write_tensors

    def slow(*arguments):
        assert may_write.wait(60)
        return real(*arguments)

    def interrupted(thread):
        monkeypatch.undo()
        may_write.set()
        raise KeyboardInterrupt

    def program(comm):
        mine, optimizer = shard(comm, make(Tower), zero.Config())
        monkeypatch.setattr(save_module, "write_tensors", slow)
        saving = zero.save(tmp_path, mine, optimizer, step=1, async_op=True)
        monkeypatch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saving.wait()
        zero.save(tmp_path, mine, optimizer, step=2)
        assert saving.done()
        assert zero.load(tmp_path, mine, optimizer, random_state=False).step == 2

    on("1", program)


def test_a_first_save_that_did_not_end_is_no_checkpoint(tmp_path):
    (tmp_path / ".tmp-0123").mkdir()

    def program(comm):
        mine, optimizer = shard(comm, make(Tower), zero.Config())
        with pytest.raises(CheckpointError, match=r"the first save to .* did not end"):
            zero.load(tmp_path, mine, optimizer)

    on("1x2", program)


def draw():
    return torch.rand(3).tolist() + np.random.rand(3).tolist() + [random.random()]  # noqa: NPY002


@pytest.fixture
def folder(comm, tmp_path):
    """A folder of all ranks: rank 0's, whose name travels."""
    text = str(tmp_path).encode().ljust(400)
    return Path(comm.broadcast(np.frombuffer(text, np.uint8).copy()).tobytes().decode().strip())


@pytest.mark.mpi
@pytest.mark.parametrize("stage", range(4))
def test_resume_under_mpi_with_random_state(comm, stage, folder):
    """Each rank goes on with its own draws."""
    mine, optimizer = shard(comm, make(Tower), zero.Config(stage))
    torch.manual_seed(comm.rank)
    one_step(mine, optimizer, comm.rank, 0)
    saving = zero.save(folder, mine, optimizer, async_op=True)
    drawn = draw()
    one_step(mine, optimizer, comm.rank, 1)
    expected = whole(mine)
    saving.wait()

    other, optimizer = shard(comm, make(Tower, seed=1), zero.Config(stage))
    assert zero.load(folder, other, optimizer).same_plan
    assert draw() == drawn
    one_step(other, optimizer, comm.rank, 1)
    assert_same_bits(whole(other), expected)
