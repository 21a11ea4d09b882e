"""``zero.save``: every rank writes one file, and rank 0 an index, last.

1. Every rank copies what it owns; an asynchronous save lets the training go on here, any other
   needs no copy.
2. Every rank writes its file into a temporary folder, fsyncs and renames it, then its part of the
   index in the same way. Rank 0 waits for all parts: the file system is the meeting place, so that
   nothing is sent behind the training's back.
3. Rank 0 renames the folder, and replaces ``index.json`` by one that names it. That one rename is
   the moment from which the new checkpoint counts.
4. Rank 0 removes the data of the checkpoint before.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from zcomm import Communicator
from zcomm.errors import CheckpointError
from zero.checkpoint.agree import same_number, together
from zero.checkpoint.capture import Captured, capture, capture_buffers, describe
from zero.checkpoint.files import (
    INDEX,
    remove_stale,
    sync_directory,
    write_index,
    write_tensors,
    write_text,
    writing,
)
from zero.checkpoint.plain import encode
from zero.engine import Engine, engine_of_both
from zero.offload.drive import Faults
from zero.offload.told import told

FORMAT = "zero checkpoint 1"
# A rank that has not written its part this long after the last one did is given up.
STALL_S = 600.0
# Between two looks for a part: a save is not to end much later than its last rank.
MOST_PAUSE_S = 0.01

_pending: WeakKeyDictionary[Engine, Saving] = WeakKeyDictionary()


class Saving:
    """A save that may still be writing.

    What is written behind the caller is a copy. Without one the caller itself writes: a Ctrl-C ends
    the save with the call, and no training that goes on gets into the checkpoint.
    """

    def __init__(
        self, comm: Communicator, job: _Job, faults: Faults | None, *, behind: bool
    ) -> None:
        self._comm = comm
        self._faults = faults
        self._job = job
        self._error: BaseException | None = None
        self._waited = False
        self._thread: threading.Thread | None = None
        if behind:
            # Not a daemon: a program that ends right after finishes its checkpoint.
            self._thread = threading.Thread(target=self._write, name="zero.save")
            self._thread.start()
        else:
            self._write()

    def _write(self) -> None:
        try:
            self._job.write()
        except BaseException as error:  # raised by wait()
            self._error = error
            self._job.report(error)

    def done(self) -> bool:
        """Tell whether this rank has written what it writes; no collective."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def waited(self) -> bool:
        """Whether :meth:`wait` has nothing left to do."""
        return self._waited

    def wait(self) -> None:
        """Return when the checkpoint is complete on disk. A collective, once.

        Raises:
            CheckpointError: on all ranks, when one could not write.
        """
        if self._waited:
            return
        if self._thread is not None:
            self._thread.join()
        self._waited = True
        try:
            with together(self._comm, self._faults):
                if self._error is not None:
                    raise self._error
        except BaseException:
            if self._comm.rank == 0:
                self._job.discard()
            raise


