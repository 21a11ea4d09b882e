"""What a disk can do wrong is an OffloadError with the place, and never wrong numbers.

Some faults are real: a truncated file, a changed bit, a full or vanished file system. The others
are calls of the system that fail, or say that they did what they did not.
"""

import errno
import logging
import os
import shutil
import subprocess

import pytest
import torch

import zcomm
from tests.zero.offload.disk import (
    NEEDS_ROOT,
    PIECE,
    drawn,
    flip,
    mounted,
    outside,
    read_back,
    refuse_direct,
    same,
)
from zero.offload import OffloadError, Swap

N = 3 * PIECE + 5  # in four pieces


@pytest.fixture
def swap(tmp_path):
    with Swap(tmp_path / ".", rank=0, buffer_nbytes=PIECE, num_threads=2) as made:
        yield made


@pytest.fixture
def written(swap):
    """Space before it, so that offsets in the file are not those in the extent; and its data."""
    swap.allocate("before", 1)
    extent = swap.allocate("layers.3.w", N)
    swap.write(extent, data := drawn(N)).wait()
    return extent, data


def failing(number):
    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


def assert_fails(pending, offset, path, *words):
    with pytest.raises(OffloadError) as caught:
        pending.wait()
    assert (caught.value.offset, caught.value.path) == (offset, path)
    for word in (str(offset), path, *words):
        assert word in str(caught.value)
    assert pending.done
    with pytest.raises(OffloadError):
        pending.wait()


def target():
    return torch.empty(N, dtype=torch.uint8)


def test_the_error_is_one_of_zcomm():
    assert zcomm.OffloadError is OffloadError
    assert issubclass(OffloadError, zcomm.ZcommError)


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("place", [0, PIECE + 1, N - 1])
def test_a_flipped_bit(swap, written, place, bit):
    extent, data = written
    flip(swap, extent.offset + place, bit)
    piece = extent.offset + place // PIECE * PIECE
    assert_fails(swap.read(extent, target()), piece, swap.folder, "layers.3.w was damaged")
    flip(swap, extent.offset + place, bit)
    assert same(read_back(swap, extent, data), data)


def test_a_bit_that_flips_where_no_data_is_does_not_matter(swap, written):
    extent, data = written
    flip(swap, extent.offset + N)
    assert same(read_back(swap, extent, data), data)


def test_a_truncated_file(swap, written):
    extent, _ = written
    with outside(swap) as descriptor:
        os.ftruncate(descriptor, extent.offset + PIECE + 100)
    place = extent.offset + PIECE
    assert_fails(swap.read(extent, target()), place, swap.folder, "cannot read 8192", "only 100 of")


def test_a_write_that_was_lost_gives_no_stale_data(swap, written, monkeypatch):
    extent, _ = written
    monkeypatch.setattr(os, "pwritev", lambda _, parts, __: sum(map(len, parts)))
    swap.write(extent, drawn(N, seed=1)).wait()
    assert_fails(swap.read(extent, target()), extent.offset, swap.folder, "damaged")


def test_a_write_that_went_elsewhere(swap, written, monkeypatch):
    extent, _ = written
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: real(fd, parts, at + 4096))
    swap.write(extent, drawn(N, seed=1)).wait()
    assert_fails(swap.read(extent, target()), extent.offset, swap.folder, "damaged")


@pytest.mark.parametrize(("call", "verb"), [("preadv", "read"), ("pwritev", "write")])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESTALE], ids=errno.errorcode.get)
def test_an_error_of_the_system(swap, written, monkeypatch, call, verb, number):
    extent, data = written
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(number))
        pending = getattr(swap, verb)(extent, data.clone())
        assert_fails(
            pending, extent.offset, swap.folder, f"cannot {verb} 8192", os.strerror(number)
        )
    swap.write(extent, data).wait()
    assert same(read_back(swap, extent, data), data)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_system_that_moves_less_than_it_is_asked_is_asked_again(
    tmp_path, monkeypatch, call, direct
):
    if not direct:
        refuse_direct(monkeypatch)
    real, step = getattr(os, call), 4096 if direct else 1000

    def little(descriptor, parts, offset):
        first = memoryview(parts[0])
        return real(descriptor, [first[:step]], offset)

    with Swap(tmp_path, rank=0, buffer_nbytes=3 * PIECE) as swap:
        extent = swap.allocate("w", N)
        monkeypatch.setattr(os, call, little)
        for shift in (0, 1):
            data = swap.buffer(N + shift)[shift:].copy_(drawn(N, seed=shift))
            swap.write(extent, data).wait()
            assert same(read_back(swap, extent, data), data)


@pytest.mark.parametrize(("call", "verb"), [("preadv", "read"), ("pwritev", "write")])
@pytest.mark.parametrize("count", [0, 100])
def test_a_system_that_moves_nothing_or_parts_of_pages(
    swap, written, monkeypatch, call, verb, count
):
    extent, data = written
    monkeypatch.setattr(os, call, lambda *_: count)
    assert_fails(
        getattr(swap, verb)(extent, data), extent.offset, swap.folder, f"only {count} of 8192"
    )


def test_of_several_errors_the_first_piece_speaks_and_all_pieces_have_ended(
    swap, written, monkeypatch
):
    extent, _ = written
    for place in (2 * PIECE, PIECE):
        flip(swap, extent.offset + place)
    into = target()
    pending = swap.read(extent, into)
    assert_fails(pending, extent.offset + PIECE, swap.folder)
    into.zero_()
    assert not into.any()


def test_nothing_can_be_read_where_nothing_was_written(swap):
    extent = swap.allocate("w", 10)
    with pytest.raises(OffloadError, match=r"cannot read w at offset 0 .*nothing was written"):
        swap.read(extent, torch.empty(10, dtype=torch.uint8))


