"""One unnamed file: whole reads and writes at offsets, past the page cache where that works.

The file has no name from the start (``O_TMPFILE``), so that the kernel frees its blocks when the
process is gone, however it ended, and nobody else can change or remove it. It would go on working
after its folder was deleted or unmounted; ``check`` finds that out by the folder's inode.

*Direct* I/O (``O_DIRECT``) needs addresses, offsets and lengths that are multiples of
``ALIGNMENT``. Memory that starts elsewhere is copied through a *bounce* buffer of the thread; of
memory that ends elsewhere only the last page is. A reader must not assume durability: nothing is
fsynced, for what is here is worth nothing after the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable

from zcomm.errors import OffloadError
from zero.offload.memory import ALIGNMENT, Memory, mapped, rounded

_OURS = re.compile(r"\.zcomm-swap-[0-9a-f]{16}")
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR}
# The C library's stand-in writes single bytes, which direct I/O refuses with EINVAL.
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class SwapFile:
    """A file in a folder, for any thread. Its blocks are free when nobody refers to it any more.

    Attributes:
        folder: the absolute path of the folder.
        direct: whether the page cache is passed by.

    Args:
        directory: an existing folder.
        largest_nbytes: of a single read or write.

    Raises:
        OffloadError: no file can be made there.
    """

    def __init__(self, directory: str | os.PathLike[str], largest_nbytes: int) -> None:
        self.folder = os.path.abspath(os.fspath(directory))
        self._bounce_nbytes = rounded(largest_nbytes)
        self._local = threading.local()
        try:
            # Open, the folder keeps its inode number, which no later one can have.
            self._folder_descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            self._closers = [weakref.finalize(self, os.close, self._folder_descriptor)]
            self._folder_stat = os.fstat(self._folder_descriptor)
            self.descriptor, self.direct = _opened(self.folder)
            self._closers.append(weakref.finalize(self, os.close, self.descriptor))
        except OSError as error:
            raise OffloadError(
                f"no swap file can be made in {self.folder}: {error.strerror}", path=self.folder
            ) from error

    def close(self) -> None:
        """Give the disk space back; no thread is at it, nor will be. Again, it does nothing."""
        for closer in self._closers:
            closer()

    def check(self) -> None:
        """Make sure that the path still names the folder in which the file was made.

        Raises:
            OffloadError: it does not.
        """
        try:
            now = os.stat(self.folder)
        except OSError as error:
            raise OffloadError(
                f"{self.folder} is gone while its swap file is in use: {error.strerror};"
                " was it deleted or unmounted?",
                path=self.folder,
            ) from error
        if not os.path.samestat(now, self._folder_stat):
            raise OffloadError(
                f"{self.folder} is another folder than when its swap file was made;"
                " was it unmounted or replaced?",
                path=self.folder,
            )

    def reserve(self, start: int, nbytes: int) -> None:
        """Give a part of the file disk space.

        Raises:
            OffloadError: the disk is full, or a quota or the largest size of a file is reached.
        """
        try:
            try:
                os.posix_fallocate(self.descriptor, start, nbytes)
            except OSError as error:
                if error.errno not in _NO_FALLOCATE:
                    raise
                self._fill(start, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):  # blocks that a failed call left behind
                os.ftruncate(self.descriptor, start)
            raise self._failed("reserve", nbytes, start, error.strerror) from error

    def _fill(self, start: int, nbytes: int) -> None:
        """Take disk space where the system knows no other way: by writing zeros."""
        zeros = mapped(rounded(min(nbytes, self._bounce_nbytes)))
        done = 0
        while done < nbytes:
            count = os.pwritev(self.descriptor, [zeros[: nbytes - done].data], start + done)
            if count % ALIGNMENT:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += count

    def write(self, data: Memory, offset: int) -> None:
        """Write all of some memory.

        Raises:
            OffloadError: not all of it could be written.
        """
        body, rest = self._parts(data)
        rest[: len(data) - len(body)] = data[len(body) :]
        self._move("write", os.pwritev, (body, rest), len(data), offset)

    def read(self, into: Memory, offset: int) -> None:
        """Fill some memory.

        Raises:
            OffloadError: it could not be filled.
        """
        body, rest = self._parts(into)
        self._move("read", os.preadv, (body, rest), len(into), offset)
        into[len(body) :] = rest[: len(into) - len(body)]

    def _parts(self, memory: Memory) -> tuple[Memory, Memory]:
        """Return what of the memory can be used as it is, and bounce memory for the rest."""
        if not self.direct:
            return memory, memory[:0]
        aligned = memory.__array_interface__["data"][0] % ALIGNMENT == 0
        usable = len(memory) // ALIGNMENT * ALIGNMENT if aligned else 0
        if usable == len(memory):
            return memory, memory[:0]
        return memory[:usable], self._bounce()[: rounded(len(memory) - usable)]

    def _bounce(self) -> Memory:
        memory: Memory | None = getattr(self._local, "bounce", None)
        if memory is None:
            memory = self._local.bounce = mapped(self._bounce_nbytes)
        return memory

    def _move(
        self,
        verb: str,
        call: Callable[[int, list[memoryview], int], int],
        parts: tuple[Memory, Memory],
        nbytes: int,
        offset: int,
    ) -> None:
        wanted = sum(len(part) for part in parts)
        done = 0
        while done < wanted:
            try:
                count = call(self.descriptor, _from(parts, done), offset + done)
            except OSError as error:
                raise self._failed(verb, nbytes, offset, error.strerror) from error
            done += count
            # Past the end of a file, and on a full disk, the system moves less and calls it well.
            if count == 0 or (self.direct and done % ALIGNMENT):
                raise self._failed(verb, nbytes, offset, f"only {done} of {wanted} bytes came")

    def _failed(self, verb: str, nbytes: int, offset: int, why: str | None) -> OffloadError:
        return OffloadError(
            f"cannot {verb} {nbytes} bytes at offset {offset} of the swap file in {self.folder}:"
            f" {why}",
            path=self.folder,
            offset=offset,
        )


def _from(parts: tuple[Memory, Memory], done: int) -> list[memoryview]:
    """Return what is left of two parts after ``done`` bytes, without empty ones."""
    first, second = parts
    left = first[done:], second[max(done - len(first), 0) :]
    return [part.data for part in left if len(part)]


def _opened(folder: str) -> tuple[int, bool]:
    """Return a new unnamed file, and whether it takes direct I/O."""
    try:
        descriptor = _unnamed(folder, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _unnamed(folder, 0), False
    try:
        os.pwritev(descriptor, [mapped(ALIGNMENT).data], 0)
        os.ftruncate(descriptor, 0)
    except OSError as error:
        # Some file systems refuse only the transfer. What else is wrong shows when it matters.
        if error.errno == errno.EINVAL:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return descriptor, False
    return descriptor, True


def _unnamed(folder: str, flags: int) -> int:
    flags |= os.O_RDWR
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    _sweep(folder)
    path = os.path.join(folder, f".zcomm-swap-{secrets.token_hex(8)}")
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(FileNotFoundError):  # swept
        os.unlink(path)
    return descriptor


def _sweep(folder: str) -> None:
    """Remove the names of processes that were killed between making a file and unlinking it.

    Such a file is empty. One of a process that lives loses the name that it was about to remove.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another rank removed it
                if _OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_size == 0 and found.st_uid == os.geteuid():
                        os.unlink(entry.path)
