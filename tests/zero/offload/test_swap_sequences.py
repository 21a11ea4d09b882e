"""Any sequence of allocations, writes, reads and frees; the oracle is a dict of bytes."""

import itertools
import tempfile

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.zero.offload.disk import PIECE, drawn, same
from zero.offload import OffloadError, Swap
from zero.offload.memory import rounded

EDGES = st.sampled_from([0, 1, 511, 512, 513, 4095, 4096, 4097, PIECE, 3 * PIECE, 3 * PIECE + 1])
SIZES = st.one_of(EDGES, st.integers(0, 4 * PIECE))


class Sequences(RuleBasedStateMachine):
    """Operations are started and waited for in any order; data comes from any address."""

    extents = Bundle("extents")

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.swap = Swap(self.folder.name, rank=0, buffer_nbytes=PIECE, num_threads=2)
        self.held = {}
        self.started = []

    def teardown(self):
        self.end_all()
        for extent, data in self.held.items():
            if data is not None:
                self.swap.read(extent, into := torch.empty_like(data)).wait()
                assert same(into, data)
        self.swap.close()
        self.folder.cleanup()

    @rule(target=extents, nbytes=SIZES)
    def allocate(self, nbytes):
        extent = self.swap.allocate(f"of {nbytes}", nbytes)
        assert extent.nbytes == nbytes
        assert extent.capacity == rounded(nbytes)
        self.held[extent] = None
        return extent

    @rule(extent=extents, part=st.floats(0, 1), seed=st.integers(0, 9), shift=st.integers(0, 3))
    def write(self, extent, part, seed, shift):
        nbytes = int(part * extent.nbytes)
        buffer = self.swap.buffer(nbytes + shift)
        data = buffer[shift:].copy_(drawn(nbytes, seed=seed))
        self.held[extent] = data.clone()
        self.started.append((self.swap.write(extent, data), buffer, None, None))

    @rule(extent=extents, shift=st.integers(0, 3))
    def read(self, extent, shift):
        data = self.held[extent]
        if data is None:
            with pytest.raises(OffloadError, match="nothing was written"):
                self.swap.read(extent, torch.empty(extent.nbytes, dtype=torch.uint8))
            return
        buffer = self.swap.buffer(len(data) + shift)
        pending = self.swap.read(extent, buffer[shift:])
        self.started.append((pending, buffer, buffer[shift:], data))

    @rule()
    def end_all(self):
        for pending, buffer, into, data in self.started:
            pending.wait()
            assert into is None or same(into, data)
            self.swap.give_back(buffer)
        self.started.clear()

    @rule(extent=consumes(extents))
    def free(self, extent):
        self.swap.free(extent)
        del self.held[extent]

    @invariant()
    def extents_have_space_of_their_own(self):
        parts = sorted((e.offset, e.offset + e.capacity) for e in self.held if e.capacity)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(parts))
        assert self.swap.stats.used_nbytes == sum(e.capacity for e in self.held)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
