"""A stand-in for ``cupy.cuda.nccl``: it has its names and argument orders, and records every call.

It also moves the bytes, among fake devices of one process: a group becomes one task of its stream,
which sends first, then waits for what the peers send. It is not NCCL: no network, no kernels, and
it answers nothing about deadlocks or speed of the real one.
"""

import os
import threading
from queue import SimpleQueue

from tests.device import fake

NCCL_UINT8 = 1
SECONDS = 20


class NcclError(RuntimeError):
    pass


class Job:
    """What the ranks of one job share; ``module(rank)`` is what stands for ``cupy.cuda.nccl``."""

    def __init__(self):
        self.boxes = {}
        self.lock = threading.Lock()
        self.identities = []

    def box(self, source, target):
        with self.lock:
            return self.boxes.setdefault((source, target), SimpleQueue())

    def module(self):
        return Module(self)


class Module:
    """``calls`` holds (name, *arguments) in order."""

    NCCL_UINT8 = NCCL_UINT8
    NcclError = NcclError

    def __init__(self, job):
        self.job = job
        self.calls = []
        self.group = None
        self.failing = False

    def get_unique_id(self):
        self.job.identities.append(os.urandom(128))
        return self.job.identities[-1]

    def NcclCommunicator(self, ndev, commId, rank):
        assert isinstance(commId, bytes)
        assert commId == self.job.identities[0]
        self.calls.append(("NcclCommunicator", ndev, rank))
        return Communicator(self, rank)

    def groupStart(self):
        assert self.group is None
        self.calls.append(("groupStart",))
        self.group = []

    def groupEnd(self):
        self.calls.append(("groupEnd",))
        messages, self.group = self.group, None
        if not messages:
            return
        device = messages[0][0].device
        assert len({message[-1] for message in messages}) == 1
        stream = device.here()
        assert stream.pointer == messages[0][-1]
        device.enqueue(lambda: move(device, messages))


def move(device, messages):
    for comm, kind, address, count, peer, _ in sorted(messages, key=lambda m: m[1] != "send"):
        memory = device.at(address, count)
        if kind == "send":
            comm.job.box(comm.rank, peer).put(memory.copy())
        else:
            message = comm.job.box(peer, comm.rank).get(timeout=SECONDS)
            assert message.size == count
            memory[...] = message


class Communicator:
    def __init__(self, module, rank):
        self.module = module
        self.job = module.job
        self.rank = rank
        self.device = fake.mine()

    def send(self, sendbuf, count, datatype, peer, stream):
        self._record("send", sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._record("recv", recvbuf, count, datatype, peer, stream)

    def _record(self, kind, address, count, datatype, peer, stream):
        assert datatype == NCCL_UINT8
        assert count > 0
        self.module.calls.append((kind, address, count, datatype, peer, stream))
        self.module.group.append((self, kind, address, count, peer, stream))

    def check_async_error(self):
        self.module.calls.append(("check_async_error",))
        if self.module.failing:
            raise NcclError("NCCL_ERROR_REMOTE_ERROR: it was unplugged")

    def abort(self):
        self.module.calls.append(("abort",))

    def destroy(self):
        self.module.calls.append(("destroy",))
