"""The root of the error family, and the one error of this package.

``ZcommError`` lives here because ``topology`` is the lowest layer and imports nothing of the
others; users meet both names as ``zcomm.errors.ZcommError`` and ``zcomm.errors.TopologyError``.
"""


class ZcommError(RuntimeError):
    """Base class of every error that is zcomm's own."""


class TopologyError(ZcommError, ValueError):
    """A topology that cannot be read, does not describe this job, or cannot answer a question."""
