"""Single messages through a gloo group, beside those of a transport over the same group.

gloo tells only who waits that a message has arrived, and a wait that times out breaks the
connections of the group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from zcomm.errors import CollectiveTimeout
from zcomm.torch.messages import Message, Staged, to_receive, to_send
from zcomm.torch.works import NO_LIMIT

FIRST_TAG = 2**16
"""Tags below are the transport's."""


class GlooMessages:
    """The messages of a group, see ``Messages``."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, x: torch.Tensor, peer: int, tag: int, seconds: float) -> GlooMessage:
        """See :class:`zcomm.torch.messages.Messages`."""
        staged = to_send(x, peer, tag)
        nbytes = torch.from_numpy(staged.memory)
        return GlooMessage(staged, self._group.send([nbytes], peer, FIRST_TAG + tag), seconds)

    def receive(self, x: torch.Tensor, peer: int | None, tag: int, seconds: float) -> GlooMessage:
        """See :class:`zcomm.torch.messages.Messages`."""
        staged = to_receive(x, peer, tag)
        nbytes = torch.from_numpy(staged.memory)
        if peer is None:
            work = self._group.recv_anysource([nbytes], FIRST_TAG + tag)
        else:
            work = self._group.recv([nbytes], peer, FIRST_TAG + tag)
        return GlooMessage(staged, work, seconds)

    def close(self) -> None:
        """See :class:`zcomm.torch.messages.Messages`."""


class GlooMessage(Message):
    """One message of gloo; it holds its memory."""

    def __init__(self, staged: Staged, work: Any, seconds: float) -> None:
        super().__init__(staged, seconds)
        self._work = work

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the message has arrived, or the tensor that was sent may be written.

        Raises:
            CollectiveTimeout: not within ``timeout``, or that of the group.
            RuntimeError: what gloo says.
        """
        seconds = self._limit(timeout)
        if not self._done:
            self._end(lambda: self._finish(seconds))
        if self._error is not None:
            if "imed out" in str(self._error):
                raise CollectiveTimeout(f"{self._staged.words} has not ended within {seconds:g} s")
            raise self._error
        return True

    def _finish(self, seconds: float) -> None:
        self._work.wait(timedelta(seconds=seconds))
        self._staged.deliver()

    def source_rank(self) -> int:
        """Return the rank that the message came from."""
        return int(self._work._source_rank())

    _source_rank = source_rank
