"""Tensors on a disk come back as they were; the oracle is the tensor itself."""

import os
import subprocess
import threading

import pytest
import torch

from tests.zero.offload.disk import PIECE, drawn, outside, read_back, refuse_direct, same
from zero.offload import OffloadError, Swap
from zero.offload.memory import ALIGNMENT

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
# Case O3: 1, 511, 513 elements, three times the buffer; and the edges of pages and pieces.
NUMELS = [0, 1, 511, 513, 1024, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5]


@pytest.fixture(params=["direct", "buffered"])
def swap(request, tmp_path, monkeypatch):
    if request.param == "buffered":
        refuse_direct(monkeypatch)
    with Swap(tmp_path, rank=0, buffer_nbytes=PIECE) as made:
        assert made.direct == (request.param == "direct")
        yield made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(swap, dtype):
    for numel in NUMELS:
        data = drawn(numel, dtype)
        extent = swap.allocate("w", data.nbytes)
        swap.write(extent, data).wait()
        assert same(read_back(swap, extent, data), data), numel


@pytest.mark.parametrize("shift", [0, 1, 64, ALIGNMENT])
def test_memory_that_starts_anywhere_and_nothing_beside_it_changes(swap, shift):
    for numel in NUMELS:
        source, target = swap.buffer(numel + 2 * ALIGNMENT), swap.buffer(numel + 2 * ALIGNMENT)
        source.copy_(drawn(len(source)))
        target.fill_(7)
        extent = swap.allocate("w", numel)
        swap.write(extent, source[shift : shift + numel]).wait()
        swap.read(extent, target[shift : shift + numel]).wait()
        assert same(target[shift : shift + numel], source[shift : shift + numel]), numel
        assert bool((target[:shift] == 7).all()), numel
        assert bool((target[shift + numel :] == 7).all()), numel


def test_shapes_do_not_matter_and_gradients_do_not_either(swap):
    data = drawn(12, torch.float32).reshape(3, 4).requires_grad_()
    extent = swap.allocate("w", 48)
    swap.write(extent, data).wait()
    into = torch.empty(2, 6)
    swap.read(extent, into).wait()
    assert same(into, data.detach())
    scalar = torch.tensor(2.5)
    swap.write(extent, scalar).wait()
    swap.read(extent, read := torch.tensor(0.0)).wait()
    assert read == 2.5


def test_neighbours_keep_what_they_hold(swap):
    tensors = [drawn(n, seed=n) for n in (1, 4095, 4096, 4097, 3 * PIECE + 1)]
    extents = [swap.allocate(str(i), t.nbytes) for i, t in enumerate(tensors)]
    for i in (4, 0, 2, 3, 1, 2, 0):
        swap.write(extents[i], tensors[i]).wait()
    for extent, tensor in zip(extents, tensors, strict=True):
        assert same(read_back(swap, extent, tensor), tensor)


def test_operations_on_one_extent_take_effect_in_the_order_of_the_calls(swap):
    old, new = drawn(3 * PIECE, seed=1), drawn(3 * PIECE, seed=2)
    extent = swap.allocate("w", old.nbytes)
    first, second = torch.empty_like(old), torch.empty_like(old)
    pending = [
        swap.write(extent, drawn(3 * PIECE, seed=3)),
        swap.write(extent, old),
        swap.read(extent, first),
        swap.write(extent, new),
        swap.read(extent, second),
    ]
    for one in pending:
        one.wait()
    assert same(first, old)
    assert same(second, new)


def test_less_than_the_extent_holds_can_be_written_and_is_what_is_read(swap):
    extent = swap.allocate("w", 1000)
    swap.write(extent, drawn(1000)).wait()
    swap.write(extent, part := drawn(10, seed=1)).wait()
    assert same(read_back(swap, extent, part), part)
    with pytest.raises(ValueError, match="1000 bytes to read w into, which has 10"):
        swap.read(extent, torch.empty(1000, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(101, dtype=torch.uint8), "101 bytes for w, whose extent has 100"),
        (torch.zeros(10, 2, dtype=torch.uint8).T, r"strides \(1, 2\)"),
        (torch.zeros(1, device="meta"), "meta"),
    ],
)
def test_tensors_that_cannot_be_written(swap, tensor, text):
    extent = swap.allocate("w", 100)
    with pytest.raises(ValueError, match=text):
        swap.write(extent, tensor)


