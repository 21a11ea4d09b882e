"""``Codec``: the description of a wire format, its text form, its sizes and its error.

*Quantised* formats (int8, int4) store small integers and one bfloat16 *scale* per *block* of
consecutive elements of a segment; the *cast* formats (bf16, fp16, none) store each element for
itself. docs/numerics.md defines every bit. Do not assume that a codec fits every dtype the same
way: ``none`` keeps the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zcomm.errors import CodecError

from . import memory
from .wire import CAST_DTYPE, ITEMSIZE, Bytes, Lengths, message_nbytes

BITS = {"int8": 8, "int4": 4}
DEFAULT_BLOCK = {"int8": 256, "int4": 128}
FORMATS = (*BITS, "bf16", "fp16", "none")
SMALLEST_BLOCK, LARGEST_BLOCK = 32, 4096


@dataclass(frozen=True)
class Codec:
    """A wire format: ``format`` is int8, int4, bf16, fp16 or none; ``block`` counts elements.

    A ``block`` of 0, the default, is replaced by the default of the format (int8 256, int4 128);
    formats without blocks keep 0.

    >>> Codec.parse("int4:block=64")
    Codec(format='int4', block=64)

    Raises:
        CodecError: unknown format, or a block that the format cannot have.
    """

    format: str
    block: int = 0

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise CodecError(f"format {self.format!r}: possible are {', '.join(FORMATS)}")
        if self.format not in BITS and self.block:
            raise CodecError(f"format {self.format} has no option block, {self.block} given")
        if self.format in BITS and not self.block:
            object.__setattr__(self, "block", DEFAULT_BLOCK[self.format])
        if self.format in BITS and not _is_block(self.block):
            raise CodecError(
                f"block {self.block}: possible are powers of two from {SMALLEST_BLOCK}"
                f" to {LARGEST_BLOCK}"
            )

    @staticmethod
    def parse(text: str | Codec) -> Codec:
        """Return the codec that a text such as ``int8`` or ``int4:block=64`` describes.

        Raises:
            CodecError: the text is not the description of a codec; the message quotes it.
            TypeError: neither a text nor a codec is given.
        """
        if isinstance(text, Codec):
            return text
        if not isinstance(text, str):
            raise TypeError(f"codec {text!r}: a text or a Codec is expected")
        name, options = _scan(text)
        if name not in FORMATS:
            raise CodecError(
                f"codec {text!r}: unknown format {name!r}; possible are {', '.join(FORMATS)}"
            )
        return _with_options(text, name, options)

    def __str__(self) -> str:
        if self.block == DEFAULT_BLOCK.get(self.format, 0):
            return self.format
        return f"{self.format}:block={self.block}"

    @property
    def quantised(self) -> bool:
        """Whether elements of a block share a scale."""
        return self.format in BITS

    @property
    def bits(self) -> int:
        """The bits of a code; only quantised formats have codes."""
        return BITS[self.format]

    def on_wire(self, dtype: Any) -> Codec:
        """Return the codec whose kernels write the wire of values of ``dtype``.

        That is this codec, except that ``none`` keeps 16-bit values as they are, which the
        kernels know as ``bf16`` and ``fp16``: for them ``none`` is float32.
        """
        name = memory.dtype_name(dtype)
        if self.format != "none" or name == "float32":
            return self
        return Codec("bf16" if name == "bfloat16" else "fp16")

    def wire_nbytes(
        self, numel: int, *, dtype: Any = "float32", segments: Sequence[int] | None = None
    ) -> int:
        """Return the bytes of a message of ``numel`` elements of ``dtype``.

        ``segments``: lengths in elements, which add up to ``numel``; by default one segment.
        """
        codec = self.on_wire(dtype)
        return message_nbytes(codec, _checked(numel, segments))

    def encode(self, x: Any, *, seed: int = 0, segments: Sequence[int] | None = None) -> Bytes:
        """Return the message of the elements of ``x``, in C order, as a 1-D uint8 array.

        ``x`` is a NumPy array or a CPU torch tensor of float64 (converted to float32 first),
        float32, float16 or bfloat16. ``seed`` draws the random numbers of stochastic rounding;
        nearest rounding, the only one of these formats, has none.

        Raises:
            TypeError: ``x`` is of another kind or dtype.
            ValueError: ``segments`` do not add up to its elements.
        """
        from .backend import kernels

        values, dtype = memory.view(x)
        lengths = _lengths(values.nbytes // ITEMSIZE[dtype], segments)
        codec = self.on_wire(dtype)
        wire = np.empty(message_nbytes(codec, lengths.tolist()), np.uint8)
        kernels().encode(codec, values, dtype, _starts(lengths), lengths, wire)
        return wire

    def decode(
        self, wire: Any, numel: int, dtype: Any, *, segments: Sequence[int] | None = None
    ) -> Any:
        """Return the ``numel`` values of a message as a new 1-D array of ``dtype``.

        ``wire`` holds uint8 (NumPy or torch). A torch dtype gives a torch tensor, any other a
        NumPy array. With format ``none`` the message must have been encoded from ``dtype``.

        Raises:
            ValueError: the message has another length than ``numel`` elements need.
            CodecError: its padding is not zero.
        """
        from .backend import kernels

        lengths = _lengths(numel, segments)
        name = memory.dtype_name(dtype)
        out, values = memory.empty(numel, dtype)
        received = np.asarray(wire, dtype=np.uint8).reshape(-1)
        kernels().decode(self.on_wire(name), received, _starts(lengths), lengths, values, name)
        return out

    def error_bound(self, x: Any, dtype: Any = "float32") -> npt.NDArray[np.float64]:
        """Return how far each element, encoded and decoded to ``dtype``, may be from ``x``.

        The result has the shape of ``x`` and is NaN where the decoded value is not finite, and
        infinite where a cast may overflow. ``x`` counts as one segment.
        """
        from .bounds import error_bound

        values, name = memory.view(x)
        bound = error_bound(self.on_wire(name), values, name, memory.dtype_name(dtype))
        return bound.reshape(tuple(x.shape))


def _is_block(block: int) -> bool:
    return SMALLEST_BLOCK <= block <= LARGEST_BLOCK and block & (block - 1) == 0


def _checked(numel: int, segments: Sequence[int] | None) -> Sequence[int]:
    lengths = (numel,) if segments is None else segments
    if sum(lengths) != numel or min(lengths, default=0) < 0:
        raise ValueError(f"segments {list(lengths)} do not add up to {numel} elements")
    return lengths


def _lengths(numel: int, segments: Sequence[int] | None) -> Lengths:
    return np.array(_checked(numel, segments), np.int64)


def _starts(lengths: Lengths) -> Lengths:
    starts: Lengths = np.cumsum(lengths) - lengths
    return starts


def _scan(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Split ``name:key=value,key=value`` in one pass."""
    words = [""]
    for position, character in enumerate(text):
        if character not in ":=,":
            words[-1] += character
            continue
        expected = ":" if len(words) == 1 else "=" if len(words) % 2 == 0 else ","
        if character != expected:
            raise CodecError(
                f"codec {text!r}: {character!r} at position {position}, {expected!r} expected;"
                " the form is name:option=value,option=value"
            )
        words.append("")
    if len(words) % 2 == 0:
        raise CodecError(f"codec {text!r}: option {words[-1]!r} has no value")
    return words[0], list(zip(words[1::2], words[2::2], strict=True))


def _with_options(text: str, name: str, options: list[tuple[str, str]]) -> Codec:
    possible = ("block",) if name in BITS else ()
    block = 0
    for i, (key, value) in enumerate(options):
        if key in [earlier for earlier, _ in options[:i]]:
            raise CodecError(f"codec {text!r}: option {key!r} is given twice")
        if key not in possible:
            raise CodecError(
                f"codec {text!r}: {name} has no option {key!r};"
                f" it has {', '.join(possible) or 'no options at all'}"
            )
        block = int(value) if value.isascii() and value.isdigit() else 0
        if not _is_block(block):
            raise CodecError(
                f"codec {text!r}: block {value!r}; possible are powers of two from"
                f" {SMALLEST_BLOCK} to {LARGEST_BLOCK}"
            )
    return Codec(name, block)


__all__ = ["BITS", "CAST_DTYPE", "DEFAULT_BLOCK", "FORMATS", "Codec"]
