"""The layout of a message: where the codes and the scales of every segment lie.

A *message* is what one rank sends to one peer in one hop: the codes of all its segments one after
the other, zero bytes up to a multiple of 16, the scales of all segments, zero bytes up to a
multiple of 16. Messages of the cast formats are the bare values, without padding. Do not assume
that anything inside a message is aligned: segments follow each other without gaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from zcomm.errors import CodecError

if TYPE_CHECKING:
    from .codec import Codec

Bytes = npt.NDArray[np.uint8]
Lengths = npt.NDArray[np.int64]
Count = TypeVar("Count", int, Lengths)

ALIGNMENT = 16
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
CAST_DTYPE = {"none": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Message:
    """Offsets in bytes of one message; segment i has its codes at ``codes[i]:codes[i + 1]``.

    ``codes`` and ``scales`` have one entry more than there are segments; the last ends the part.
    """

    codes: Lengths
    scales: Lengths
    nbytes: int


def layout(codec: Codec, lengths: Lengths) -> Message:
    """Return the layout of a message with segments of ``lengths`` elements."""
    if codec.quantised:
        codes = _offsets(_code_nbytes(codec, lengths), start=0)
        scales = _offsets(2 * _num_blocks(codec, lengths), start=_rounded(int(codes[-1])))
        return Message(codes, scales, _rounded(int(scales[-1])))
    codes = _offsets(lengths * ITEMSIZE[CAST_DTYPE[codec.format]], start=0)
    return Message(codes, np.full_like(codes, codes[-1]), int(codes[-1]))


def message_nbytes(codec: Codec, lengths: Iterable[int]) -> int:
    """Return the bytes of a message with segments of ``lengths`` elements."""
    if not codec.quantised:
        return sum(lengths) * ITEMSIZE[CAST_DTYPE[codec.format]]
    codes = blocks = 0
    for length in lengths:
        codes += _code_nbytes(codec, length)
        blocks += _num_blocks(codec, length)
    return _rounded(codes) + _rounded(2 * blocks)


def check_encode(
    codec: Codec, x: Bytes, dtype: str, starts: Lengths, lengths: Lengths, out: Bytes
) -> Message:
    """Return the layout of what ``encode`` writes, having checked that memory fits it.

    Raises:
        ValueError: segments leave the memory, or ``out`` is not exactly as long as the message.
    """
    message = layout(codec, lengths)
    _check_segments(x, dtype, starts, lengths)
    _check_nbytes(codec, "out", out, message)
    return message


def check_decode(
    codec: Codec,
    wires: list[Bytes],
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
    dtype: str,
    divisor: int = 1,
    *,
    padding: bool = True,
) -> Message:
    """Return the layout of what ``decode`` and ``decode_reduce`` read, having checked all of it.

    ``padding``: its bytes, too; False where the host cannot read them.

    Raises:
        ValueError: segments leave the memory, no wire is given, one has a wrong length, or
            ``divisor`` is less than 1.
        CodecError: padding of a wire is not zero.
    """
    if divisor < 1:
        raise ValueError(f"divisor {divisor}, at least 1 expected")
    _check_segments(out, dtype, starts, lengths)
    return check_wires(codec, wires, lengths, padding=padding)


def check_wires(
    codec: Codec, wires: list[Bytes], lengths: Lengths, *, padding: bool = True
) -> Message:
    """Return the layout that all ``wires`` share, having checked their lengths and ``padding``.

    Raises:
        ValueError: no wire is given, or one has a wrong length.
        CodecError: padding of a wire is not zero.
    """
    if not wires:
        raise ValueError("0 wires given, at least 1 expected")
    message = layout(codec, lengths)
    for i, wire in enumerate(wires):
        _check_nbytes(codec, f"wire {i}", wire, message)
        if padding:
            _check_padding(codec, i, wire, message)
    return message


def check_out(codec: Codec, lengths: Lengths, out: Bytes) -> Message:
    """Return the layout of a message to be written to ``out``, having checked its length.

    Raises:
        ValueError: ``out`` is not exactly as long as the message.
    """
    message = layout(codec, lengths)
    _check_nbytes(codec, "out", out, message)
    return message


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _offsets(nbytes: Lengths, *, start: int) -> Lengths:
    offsets = np.empty(len(nbytes) + 1, np.int64)
    offsets[0] = start
    np.cumsum(nbytes, out=offsets[1:])
    offsets[1:] += start
    return offsets


def _num_blocks(codec: Codec, lengths: Count) -> Count:
    return -(-lengths // codec.block)


def _code_nbytes(codec: Codec, lengths: Count) -> Count:
    if codec.bits == 8:
        return lengths
    half, short = codec.block // 2, lengths % codec.block
    return lengths // codec.block * half + (short + 1) // 2


def _check_segments(memory: Bytes, dtype: str, starts: Lengths, lengths: Lengths) -> None:
    numel = memory.nbytes // ITEMSIZE[dtype]
    if len(starts) != len(lengths):
        raise ValueError(f"{len(starts)} starts for {len(lengths)} lengths")
    if len(starts) == 0:
        return
    if int(starts.min()) < 0 or int(lengths.min()) < 0 or int((starts + lengths).max()) > numel:
        inside = (starts >= 0) & (lengths >= 0) & (starts + lengths <= numel)
        i = int(np.argmin(inside))
        raise ValueError(
            f"segment {i} is {lengths[i]} elements from {starts[i]}, but there are {numel}"
        )


def _check_nbytes(codec: Codec, name: str, memory: Bytes, message: Message) -> None:
    if memory.nbytes != message.nbytes:
        raise ValueError(
            f"{name} has {memory.nbytes} bytes, but {codec} needs {message.nbytes} for its segments"
        )


def _check_padding(codec: Codec, i: int, wire: Bytes, message: Message) -> None:
    if not codec.quantised:
        return
    for start, end in (
        (int(message.codes[-1]), int(message.scales[0])),
        (int(message.scales[-1]), message.nbytes),
    ):
        if wire[start:end].any():
            raise CodecError(
                f"wire {i} is not what {codec} wrote: padding at byte {start} is not zero"
            )