class _Job:
    """What one rank writes."""

    def __init__(
        self, path: Path, token: int, captured: Captured, rank: int, common: dict[str, Any]
    ) -> None:
        self._path = path
        self._name = f"{token:016x}"
        self._folder = path / f".tmp-{self._name}"
        self._captured = captured
        self._rank = rank
        self._common = common

    def make_folder(self) -> None:
        with writing(self._path):
            self._path.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir()

    def check_folder(self) -> None:
        if not self._folder.is_dir():
            raise CheckpointError(
                f"{self._folder} was made by rank 0 and is not here: all ranks need one file system"
            )

    def write(self) -> None:
        with writing(self._path):
            self._write()

    def _write(self) -> None:
        name = f"rank-{self._rank:05d}.safetensors"
        file = self._folder / name
        digest = write_tensors(file, self._captured.tensors)
        part = self._captured.part
        part["file"], part["nbytes"], part["checksum"] = name, file.stat().st_size, digest
        self._captured.tensors.clear()
        write_text(self._part(self._rank), json.dumps(part), last=True)
        if self._rank == 0:
            self._commit()

    def discard(self) -> None:
        """Remove what was written, so that a disk that is full has room for the next save."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def report(self, error: BaseException) -> None:
        """Tell rank 0, which waits for this rank's part."""
        try:
            self._failure(self._rank).write_text(str(error), encoding="utf-8")
        except OSError:
            return  # rank 0 gives up on its own

    def _part(self, rank: int) -> Path:
        return self._folder / f"part-{rank:05d}.json"

    def _failure(self, rank: int) -> Path:
        return self._folder / f"failed-{rank:05d}"

    def _commit(self) -> None:
        ranks = range(self._common["num_ranks"])
        parts = [self._await_part(rank) for rank in ranks]
        final = self._path / f"data-{self._name}"
        for rank in ranks:
            self._part(rank).unlink()
        self._folder.rename(final)
        sync_directory(self._path)
        write_index(self._path / INDEX, {**self._common, "folder": final.name, "ranks": parts})
        remove_stale(self._path, final.name)

    def _await_part(self, rank: int) -> dict[str, Any]:
        pause, begun = 0.001, time.monotonic()
        while not self._part(rank).exists():
            if self._failure(rank).exists():
                text = self._failure(rank).read_text(encoding="utf-8")
                raise CheckpointError(f"rank {rank} could not write its file: {text}")
            if time.monotonic() - begun > STALL_S:
                raise CheckpointError(f"rank {rank} wrote nothing for {STALL_S:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_S)
        part: dict[str, Any] = json.loads(self._part(rank).read_text(encoding="utf-8"))
        return part


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scheduler: Any = None,
    step: int | None = None,
    extra: Any = None,
    async_op: bool = False,
) -> Saving:
    """Write a checkpoint of a sharded model and its optimizer to the folder ``path``.

    A collective, between a step and the next forward, or between backwards. A checkpoint that is
    there is replaced when the new one is complete, and not before: a save that is killed leaves it
    as it is. Memory, with ``async_op``: one copy of what this rank owns, until it is written.

    Args:
        path: a folder that all ranks see.
        model: returned by ``zero.shard``.
        optimizer: likewise.
        scheduler: anything with ``state_dict`` and ``load_state_dict``; its state must be plain.
        step: your count of steps; ``zero.load`` returns it.
        extra: plain values of your own, of rank 0; ``zero.load`` returns them.
        async_op: return when everything is copied, and write while training goes on. The next save
            waits for this one.

    Returns:
        The save; ``wait()`` is a collective that returns when it is complete. Already complete
        without ``async_op``.

    Raises:
        CheckpointError: on all ranks, when one cannot write.
        OffloadError: on all ranks, when one cannot read states from its disk.
        TypeError: a state that is neither a tensor nor plain.
        ValueError: inside ``full_params`` or a step, or a model and optimizer that do not belong
            together.
    """
    engine = engine_of_both(model, optimizer)
    if engine.gathering.kept:
        raise ValueError("zero.save inside full_params: leave it first, so that edits are taken")
    if engine.stepper.unfinished:
        raise ValueError(
            "zero.save in the middle of a step, or after one that raised: its states are of two"
            " steps; a handler of a signal sets a flag, and the loop saves after the step"
        )
    wait_for_pending(engine)
    comm = engine.comm
    if engine.config.secondary == "persistent":
        engine.gathering.forget_ahead()  # which may be about to move what is published
    with told(comm, engine.faults):
        engine.stepper.take_edits()
    with together(comm, engine.faults):
        common = {
            "format": FORMAT,
            **describe(engine, model, optimizer),
            "scheduler": encode(scheduler and scheduler.state_dict(), "the scheduler's state"),
            "step": step,
            "extra": encode(extra, "extra"),
        }
        captured = capture(engine, optimizer, copy=async_op)
    capture_buffers(engine, model, captured)
    token = same_number(comm, secrets.randbits(62))
    job = _Job(Path(path), token, captured, comm.rank, common)
    with together(comm):
        if comm.rank == 0:
            job.make_folder()
    with together(comm):
        job.check_folder()
    saving = _pending[engine] = Saving(comm, job, engine.faults, behind=async_op)
    if not async_op:
        wait_for_pending(engine)
    return saving


def wait_for_pending(engine: Engine) -> None:
    """Wait for a save that is still writing. A collective where there is one."""
    saving = _pending.get(engine)
    if saving is not None:
        try:
            saving.wait()
        finally:
            if saving.waited:
                _pending.pop(engine, None)
