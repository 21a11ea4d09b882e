"""Nothing is left of a swap, however its process ends; swaps in one folder do not meet."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from tests.marks import slow
from tests.zero.offload.disk import (
    NEEDS_ROOT,
    PIECE,
    drawn,
    mounted,
    read_back,
    refuse_direct,
    same,
)
from zero.offload import OffloadError, Swap


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def swap_threads(but=()):
    """Those that are there, but for those of tests before."""
    found = [thread for thread in threading.enumerate() if thread.name.startswith("swap-")]
    return [thread for thread in found if thread not in but]


def test_a_folder_shows_nothing_and_a_closed_swap_leaves_nothing(tmp_path):
    gc.collect()
    before, threads = descriptors(), swap_threads()
    swap = Swap(tmp_path, rank=0, buffer_nbytes=PIECE)
    swap.write(swap.allocate("w", PIECE), drawn(PIECE))
    assert os.listdir(tmp_path) == []
    assert swap_threads(threads)
    swap.close()
    swap.close()
    assert descriptors() == before
    assert not swap_threads(threads)
    for use in (swap.check, lambda: swap.allocate("w", 1), lambda: swap.direct):
        with pytest.raises(ValueError, match="the swap was closed"):
            use()


def test_a_swap_that_nobody_closes_goes_with_its_last_reference(tmp_path):
    gc.collect()
    before, threads = descriptors(), swap_threads()
    swap = Swap(tmp_path, rank=0, buffer_nbytes=PIECE)
    pending = swap.write(swap.allocate("w", PIECE), drawn(PIECE))
    del swap
    pending.wait()
    del pending
    for thread in swap_threads(threads):
        thread.join(60)
    assert not swap_threads(threads)
    assert descriptors() == before


def test_close_finishes_what_was_started(tmp_path, monkeypatch):
    swap = Swap(tmp_path, rank=0, buffer_nbytes=PIECE)
    may_go, real = threading.Event(), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: may_go.wait(60) and real(*args))
    pending = swap.write(swap.allocate("w", 9 * PIECE), drawn(9 * PIECE))
    threading.Timer(0.05, may_go.set).start()
    swap.close()
    assert pending.done
    pending.wait()


def test_swaps_of_one_folder_and_rank_do_not_meet(tmp_path):
    with Swap(tmp_path, rank=0) as one, Swap(tmp_path, rank=0) as two:
        extents = [swap.allocate("w", 5000) for swap in (one, two)]
        for seed, (swap, extent) in enumerate(zip((one, two), extents, strict=True)):
            swap.write(extent, drawn(5000, seed=seed)).wait()
        for seed, (swap, extent) in enumerate(zip((one, two), extents, strict=True)):
            assert same(read_back(swap, extent, drawn(5000)), drawn(5000, seed=seed))
        with pytest.raises(ValueError, match="w is no extent of this swap"):
            one.free(extents[1])


def test_relative_paths_and_those_with_any_characters(tmp_path, monkeypatch):
    (tmp_path / "größe & ü\n 盘").mkdir()
    monkeypatch.chdir(tmp_path)
    with Swap("größe & ü\n 盘", rank=0) as swap:
        monkeypatch.chdir("/")
        extent = swap.allocate("w", 5000)
        swap.write(extent, data := drawn(5000)).wait()
        assert same(read_back(swap, extent, data), data)
        assert swap.folder == str(tmp_path / "größe & ü\n 盘")


def test_a_file_system_without_direct_io_is_said_once(tmp_path, monkeypatch, caplog):
    refuse_direct(monkeypatch)
    with caplog.at_level(logging.WARNING, "zcomm"), Swap(tmp_path, rank=0) as swap:
        extent = swap.allocate("w", 5000)
        swap.write(extent, data := drawn(5000)).wait()
        assert same(read_back(swap, extent, data), data)
        assert not swap.direct
    assert len(caplog.records) == 1
    assert f"{tmp_path} takes no direct I/O (O_DIRECT)" in caplog.text


def test_a_file_system_that_refuses_the_first_direct_write(tmp_path, monkeypatch):
    real = os.pwritev

    def refusing(descriptor, parts, offset):
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, os.strerror(22))
        return real(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", refusing)
    with Swap(tmp_path, rank=0) as swap:
        assert not swap.direct
        extent = swap.allocate("w", 5000)
        swap.write(extent, data := drawn(5000)).wait()
        assert same(read_back(swap, extent, data), data)


def test_a_file_system_without_unnamed_files(tmp_path, monkeypatch):
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, os.strerror(95))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    with Swap(tmp_path, rank=0) as swap:
        assert os.listdir(tmp_path) == []
        assert os.stat(f"/proc/self/fd/{swap._file.descriptor}").st_mode & 0o777 == 0o600
        extent = swap.allocate("w", 5000)
        swap.write(extent, data := drawn(5000)).wait()
        assert same(read_back(swap, extent, data), data)


def test_names_of_killed_processes_are_swept_and_nothing_else(tmp_path, monkeypatch):
    """Where names are needed: killed before it unlinked, a process leaves an empty file."""
    real, ours = os.open, ".zcomm-swap-0123456789abcdef"

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, os.strerror(95))
        return real(path, flags, *args, **kwargs)

    kept = {ours + "0", "zcomm-swap-0123456789abcdef", ".zcomm-swap-0123456789ABCDEF"}
    full, link, folder = (f".zcomm-swap-{n:016x}" for n in range(3))
    for name in (ours, *kept):
        (tmp_path / name).touch()
    (tmp_path / full).write_text("a user's")
    (tmp_path / "user").touch()
    (tmp_path / link).symlink_to(tmp_path / "user")
    (tmp_path / folder).mkdir()
    monkeypatch.setattr(os, "open", refusing)
    with Swap(tmp_path, rank=0):
        assert set(os.listdir(tmp_path)) == kept | {full, link, folder, "user"}


def test_a_forked_child_neither_uses_nor_harms_it(tmp_path):
    with Swap(tmp_path, rank=0, buffer_nbytes=PIECE) as swap:
        extent = swap.allocate("w", 3 * PIECE)
        swap.write(extent, data := drawn(3 * PIECE)).wait()
        child = os.fork()
        if not child:
            code = 1
            try:
                swap.read(extent, torch.empty_like(data))
            except OffloadError as error:
                code = 0 if "was forked from" in str(error) else 2
            swap.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert same(read_back(swap, extent, data), data)


PROGRAM = """
import sys, torch
from zero.offload import Swap
swap = Swap(sys.argv[1], rank=0, buffer_nbytes=65536)
extent = swap.allocate("w", 3 << 20)
data = torch.ones(3 << 20, dtype=torch.uint8)
swap.write(extent, data).wait()
print("written", flush=True)
{end}
"""
ENDS = {
    "no close": "swap.write(extent, data)",
    "an exception": "swap.write(extent, data); raise SystemError",
    "killed": "while True: swap.write(extent, data)",
}


@NEEDS_ROOT
@pytest.mark.parametrize("end", ["killed", slow("no close"), slow("an exception")])
def test_the_space_is_free_after_the_process(tmp_path, end):
    with mounted(tmp_path / "disk", "size=4M") as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(end=ENDS[end]), folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "written\n"
        if end == "killed":
            assert os.statvfs(folder).f_bfree * os.statvfs(folder).f_bsize <= 1 << 20
            process.send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        codes = {"no close": 0, "an exception": 1, "killed": -signal.SIGKILL}
        assert process.returncode == codes[end], errors
        assert os.listdir(folder) == []
        with Swap(folder, rank=0) as swap:
            swap.allocate("w", 4 << 20)