def test_freed_space_is_used_again_and_the_extent_no_more(swap):
    extent = swap.allocate("w", 5 * ALIGNMENT)
    kept = swap.allocate("kept", ALIGNMENT)
    reserved = swap.stats.reserved_nbytes
    swap.write(extent, drawn(5 * ALIGNMENT))
    swap.free(extent)
    assert swap.stats.used_nbytes == ALIGNMENT
    again = swap.allocate("again", 4 * ALIGNMENT - 1)
    assert (again.offset, again.capacity) == (extent.offset, 4 * ALIGNMENT)
    assert swap.stats.reserved_nbytes == reserved
    byte = torch.zeros(1, dtype=torch.uint8)
    for use in (swap.free, lambda e: swap.read(e, byte), lambda e: swap.write(e, byte)):
        with pytest.raises(ValueError, match="w is no extent of this swap, or was freed"):
            use(extent)
    swap.free(kept)
    with pytest.raises(OffloadError, match=r"again .* nothing was written"):
        swap.read(again, torch.empty(4 * ALIGNMENT - 1, dtype=torch.uint8))


def test_stats_count_bytes_of_tensors_and_space_on_the_disk(swap):
    extent = swap.allocate("w", PIECE + 1)
    for _ in range(2):
        swap.write(extent, drawn(PIECE + 1)).wait()
    swap.read(extent, torch.empty(PIECE + 1, dtype=torch.uint8)).wait()
    stats = swap.stats
    assert (stats.written_nbytes, stats.read_nbytes) == (2 * (PIECE + 1), PIECE + 1)
    assert stats.used_nbytes == PIECE + ALIGNMENT <= stats.reserved_nbytes
    assert stats.write_seconds > 0
    assert stats.read_seconds > 0
    with outside(swap) as descriptor:
        found = os.fstat(descriptor)
    assert found.st_size == stats.reserved_nbytes == 512 * found.st_blocks


def test_the_page_cache_is_passed_by_exactly_where_the_swap_says_so(swap):
    extent = swap.allocate("w", 3 * PIECE)
    swap.write(extent, drawn(3 * PIECE)).wait()
    swap.read(extent, torch.empty(3 * PIECE, dtype=torch.uint8)).wait()
    with outside(swap) as descriptor:
        try:
            os.preadv(descriptor, [bytearray(1)], extent.offset, os.RWF_NOWAIT)
            cached = True
        except BlockingIOError:
            cached = False
        except OSError:
            pytest.skip("this file system does not tell what is in the page cache")
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", swap.folder], capture_output=True, text=True, check=True
    )
    if kind.stdout.strip() == "tmpfs":
        pytest.skip("tmpfs is the page cache")
    assert cached != swap.direct


def test_write_returns_before_the_disk_has_it(swap, monkeypatch):
    may_go, real = threading.Event(), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: may_go.wait(60) and real(*args))
    extent = swap.allocate("w", 3 * PIECE)
    pending = swap.write(extent, data := drawn(3 * PIECE))
    assert not pending.done
    may_go.set()
    pending.wait()
    assert pending.done
    assert swap.stats.wait_seconds > 0
    assert same(read_back(swap, extent, data), data)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_pieces_of_one_tensor_are_in_flight_at_once(tmp_path, monkeypatch, call):
    with Swap(tmp_path, rank=0, buffer_nbytes=PIECE, num_threads=3) as swap:
        extent = swap.allocate("w", 6 * PIECE)
        swap.write(extent, data := drawn(6 * PIECE)).wait()
        together, real = threading.Barrier(3), getattr(os, call)

        def meeting(*args):
            together.wait(60)  # breaks, and the operation fails, where fewer than three come
            return real(*args)

        monkeypatch.setattr(os, call, meeting)
        swap.write(extent, data).wait()
        assert same(read_back(swap, extent, data), data)


def test_threads_of_a_program_may_share_a_swap(swap):
    wrong = []

    def use(seed):
        data = drawn(2 * PIECE + seed, seed=seed)
        for _ in range(5):
            extent = swap.allocate(str(seed), data.nbytes)
            swap.write(extent, data).wait()
            wrong.extend([] if same(read_back(swap, extent, data), data) else [seed])
            swap.free(extent)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert swap.stats.used_nbytes == 0


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (-1, 1)])
def test_sizes_that_are_none(tmp_path, numbers):
    with pytest.raises(ValueError, match=f"buffer_nbytes={numbers[0]}, num_threads={numbers[1]}"):
        Swap(tmp_path, rank=0, buffer_nbytes=numbers[0], num_threads=numbers[1])
    with Swap(tmp_path, rank=0) as swap, pytest.raises(ValueError, match="-1 bytes"):
        swap.allocate("w", -1)
