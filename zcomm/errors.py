"""Errors that zcomm raises.

Wrong arguments are ``ValueError`` or ``TypeError``; these are for the rest.
"""

from topology.errors import TopologyError, ZcommError


class CollectiveMismatch(ZcommError):  # noqa: N818
    """Ranks called different operations, or the same one with different arguments.

    Nothing else was sent: all ranks may go on.
    """

    resumable = True


class CollectiveTimeout(ZcommError):  # noqa: N818
    """A rank did not arrive at an operation within ``ZCOMM_TIMEOUT`` seconds.

    ``resumable``: the own part was sent with the handshake, so that the late rank's call still
    ends, and others may follow. Otherwise no communicator of the job can be used any more.
    """

    def __init__(self, text: str, *, resumable: bool = False) -> None:
        super().__init__(text)
        self.resumable = resumable


class PeerLost(ZcommError):  # noqa: N818
    """Another rank failed or left while this one was waiting for it."""


class CodecError(ZcommError, ValueError):
    """A codec text that cannot be read, or wire bytes that are not what the codec wrote."""


class CheckpointError(ZcommError):
    """A checkpoint that is damaged, incomplete, or of another model."""


class OffloadError(ZcommError):
    """Model states on a disk cannot be written, or do not come back as they were written.

    Attributes:
        path: the folder or file.
        offset: in the file, in bytes; None where no place in it is meant.
        resumable: whether all ranks raised it in the same place, and may go on to communicate.
    """

    resumable = False

    def __init__(self, text: str, *, path: str = "", offset: int | None = None) -> None:
        super().__init__(text)
        self.path = path
        self.offset = offset


__all__ = [
    "CheckpointError",
    "CodecError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "OffloadError",
    "PeerLost",
    "TopologyError",
    "ZcommError",
]
