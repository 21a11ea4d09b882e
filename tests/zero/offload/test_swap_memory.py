"""Buffers for the disk, and the parts of a file: what is lent never overlaps."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero.offload.memory import ALIGNMENT, BufferPool, rounded
from zero.offload.space import Space

SIZES = st.integers(0, 3 * ALIGNMENT)


@pytest.mark.parametrize("nbytes", [0, 1, ALIGNMENT, ALIGNMENT + 1, 3 << 20])
def test_a_buffer_starts_at_a_page_and_has_whole_pages(nbytes):
    pool = BufferPool()
    buffer = pool.take(nbytes)
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (nbytes,))
    assert buffer.untyped_storage().data_ptr() % ALIGNMENT == 0
    assert buffer.untyped_storage().nbytes() >= rounded(nbytes)
    assert pool.lent_nbytes == max(rounded(nbytes), ALIGNMENT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_buffer_is_pinned_where_there_is_a_gpu():
    assert BufferPool().take(5000).is_pinned()


def test_memory_given_back_is_lent_again_and_never_more_is_kept_than_was_lent():
    pool = BufferPool()
    one, two = pool.take(5000), pool.take(5000)
    address = one.data_ptr()
    pool.give(one[:17])
    assert pool.take(8000).data_ptr() == address
    pool.give(two)
    assert pool.peak_nbytes == pool.lent_nbytes + pool.free_nbytes == 4 * ALIGNMENT
    pool.take(3 * ALIGNMENT)
    assert (pool.lent_nbytes, pool.free_nbytes) == (5 * ALIGNMENT, 0)


def test_what_is_not_lent_cannot_be_given_back():
    pool = BufferPool()
    buffer = pool.take(10)
    for wrong in (torch.empty(10, dtype=torch.uint8), BufferPool().take(10)):
        with pytest.raises(ValueError, match="10 bytes that is none of the 1 buffers"):
            pool.give(wrong)
    pool.give(buffer)
    with pytest.raises(ValueError, match="none of the 0 buffers"):
        pool.give(buffer)


def test_a_buffer_made_in_inference_mode_can_be_used_outside():
    with torch.inference_mode():
        buffer = BufferPool().take(8)
    buffer.view(torch.float32).add_(torch.ones(2, requires_grad=True).detach())


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100), st.integers(1, 9)), max_size=60))
def test_parts_never_overlap_and_space_that_was_freed_is_one_hole_again(steps):
    """The oracle is a map of the file with a byte for each unit."""
    space, used, parts = Space(), np.zeros(0, bool), []
    for taking, choice, length in steps:
        if taking or not parts:
            start = space.take(length)
            holes = "".join("x" if byte else "." for byte in used).split("x")
            assert (start is None) == (max(map(len, holes)) < length)
            if start is None:
                start = space.grow(length)
                assert start == len(used)
                used = np.append(used, np.zeros(length, bool))
            else:
                assert length + start <= len(used)
            assert not used[start : start + length].any()
            used[start : start + length] = True
            parts.append((start, length))
        else:
            start, length = parts.pop(choice % len(parts))
            space.give(start, length)
            used[start : start + length] = False
        assert (space.end, space.free) == (len(used), int((~used).sum()))
    for start, length in parts:
        space.give(start, length)
    if space.end:
        assert space.take(space.end) == 0
