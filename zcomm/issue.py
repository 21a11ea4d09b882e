"""How an operation of a communicator is issued: in which place, after what, before what.

Host arrays: the operation runs in its turn on the rank's stream. Device arrays: the same, and what
it enqueues comes after what the caller has enqueued, and before what the caller enqueues once the
call (or ``Work.wait``) has returned; the host waits for peers, never for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from zcomm.arguments import Item
from zcomm.arrays import View, on_device, view
from zcomm.collectives.channel import Channel
from zcomm.device import DeviceMemory, Memory, Operation, device_of
from zcomm.errors import OffloadError
from zcomm.guard import Guard
from zcomm.work import Stream, Work

T = TypeVar("T")


class Issuer:
    """Issues the operations of one communicator."""

    def __init__(self, stream: Stream, guard: Guard, channel: Channel) -> None:
        self._stream = stream
        self._guard = guard
        self._transport = channel.transport
        self._run = channel.health.run

    def issue(
        self,
        words: str,
        execute: Callable[[], None],
        items: Sequence[Item],
        result: Any,
        async_op: bool,
        inline: Callable[[], None] | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Any:
        """Run one operation: handshake, execution, delivery.

        ``ready``, where given, comes before, in the operation's turn. Where it raises OffloadError
        this rank sends nothing, and all ranks raise that.

        ``inline``, where given, is handshake and execution in one, for host memory and for device
        memory that goes through the host.

        Raises:
            TypeError: arrays of several places, or of a device that the transport does not serve.
        """
        operation = None
        memories = [memory for item in items for memory in item.memories]
        if any(isinstance(memory, DeviceMemory) for memory in memories):
            operation = self._operation(memories, [x for item in items for x in item.arrays])
        if operation is not None and self._transport.device is not None:
            # Host and device arrays travel by different ways here: ranks must not mix them.
            words, inline = f"{words} over {self._transport.name}", None
        elif operation is not None and self._transport.windows is not None:
            # Inside a node host arrays go through windows, device arrays do not.
            words = f"{words} on a device"

        def run() -> Any:
            if ready is not None:
                self._vouch(ready)
            if inline is not None:
                inline()
            else:
                self._guard.open(words)
                execute()
                self._guard.settle()
            for item in items:
                item.deliver()
            return result

        if async_op:
            join = None if operation is None else operation.join
            return self.submit(_placed(run, operation), join)
        return self._finish(run, operation)

    def _vouch(self, ready: Callable[[], None]) -> None:
        try:
            ready()
        except OffloadError as error:
            self._guard.refuse(error)
            raise

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run what communicates, in its turn, and return its result.

        Raises:
            ZcommError: an operation before it ended in its middle.
        """
        result: T = self._stream.call(self._run, function, *arguments)
        return result

    def submit(self, function: Callable[[], T], join: Callable[[], None] | None = None) -> Work[T]:
        """Queue what communicates; ``join`` is called when it is awaited."""
        return self._stream.submit(partial(self._run, function), join)

    def enqueue(self, function: Callable[[], None], arrays: Sequence[Any]) -> Work[None]:
        """Queue what does not communicate; ``arrays``, of one place, are what it works on."""
        views = [view(x) for x in arrays if on_device(x)]
        if not views:
            return self._stream.submit(function)
        operation = self._operation([x.memory for x in views], [x.array for x in views])
        return self._stream.submit(_placed(function, operation), operation.join)

    def alone(self, execute: Callable[[], None], x: View) -> None:
        """Run an operation that has no handshake, on one array."""
        is_away = isinstance(x.memory, DeviceMemory)
        self._finish(execute, self._operation([x.memory], [x.array]) if is_away else None)

    def together(self, execute: Callable[[], None], xs: Sequence[View]) -> None:
        """Run an operation whose handshake was made before, on arrays of one place."""
        operation = None
        if any(isinstance(x.memory, DeviceMemory) for x in xs):
            operation = self._operation([x.memory for x in xs], [x.array for x in xs])
        self._finish(execute, operation)

    def _finish(self, run: Callable[[], Any], operation: Operation | None) -> Any:
        result = self.call(_placed(run, operation))
        if operation is not None:
            operation.join()
        return result

    def _operation(self, memories: Sequence[Memory], arrays: Sequence[Any]) -> Operation:
        device = device_of(*memories)
        assert device is not None
        served = self._transport.device
        if served is not None and served is not device:
            raise TypeError(
                f"array on {device.name}: this rank communicates over {self._transport.name} from "
                f"{served.name}; possible are arrays of {served.name} and of the host"
            )
        return self._stream.lane(device).begin(arrays)


def _placed(run: Callable[[], Any], operation: Operation | None) -> Callable[[], Any]:
    if operation is None:
        return run

    def on_lane() -> Any:
        with operation.running():
            return run()

    return on_lane
