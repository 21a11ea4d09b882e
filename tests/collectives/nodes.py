"""Pipelines in small: many pieces of small arrays, and nodes whose threads share memory."""

import os
import time
from contextlib import contextmanager

import numpy as np

from zcomm import bootstrap, pieces
from zcomm.collectives import pipeline
from zcomm.collectives.courier import Posted
from zcomm.transports.local import Hub
from zcomm.transports.remote import RemoteMemory
from zcomm.transports.windows import Windows, window_nbytes


def cut_small(monkeypatch, nbytes=1):
    """Let pieces have as few elements as can be: 4096."""
    monkeypatch.setattr(pieces, "SMALLEST_NBYTES", nbytes)
    monkeypatch.setattr(pieces, "LARGEST_NBYTES", nbytes)
    monkeypatch.setattr(pieces, "USUAL_NBYTES", nbytes)
    monkeypatch.setattr(pipeline, "SMALL_NBYTES", 0)


def uncut(monkeypatch):
    """Let every operation be one piece."""
    for name in ("SMALLEST_NBYTES", "LARGEST_NBYTES", "USUAL_NBYTES"):
        monkeypatch.setattr(pieces, name, 1 << 60)


def share_memory(monkeypatch, topology, level=0, remote=None):
    """Give the threads of every group of a level windows, as MPI gives to the ranks of a node.

    ``remote``, of a group and one of its ranks, makes what reads the memory of these ranks.
    """

    class SharingHub(Hub):
        def __init__(self, size):
            super().__init__(size)
            for group in topology.levels[level].groups:
                if len(group) > 1:
                    nbytes = window_nbytes(len(group))
                    memories = [np.zeros(nbytes, np.uint8) for _ in group]
                    for index, rank in enumerate(group):
                        self.windows[rank] = Windows(memories, group, index)
                        if remote is not None:
                            self.windows[rank].remote = remote(group, rank)

    monkeypatch.setattr(bootstrap, "Hub", SharingHub)


class Uses:
    """Which operations a module executed, and which it left to others."""

    def __init__(self, monkeypatch, module):
        self._done = []
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            monkeypatch.setattr(module, name, self._watched(name, getattr(module, name)))

    def _watched(self, name, function):
        def call(*arguments):
            used = function(*arguments)
            self._done.append((name, used))
            return used

        return call

    def take(self):
        """Return what happened since the last call: (operation, whether it was executed)."""
        done, self._done = self._done, []
        return done


def use_small(monkeypatch, module, nbytes=1, block=20000):
    """Let arrays of any size be read, in small blocks; tell what was."""
    monkeypatch.setattr(module, "SMALLEST_NBYTES", nbytes)
    monkeypatch.setattr(module, "BLOCK_NBYTES", block)
    return Uses(monkeypatch, module)


def own_process(group, rank):
    """Return what reads the memory of ranks that are threads of this process."""
    return RemoteMemory(dict.fromkeys(group, os.getpid()), always=True)


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
