"""What tests of the disk share: a swap's file from outside, small file systems, data."""

import contextlib
import errno
import os
import subprocess

import pytest
import torch

PIECE = 8192
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which needs root")


@contextlib.contextmanager
def outside(swap):
    """A descriptor of the swap's file that goes through the page cache, as any other process's."""
    descriptor = os.open(f"/proc/self/fd/{swap._file.descriptor}", os.O_RDWR)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flip(swap, offset, bit=0):
    """Change one bit of the swap's file."""
    with outside(swap) as descriptor:
        (byte,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte ^ 1 << bit]), offset)


def refuse_direct(monkeypatch):
    """Make the system refuse O_DIRECT, as some file systems do."""
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)


@contextlib.contextmanager
def mounted(folder, *options):
    """A tmpfs of a given size under a folder, which may be gone at the end."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", folder]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")  # a container's root may not
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False, capture_output=True)


def drawn(numel, dtype=torch.uint8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data % 2 == 1 if dtype == torch.bool else data.view(dtype)


def same(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def read_back(swap, extent, like):
    """What the extent holds, in new memory."""
    swap.read(extent, into := torch.empty_like(like)).wait()
    return into
