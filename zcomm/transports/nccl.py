"""Ranks that are processes with a CUDA device each: device memory by NCCL, the rest by MPI.

One NCCL communicator for the whole job; groups of ranks are lists of its peers. Every message is a
run of bytes (``ncclUint8``) from and to raw addresses, all messages of an exchange are one NCCL
group, on the current stream: the call enqueues and returns. So a time limit does not apply to
device memory (the handshake before an operation has one, and goes by MPI); what went wrong on the
device shows at a later exchange.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zcomm.device import Device, DeviceStream, HostMemory, Memory, device_of
from zcomm.errors import PeerLost
from zcomm.transports.base import Pending, Transport
from zcomm.transports.rounds import Rounds
from zcomm.transports.windows import Windows

UNIQUE_ID_NBYTES = 128


def load_nccl() -> Any:
    """Return ``cupy.cuda.nccl``, or None where NCCL cannot be loaded.

    torch brings an NCCL of its own: where it was imported before, CuPy uses the same.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of a missing library; the caller says it
        try:
            from cupy.cuda import nccl
        except ImportError:
            return None
    return nccl if nccl.available else None


class NcclTransport:
    """Device memory over NCCL; host memory over ``control``, which also carries the unique id."""

    name = "nccl"

    def __init__(self, control: Transport, device: Device, nccl: Any) -> None:
        self.rank = control.rank
        self.size = control.size
        self.device: Device | None = device
        self._control = control
        self._nccl = nccl
        self._used: DeviceStream | None = None
        identity = self._identity()
        with device.using(device.here()):
            self._comm = nccl.NcclCommunicator(self.size, identity, self.rank)

    def _identity(self) -> bytes:
        """Return the unique id that rank 0 makes, the same bytes on all ranks."""
        if self.rank:
            received = np.empty(UNIQUE_ID_NBYTES, np.uint8)
            self._control.exchange({}, {0: received})
            return received.tobytes()
        identity: bytes = self._nccl.get_unique_id()
        message = np.frombuffer(identity, np.uint8)
        assert message.size == UNIQUE_ID_NBYTES
        self._control.exchange(dict.fromkeys(range(1, self.size), message), {})
        return identity

    def exchange(
        self,
        sends: Mapping[int, Memory],
        recvs: Mapping[int, Memory],
        *,
        timeout: float | None = None,
        tag: int = 0,
    ) -> frozenset[int]:
        """See :class:`zcomm.transports.base.Transport`.

        Raises:
            PeerLost: NCCL reports that something went wrong, here or at an earlier exchange.
        """
        memories = [*sends.values(), *recvs.values()]
        device = device_of(*memories) if memories else None
        if device is None:
            return self._control.exchange(sends, recvs, timeout=timeout, tag=tag)
        assert device is self.device
        try:
            self._enqueue(sends, recvs, device.here())
            self._comm.check_async_error()
        except self._nccl.NcclError as error:
            raise PeerLost(f"NCCL failed on rank {self.rank} of {self.size}: {error}") from error
        return frozenset()

    def _enqueue(
        self, sends: Mapping[int, Memory], recvs: Mapping[int, Memory], stream: DeviceStream
    ) -> None:
        nccl, comm, self._used = self._nccl, self._comm, stream
        nccl.groupStart()
        try:
            for call, messages in ((comm.send, sends), (comm.recv, recvs)):
                for peer, memory in messages.items():
                    if memory.size:
                        address = _address(memory)
                        call(address, memory.size, nccl.NCCL_UINT8, peer, stream.pointer)
        finally:
            nccl.groupEnd()

    def send(self, sends: Mapping[int, HostMemory], tag: int) -> Pending:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._control.send(sends, tag)

    def receive(self, recvs: Mapping[int, HostMemory], tag: int) -> Pending:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._control.receive(recvs, tag)

    def cancel(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        self._control.cancel()

    def poll(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        self._control.poll()

    @property
    def windows(self) -> Windows | None:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._control.windows

    def rounds(
        self,
        ranks: Sequence[int],
        me: int,
        table: Sequence[HostMemory],
        outbox: Sequence[HostMemory],
    ) -> Rounds:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._control.rounds(ranks, me, table, outbox)

    def abort(self, code: int) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        self._comm.abort()
        self._control.abort(code)

    def close(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        if self._used is not None:
            self._used.record().synchronize()
        self._comm.destroy()
        self._control.close()


def _address(memory: Memory) -> int:
    assert not isinstance(memory, np.ndarray)
    return memory.pointer
