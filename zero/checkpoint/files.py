"""Files that are whole or not there: written beside their name, fsynced, renamed, and checked.

A folder with a checkpoint holds ``index.json`` and one folder of data, which the index names. A
save writes a new folder of data and replaces the index last, in one rename: a save that is killed
leaves the index and the data of the one before.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zcomm.errors import CheckpointError
from zero.checkpoint.deferred import Deferred, in_turn, loaded

INDEX = "index.json"
_CHUNK_NBYTES = 1 << 22
# What safetensors calls dtypes; as its own writer does.
_SAFE_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Folders of data by the names that saves give; a user's own folders beside them are left alone.
_OURS = re.compile(r"(\.tmp|data)-[0-9a-f]{16}")


def sync_directory(path: Path) -> None:
    """Make names that were made, renamed or removed in a folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, *, last: bool = False) -> None:
    """Write a file that is whole under its name, or not there.

    ``last``: another process may rename or remove the folder as soon as the file is there, so that
    nothing is done in it after; the file need not survive a power failure.
    """
    beside = path.with_name(f"{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if not last:
            os.fsync(file.fileno())
    beside.replace(path)
    if not last:
        sync_directory(path.parent)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor | Deferred],
    metadata: dict[str, str] | None = None,
) -> str:
    """Write a safetensors file, whole under its name or not there; return its checksum.

    Of deferred tensors one source is in memory at a time. The checksum is made while the disk
    writes: each of the two takes about as long as the other.
    """
    beside = path.with_name(f"{path.name}.tmp")
    now = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    if len(now) == len(tensors):
        save_file(now, beside, metadata)
    else:
        _stream(beside, tensors, metadata)
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(_sync_file, beside)
        digest = checksum(beside)
        synced.result()
    beside.replace(path)
    sync_directory(path.parent)
    return digest


def _stream(
    path: Path, tensors: Mapping[str, Tensor | Deferred], metadata: dict[str, str] | None
) -> None:
    """Write the format of safetensors tensor by tensor: its own writer needs all at once.

    Eight bytes, little-endian, say how long the header is, a JSON object with dtype, shape and
    place of every tensor; data follow without gaps, and begin at a multiple of 8.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    place = 0
    for name in in_turn(tensors):
        tensor = tensors[name]
        end = place + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {
            "dtype": _SAFE_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in loaded(tensors):
            data = tensor.contiguous().reshape(-1).view(torch.uint8)
            file.write(data.numpy().data)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def checksum(path: Path) -> str:
    """Return the BLAKE2b digest of a file, 128 bits in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_NBYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_index(path: Path, content: Mapping[str, Any]) -> None:
    """Write an index with its own checksum."""
    text = json.dumps(content)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    write_text(path, f'{{"checksum": "{digest}",\n"content": {text}}}\n')


def read_index(path: Path) -> dict[str, Any]:
    """Return the content of an index.

    Raises:
        CheckpointError: no index, or one that is not as it was written.
    """
    if not path.is_file():
        if any(path.parent.glob(".tmp-*")):
            raise CheckpointError(f"{path} is missing: the first save to {path.parent} did not end")
        raise CheckpointError(f"{path} is missing: {path.parent} is not a checkpoint")
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        text = json.dumps(loaded["content"])
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        same = digest == loaded["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as an index: {error}") from error
    if not same:
        raise CheckpointError(f"{path} was changed: its checksum is not the one written in it")
    content: dict[str, Any] = loaded["content"]
    return content


def verify(path: Path, nbytes: int, digest: str) -> None:
    """Check that a file is the one that the index describes.

    Raises:
        CheckpointError: the file, and what is wrong with it.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the index lists it")
    found = path.stat().st_size
    if found != nbytes:
        raise CheckpointError(f"{path} has {found} bytes, the index says {nbytes}")
    if checksum(path) != digest:
        raise CheckpointError(f"{path} was changed: its checksum is not that of the index")


class Reader:
    """Tensors of safetensors files, of which only what is asked for is read."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def file(self, path: Path) -> Any:
        """Return the open file, with ``keys``, ``get_slice`` and ``get_tensor``."""
        if path not in self._open:
            with _reading(path):
                self._open[path] = safe_open(path, "pt").__enter__()  # type: ignore[no-untyped-call]
        return self._open[path]

    def part(self, path: Path, key: str, first: int, last: int) -> Tensor:
        """Return elements of a 1-D tensor."""
        with _reading(path):
            tensor: Tensor = self.file(path).get_slice(key)[first:last]
        return tensor

    def tensor(self, path: Path, key: str) -> Tensor:
        """Return a whole tensor."""
        with _reading(path):
            tensor: Tensor = self.file(path).get_tensor(key)
        return tensor


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say of an error of the system what was being written.

    Raises:
        CheckpointError: it cannot be.
    """
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def remove_stale(path: Path, kept: str) -> None:
    """Remove the data of earlier saves, and of saves that did not end, from a checkpoint."""
    for folder in path.iterdir():
        if folder.name != kept and _OURS.fullmatch(folder.name) and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
