"""``Codec``: the description of a wire format, its text form, its sizes and its error.

*Quantised* formats (int8, int4, fp8_e4m3, fp8_e5m2) store small codes and one bfloat16 *scale* per
*block* of consecutive elements of a segment; the *cast* formats (bf16, fp16, none) store each
element for itself. An *option* is what can be chosen of a format. docs/numerics.md defines every
bit. Do not assume that a codec fits every dtype the same way: ``none`` keeps the dtype of its
input.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from zcomm.device import callers_stream, kernels_of, on_host
from zcomm.errors import CodecError

from . import memory
from .wire import CAST_DTYPE, ITEMSIZE, Lengths, message_nbytes

BITS = {"int8": 8, "int4": 4, "fp8_e4m3": 8, "fp8_e5m2": 8}
DEFAULT_BLOCK = {"int8": 256, "int4": 128, "fp8_e4m3": 128, "fp8_e5m2": 128}
FORMATS = (*BITS, "bf16", "fp16", "none")
SMALLEST_BLOCK, LARGEST_BLOCK = 32, 4096
CHOICES = {"rounding": ("nearest", "stochastic"), "transform": ("none", "hadamard")}
OPTIONS = {
    "int8": ("block", "rounding", "transform"),
    "int4": ("block", "rounding", "transform"),
    "fp8_e4m3": ("block", "transform"),
    "fp8_e5m2": ("block", "transform"),
    "bf16": (),
    "fp16": (),
    "none": (),
}


@dataclass(frozen=True)
class Codec:
    """A wire format: ``format`` and its options; ``block`` counts elements.

    A ``block`` of 0, the default, is replaced by the default of the format (int8 256, the others
    128); formats without blocks keep 0. ``rounding`` (int8, int4) is nearest or stochastic,
    ``transform`` (int8, int4, fp8) none or hadamard.

    >>> Codec.parse("int4:block=64,transform=hadamard")
    Codec(format='int4', block=64, rounding='nearest', transform='hadamard')

    Raises:
        CodecError: unknown format, or an option or value that the format cannot have.
    """

    format: str
    block: int = 0
    rounding: str = "nearest"
    transform: str = "none"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise CodecError(f"format {self.format!r}: possible are {', '.join(FORMATS)}")
        for option in DEFAULTS:
            value = getattr(self, option)
            if option not in OPTIONS[self.format] and value != DEFAULTS[option]:
                raise CodecError(
                    f"format {self.format} has no option {option}, {value!r} given;"
                    f" {_has_options(self.format)}"
                )
        if self.format in BITS and self.block == 0:
            object.__setattr__(self, "block", DEFAULT_BLOCK[self.format])
        for option in OPTIONS[self.format]:
            if not _is_possible(option, getattr(self, option)):
                raise CodecError(_impossible(option, getattr(self, option)))

    @staticmethod
    def parse(text: str | Codec) -> Codec:
        """Return the codec that a text such as ``int8`` or ``int4:rounding=stochastic`` describes.

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
        defaults = {**DEFAULTS, "block": DEFAULT_BLOCK.get(self.format, 0)}
        chosen = [
            f"{option}={getattr(self, option)}"
            for option, default in defaults.items()
            if getattr(self, option) != default
        ]
        return ":".join([self.format, *([",".join(chosen)] if chosen else [])])

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
        float64 has the bytes of float32, which it becomes.

        Raises:
            TypeError: lengths are not ints, or nothing of ``dtype`` can be encoded.
            ValueError: ``segments`` do not add up to ``numel``.
        """
        codec = self.on_wire(memory.encoded_dtype(dtype))
        return message_nbytes(codec, _checked(numel, segments))

    def encode(self, x: Any, *, seed: int = 0, segments: Sequence[int] | None = None) -> Any:
        """Return the message of the elements of ``x``, in C order, as a 1-D uint8 array.

        ``x`` is an array of float64 (converted to float32 first), float32, float16 or bfloat16. The
        message is a NumPy array; that of a CUDA array is one of its kind, written in the order of
        the caller's stream. ``seed`` draws the random numbers of stochastic rounding,
        the same in every segment; the other codecs do not use it.

        Raises:
            TypeError: ``x`` is of another kind or dtype, or ``seed`` or a segment is not an int.
            ValueError: ``segments`` do not add up to its elements, or ``seed`` is not one of
                0 to 2^64 - 1.
        """
        seed = check_seed(seed)
        values, dtype = memory.view(x)
        checked = _checked(values.nbytes // ITEMSIZE[dtype], segments)
        lengths = np.array(checked, np.int64)
        codec = self.on_wire(dtype)
        wire, out = memory.message(message_nbytes(codec, checked), x)
        with callers_stream(x, out):
            kernels_of(values).encode(codec, values, dtype, _starts(lengths), lengths, out, seed)
        return wire

    def decode(
        self, wire: Any, numel: int, dtype: Any, *, segments: Sequence[int] | None = None
    ) -> Any:
        """Return the ``numel`` values of a message as a new 1-D array of ``dtype``.

        ``wire`` is an array of uint8, or bytes. A torch dtype gives a torch tensor, any other a
        NumPy array; a message on a device gives an array of its kind there. With format ``none``
        the message must have been encoded from ``dtype``.

        Raises:
            TypeError: ``wire`` is something else, or ``numel`` or a segment is not an int.
            ValueError: the message has another length than ``numel`` elements need.
            CodecError: its padding is not zero.
        """
        checked = _checked(numel, segments)
        name = memory.dtype_name(dtype)
        received = memory.received(wire)
        needed = message_nbytes(self.on_wire(name), checked)
        if received.nbytes != needed:
            raise ValueError(
                f"wire has {received.nbytes} bytes, but {self} needs {needed} for {numel} elements"
            )
        lengths = np.array(checked, np.int64)
        out, values = memory.empty(sum(checked), dtype, wire)
        place = _starts(lengths), lengths, values, name
        with callers_stream(wire, values):
            kernels_of(values).decode(self.on_wire(name), received, *place)
        return out

    def error_bound(self, x: Any, dtype: Any = "float32") -> npt.NDArray[np.float64]:
        """Return how far each element, encoded and decoded to ``dtype``, may be from ``x``.

        The result has the shape of ``x``. It holds for every seed, is NaN where the decoded value
        is NaN, and infinite where a cast, or the inverse of a transform, may overflow, or has.
        ``x`` counts as one segment; of float64, becoming float32 is a part of the error.
        """
        from .bounds import error_bound, narrowing

        values, name = memory.view(x)
        wide = memory.float64(x)
        with callers_stream(x, values):
            host = on_host(values)
            exact = None if wide is None else on_host(wide).view(np.float64)
        bound = error_bound(self.on_wire(name), host, name, memory.dtype_name(dtype))
        if exact is not None:
            bound = bound + narrowing(exact, host)
        return bound.reshape(tuple(x.shape))


DEFAULTS: dict[str, object] = {
    field.name: field.default for field in fields(Codec) if field.name != "format"
}


def _has_options(name: str) -> str:
    return f"it has {', '.join(OPTIONS[name]) or 'no options at all'}"


def _is_possible(option: str, value: object) -> bool:
    return value in CHOICES[option] if option in CHOICES else _is_block(value)


def _impossible(option: str, value: object) -> str:
    possible = f"powers of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}"
    if option in CHOICES:
        possible = ", ".join(CHOICES[option])
    return f"{option} {value!r}; possible are {possible}"


def _is_block(block: object) -> bool:
    return (
        isinstance(block, int)
        and SMALLEST_BLOCK <= block <= LARGEST_BLOCK
        and block & (block - 1) == 0
    )


def check_seed(seed: int) -> int:
    """Return a seed that the caller gave.

    Raises:
        TypeError: it is not an integer.
        ValueError: it has more than 64 bits, or is negative.
    """
    number = _whole("seed", seed)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"seed {number}: possible are 0 to 2^64 - 1")
    return number


def _checked(numel: int, segments: Sequence[int] | None) -> list[int]:
    """Return the lengths of segments, one of ``numel`` elements where none are given."""
    numel = _whole("numel", numel)
    if numel < 0:
        raise ValueError(f"numel {numel}: at least 0")
    if segments is None:
        lengths = [numel]
    else:
        lengths = [_whole(f"segment {i}:", length) for i, length in enumerate(segments)]
    if sum(lengths) != numel or min(lengths, default=0) < 0:
        raise ValueError(f"segments {lengths} do not add up to {numel} elements")
    return lengths


def _whole(name: str, number: object) -> int:
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} {number!r}: an int is expected") from None


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
    given: dict[str, Any] = {}
    for option, word in options:
        if option in given:
            raise CodecError(f"codec {text!r}: option {option!r} is given twice")
        if option not in OPTIONS[name]:
            raise CodecError(
                f"codec {text!r}: {name} has no option {option!r}; {_has_options(name)}"
            )
        given[option] = _number(word) if option == "block" else word
        if not _is_possible(option, given[option]):
            raise CodecError(f"codec {text!r}: {_impossible(option, word)}")
    return Codec(name, **given)


def _number(word: str) -> int | str:
    """Return the number that a word is, or the word where that is none, or has too many digits."""
    digits = word.lstrip("0")
    short = len(digits) <= len(str(LARGEST_BLOCK))
    return int(digits) if short and digits.isascii() and digits.isdigit() else word


__all__ = ["BITS", "CAST_DTYPE", "DEFAULT_BLOCK", "FORMATS", "Codec", "check_seed"]