def test_nothing_can_be_read_after_a_write_that_failed(swap, written, monkeypatch):
    extent, data = written
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(errno.EIO))
        pending = swap.write(extent, data)
        with pytest.raises(OffloadError):
            pending.wait()
    with pytest.raises(OffloadError, match=r"its write failed: .*Input/output error") as caught:
        swap.read(extent, target())
    assert caught.value.offset == extent.offset


def test_an_error_that_nobody_waited_for_is_raised_by_check(swap, written, monkeypatch):
    extent, data = written
    swap.check()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(errno.EIO))
        swap.write(extent, data).settle()
    with pytest.raises(OffloadError, match="Input/output error"):
        swap.check()
    swap.check()


def test_an_error_that_nobody_waited_for_is_logged_at_the_end(swap, written, monkeypatch, caplog):
    extent, data = written
    monkeypatch.setattr(os, "pwritev", failing(errno.EIO))
    swap.write(extent, data)
    with caplog.at_level(logging.ERROR, "zcomm"):
        swap.close()
    assert "nobody waited for this: cannot write" in caplog.text


def test_errors_that_were_waited_for_are_not_said_again(swap, written, monkeypatch, caplog):
    extent, data = written
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(errno.EIO))
        with pytest.raises(OffloadError):
            swap.write(extent, data).wait()
    swap.check()
    swap.close()
    assert "nobody" not in caplog.text


def uses(swap, extent):
    """Everything that must notice a folder that is gone."""
    yield swap.check
    yield lambda: swap.allocate("more", 1)
    yield lambda: swap.write(extent, drawn(N)).wait()
    yield lambda: swap.read(extent, target()).wait()


@pytest.mark.parametrize("then", ["nothing", "another folder", "a file"])
def test_a_folder_that_is_deleted(tmp_path, then):
    folder = tmp_path / "disk"
    folder.mkdir()
    with Swap(folder, rank=0, buffer_nbytes=PIECE) as swap:
        extent = swap.allocate("w", N)
        swap.write(extent, drawn(N)).wait()
        shutil.rmtree(folder)
        if then == "another folder":
            folder.mkdir()
        elif then == "a file":
            folder.touch()
        words = "is gone while" if then == "nothing" else "is another folder than"
        for use in uses(swap, extent):
            swap.write(extent, drawn(N)).settle()
            with pytest.raises(OffloadError, match=f"{folder} {words}") as caught:
                use()
            assert caught.value.path == str(folder)


@NEEDS_ROOT
def test_a_disk_that_is_unmounted(tmp_path):
    with mounted(tmp_path / "disk", "size=1M") as folder, Swap(folder, rank=0) as swap:
        extent = swap.allocate("w", N)
        swap.write(extent, drawn(N)).wait()
        subprocess.run(["umount", "-l", folder], check=True)
        with pytest.raises(OffloadError, match="is another folder than"):
            swap.read(extent, target()).wait()


@NEEDS_ROOT
def test_a_full_disk_refuses_an_extent_and_goes_on_with_those_it_has(tmp_path):
    with mounted(tmp_path / "disk", "size=256k") as folder, Swap(folder, rank=0) as swap:
        extent = swap.allocate("w", 128 << 10)
        with pytest.raises(
            OffloadError, match=r"cannot reserve 200704 bytes at offset 131072 .*No space left"
        ) as caught:
            swap.allocate("too large", 196 << 10)
        assert (caught.value.path, caught.value.offset) == (str(folder), 128 << 10)
        small = swap.allocate("small", 128 << 10)
        for one in (extent, small):
            swap.write(one, data := drawn(128 << 10, seed=one.offset)).wait()
            assert same(read_back(swap, one, data), data)
        with pytest.raises(OffloadError, match="No space left"):
            swap.allocate("one more", 1)
        swap.free(small)
        swap.allocate("in its place", 100)


@NEEDS_ROOT
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL], ids=errno.errorcode.get)
def test_a_file_system_that_cannot_reserve_is_filled(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "posix_fallocate", failing(number))
    with (
        mounted(tmp_path / "disk", "size=256k") as folder,
        Swap(folder, rank=0, buffer_nbytes=PIECE) as swap,
    ):
        extent = swap.allocate("w", 5 * PIECE)
        with outside(swap) as descriptor:
            assert os.fstat(descriptor).st_blocks * 512 == 5 * PIECE
        with pytest.raises(OffloadError, match="No space left"):
            swap.allocate("too large", 220 << 10)
        swap.write(extent, data := drawn(5 * PIECE)).wait()
        assert same(read_back(swap, extent, data), data)
        swap.allocate("the rest", (256 << 10) - 5 * PIECE)


@NEEDS_ROOT
def test_a_disk_without_any_space(tmp_path):
    with mounted(tmp_path / "disk", "size=16k") as folder:
        (folder / "other").write_bytes(bytes(16 << 10))
        with Swap(folder, rank=0) as swap, pytest.raises(OffloadError, match="No space left"):
            swap.allocate("w", 1)


@pytest.mark.parametrize(
    ("name", "words"), [("missing", "No such file"), ("file", "Not a directory")]
)
def test_a_path_that_is_no_folder(tmp_path, name, words):
    (tmp_path / "file").touch()
    with pytest.raises(
        OffloadError, match=f"no swap file can be made in {tmp_path}/{name}: {words}"
    ):
        Swap(tmp_path / name, rank=0)


@NEEDS_ROOT
def test_a_disk_that_is_read_only(tmp_path):
    with (
        mounted(tmp_path / "disk", "ro") as folder,
        pytest.raises(OffloadError, match=r"no swap file can be made in .*Read-only"),
    ):
        Swap(folder, rank=0)
