"""Device memory over a transport that only knows host memory: through pinned buffers.

Out: copy to the host, wait for the copy, send. In: receive, copy to the device, go on. The host
waits for the first copies, in the thread that runs the operation (the worker, for ``async_op``);
it never waits for the second: a *buffer* is used again once the event after its copy has passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zcomm.device import (
    Device,
    DeviceMemory,
    Event,
    HostMemory,
    Memory,
    copy_to_host,
    device_of,
)
from zcomm.transports.base import HostTransport, Pending
from zcomm.transports.rounds import Rounds
from zcomm.transports.windows import Windows


class StagedTransport:
    """Any host transport, made to move the memory of any device too."""

    def __init__(self, inner: HostTransport) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.name = inner.name
        self.device: Device | None = None
        self._inner = inner
        self._buffers = _Buffers()
        self._lost: list[_Buffer] = []  # messages of an exchange that timed out may still arrive

    def exchange(
        self,
        sends: Mapping[int, Memory],
        recvs: Mapping[int, Memory],
        *,
        timeout: float | None = None,
        tag: int = 0,
    ) -> frozenset[int]:
        """See :class:`zcomm.transports.base.Transport`."""
        memories = [*sends.values(), *recvs.values()]
        device = device_of(*memories) if memories else None
        if device is None:
            return self._inner.exchange(_on_host(sends), _on_host(recvs), timeout=timeout, tag=tag)
        return self._staged(device, sends, recvs, timeout, tag)

    def _staged(
        self,
        device: Device,
        sends: Mapping[int, Memory],
        recvs: Mapping[int, Memory],
        timeout: float | None,
        tag: int,
    ) -> frozenset[int]:
        buffers = self._buffers
        outgoing: dict[
            tuple[int, int], _Buffer
        ] = {}  # one per memory: a broadcast sends one to many
        messages = {}
        for peer, memory in sends.items():
            assert isinstance(memory, DeviceMemory)
            key = memory.pointer, memory.size
            if key not in outgoing:
                outgoing[key] = buffers.take(device, memory.size)
                copy_to_host(outgoing[key].memory, memory)
            messages[peer] = outgoing[key].memory
        incoming = {peer: buffers.take(device, memory.size) for peer, memory in recvs.items()}
        if sends:
            device.synchronize()
        places = {peer: buffer.memory for peer, buffer in incoming.items()}
        late = self._inner.exchange(messages, places, timeout=timeout, tag=tag)
        if late:
            self._lost += [*outgoing.values(), *incoming.values()]
            return late
        for peer, memory in recvs.items():
            if memory.size:
                device.copy(memory, places[peer])
        buffers.give(outgoing.values(), None)
        buffers.give(incoming.values(), device.here().record())
        return late

    def send(self, sends: Mapping[int, HostMemory], tag: int) -> Pending:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._inner.send(sends, tag)

    def receive(self, recvs: Mapping[int, HostMemory], tag: int) -> Pending:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._inner.receive(recvs, tag)

    def cancel(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        self._inner.cancel()

    def poll(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        self._inner.poll()

    @property
    def windows(self) -> Windows | None:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._inner.windows

    def rounds(
        self,
        ranks: Sequence[int],
        me: int,
        table: Sequence[HostMemory],
        outbox: Sequence[HostMemory],
    ) -> Rounds:
        """See :class:`zcomm.transports.base.Transport`."""
        return self._inner.rounds(ranks, me, table, outbox)

    def abort(self, code: int) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        self._inner.abort(code)

    def close(self) -> None:
        """See :class:`zcomm.transports.base.Transport`."""
        self._buffers.clear()
        self._inner.close()


def _on_host(messages: Mapping[int, Memory]) -> dict[int, HostMemory]:
    return {peer: m for peer, m in messages.items() if not isinstance(m, DeviceMemory)}


@dataclass
class _Buffer:
    """Pinned memory for one message; used again ``after`` the copy out of it."""

    home: deque[_Buffer]
    whole: HostMemory
    memory: HostMemory
    after: Event | None = None


class _Buffers:
    """Pinned buffers of all devices, the longest idle first, at most a quarter too large."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, int], deque[_Buffer]] = {}

    def take(self, device: Device, nbytes: int) -> _Buffer:
        """Return a buffer that nothing reads or writes any more."""
        step = max(4096, 1 << max(nbytes.bit_length() - 3, 0))
        size = -(-nbytes // step) * step
        home = self._idle.setdefault((id(device), size), deque())
        if home and (home[0].after is None or home[0].after.done()):
            whole = home.popleft().whole
        else:
            whole = device.pinned(size)
        return _Buffer(home, whole, whole[:nbytes])

    def give(self, buffers: Iterable[_Buffer], after: Event | None) -> None:
        """Take back buffers whose last use is before an event."""
        for buffer in buffers:
            buffer.after = after
            buffer.home.append(buffer)

    def clear(self) -> None:
        """Release the buffers; the copies out of them must have ended."""
        for home in self._idle.values():
            for buffer in home:
                if buffer.after is not None:
                    buffer.after.synchronize()
        self._idle.clear()
