"""Errors that zcomm raises.

Wrong arguments are ``ValueError`` or ``TypeError``; these are for the rest.
"""

from topology.errors import TopologyError, ZcommError


class CollectiveMismatch(ZcommError):
    """Ranks called different operations, or the same one with different arguments."""


class CollectiveTimeout(ZcommError):
    """A rank did not arrive at an operation within ``ZCOMM_TIMEOUT`` seconds."""


class PeerLost(ZcommError):
    """Another rank failed or left while this one was waiting for it."""


class CodecError(ZcommError, ValueError):
    """A codec text that cannot be read, or wire bytes that are not what the codec wrote."""


class CheckpointError(ZcommError):
    """A checkpoint that is incomplete, damaged or of another model."""


class OffloadError(ZcommError):
    """A swapped block that could not be written, or read back as it was written."""


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
