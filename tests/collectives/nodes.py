"""Pipelines in small: many pieces of small arrays, and nodes whose threads share memory."""

import time
from contextlib import contextmanager

import numpy as np

from zcomm import bootstrap, pieces
from zcomm.collectives import pipeline
from zcomm.collectives.courier import Posted
from zcomm.transports.local import Hub
from zcomm.transports.windows import Windows, window_nbytes


def cut_small(monkeypatch, nbytes=1):
    """Let pieces have as few elements as can be: 4096."""
    monkeypatch.setattr(pieces, "SMALLEST_NBYTES", nbytes)
    monkeypatch.setattr(pieces, "LARGEST_NBYTES", nbytes)
    monkeypatch.setattr(pieces, "LARGEST_INSIDE_NBYTES", nbytes)
    monkeypatch.setattr(pipeline, "SMALL_NBYTES", 0)


def uncut(monkeypatch):
    """Let every operation be one piece."""
    for name in ("SMALLEST_NBYTES", "LARGEST_NBYTES", "LARGEST_INSIDE_NBYTES"):
        monkeypatch.setattr(pieces, name, 1 << 60)


def share_memory(monkeypatch, topology, level=0):
    """Give the threads of every group of a level windows, as MPI gives to the ranks of a node."""

    class SharingHub(Hub):
        def __init__(self, size):
            super().__init__(size)
            for group in topology.levels[level].groups:
                if len(group) > 1:
                    nbytes = window_nbytes(len(group))
                    memories = [np.zeros(nbytes, np.uint8) for _ in group]
                    for index, rank in enumerate(group):
                        self.windows[rank] = Windows(memories, group, index)

    monkeypatch.setattr(bootstrap, "Hub", SharingHub)


@contextmanager
def slow(monkeypatch, rank, seconds=0.002):
    """Let one rank wait before each of its messages."""
    send = Posted.send

    def delayed(self, *arguments):
        if self._channel.rank == rank:
            time.sleep(seconds)
        send(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Posted, "send", delayed)
        yield
