"""Single messages between two ranks of a group: beside the collectives, never behind them.

A message is started at once, in the caller's thread: two ranks may send to each other before either
receives. Its memory is left alone until its work is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from zcomm import leaving
from zcomm.torch.works import NO_LIMIT


class Messages(Protocol):
    """The messages of one group."""

    def send(self, x: torch.Tensor, peer: int, tag: int, seconds: float) -> dist.Work:
        """Start sending a tensor; ``wait`` gives up after so many seconds."""

    def receive(self, x: torch.Tensor, peer: int | None, tag: int, seconds: float) -> dist.Work:
        """Start receiving into a tensor from one rank, or from any."""

    def close(self) -> None:
        """Give up what was started and has not ended."""


class Staged(NamedTuple):
    """A contiguous CPU tensor for one of any place and strides; ``target`` gets what arrives."""

    tensor: torch.Tensor
    words: str
    target: torch.Tensor | None = None

    @property
    def memory(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of the tensor."""
        flat = torch.as_strided(self.tensor, (self.tensor.numel(),), (1,))
        return flat.view(torch.uint8).numpy()

    def deliver(self) -> None:
        """Copy what arrived to where it belongs, unless it is there."""
        if self.target is not None and self.target.data_ptr() != self.tensor.data_ptr():
            self.target.detach().copy_(self.tensor)


def to_send(x: torch.Tensor, peer: int, tag: int) -> Staged:
    """Return what is sent of a tensor."""
    staged = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return Staged(staged, f"send of {_described(x)} to rank {peer}, tag {tag}")


def to_receive(x: torch.Tensor, peer: int | None, tag: int) -> Staged:
    """Return where a message for a tensor arrives."""
    origin = "any rank" if peer is None else f"rank {peer}"
    direct = x.device.type == "cpu" and x.is_contiguous()
    staged = x.detach() if direct else torch.empty(x.shape, dtype=x.dtype, device="cpu")
    return Staged(staged, f"recv of {_described(x)} from {origin}, tag {tag}", x)


def _described(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


class Message(dist.Work):
    """One message on its way; how one waits for it is the transport's."""

    def __init__(self, staged: Staged, seconds: float) -> None:
        super().__init__()
        self._staged = staged
        self._seconds = seconds
        self._done = False
        self._error: BaseException | None = None
        self._future: Any = None

    def _end(self, act: Callable[[], Any]) -> None:
        """Note that the message has ended, and well unless ``act`` raises."""
        try:
            act()
        except Exception as error:
            self._fail(error)
        self._done = True

    def _fail(self, error: object) -> None:
        """Note that the message has ended badly."""
        self._error = RuntimeError(f"{self._staged.words}: {error}")
        self._done = True

    def _limit(self, timeout: timedelta | None) -> float:
        if timeout is None or timeout <= NO_LIMIT:
            return self._seconds
        return timeout.total_seconds()

    def is_completed(self) -> bool:
        """Tell whether the message has ended, well or not."""
        return self._done

    def is_success(self) -> bool:
        """Tell whether the message has arrived."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return what was received."""
        return [] if self._staged.target is None else [self._staged.target]

    def synchronize(self) -> None:
        """Wait, as ``wait`` does."""
        self.wait()

    def get_future(self) -> Any:
        """Return a future of the list of what was received; a thread waits for the message."""
        if self._future is None:
            self._future = torch.futures.Future()
            waiting = _Waiting(target=self._fulfil, name="zcomm-message", daemon=True)
            waiting.start()
            leaving.after(leaving.MESSAGES, waiting)
        return self._future

    def _fulfil(self) -> None:
        try:
            self.wait()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self.result())


class _Waiting(threading.Thread):
    """Waits for a message in place of those who asked for its future."""

    def stop(self, seconds: float | None = None) -> None:
        """See :class:`zcomm.leaving.Stoppable`."""
        self.join(seconds)
