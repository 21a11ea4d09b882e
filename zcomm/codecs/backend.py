"""The choice between the implementations of the kernels, and what all of them offer.

*Kernels* are the four functions below. Those that are chosen here read host memory, passed as 1-D
uint8 arrays of any alignment; those of a device take device memory instead
(``zcomm.device.kernels_of``). ``dtype`` (float32, float16 or bfloat16) says what memory holds;
``starts`` and ``lengths`` are int64 arrays that place the segments in it, in elements. The wire of
format ``none`` is float32 here, whatever ``dtype`` is. ``seed``, 0 <= seed < 2^64, matters to
stochastic rounding only; all segments of a message share it. Do not assume that a kernel holds the
GIL.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Protocol, cast

from zcomm import environment
from zcomm.errors import CodecError

from .codec import Codec
from .wire import Bytes, Lengths


class Kernels(Protocol):
    """What ``reference`` and ``native`` are; see ``reference`` for what each function does."""

    def encode(
        self,
        codec: Codec,
        x: Bytes,
        dtype: str,
        starts: Lengths,
        lengths: Lengths,
        out: Bytes,
        seed: int = 0,
    ) -> None:
        """Write the message of the segments of ``x`` to ``out``."""

    def decode(
        self, codec: Codec, wire: Bytes, starts: Lengths, lengths: Lengths, out: Bytes, dtype: str
    ) -> None:
        """Write the values of a message to the segments of ``out``."""

    def decode_reduce(
        self,
        codec: Codec,
        wires: list[Bytes],
        starts: Lengths,
        lengths: Lengths,
        out: Bytes,
        dtype: str,
        divisor: int,
    ) -> None:
        """Write the sum of several messages, divided by ``divisor``, to the segments of ``out``."""

    def prepare_reduce(
        self,
        codec: Codec,
        wires: list[Bytes],
        starts: Lengths,
        lengths: Lengths,
        out: Bytes,
        dtype: str,
        divisor: int,
    ) -> Callable[[], object]:
        """Return what does ``decode_reduce`` with these arguments when it is called.

        For small messages without padding (the cast formats and ``none``) that meet in the same
        memory again and again.
        """

    def decode_reduce_encode(
        self,
        codec_in: Codec,
        wires: list[Bytes],
        codec_out: Codec,
        lengths: Lengths,
        out: Bytes,
        seed: int = 0,
    ) -> None:
        """Write the message of the float32 sum of several messages to ``out``."""


def kernels() -> Kernels:
    """Return the kernels for host memory that ``ZCOMM_CODEC_BACKEND`` asks for.

    By default these are the native ones where they were built.

    Raises:
        CodecError: the native kernels are asked for and were not built, those of a device are, or
            this CPU lacks the instruction set that ``ZCOMM_CPU`` asks for.
        ValueError: one of the two variables has an unknown value.
    """
    choice, instructions = environment.text("ZCOMM_CODEC_BACKEND"), environment.text("ZCOMM_CPU")
    if choice == "numpy":
        return _load("reference")
    if choice == "cuda":
        raise CodecError(
            "ZCOMM_CODEC_BACKEND=cuda reads device memory, but an array lies on the host;"
            " possible for it are numpy, native"
        )
    try:
        native = _load("native")
    except ImportError as error:
        if choice == "native":
            raise CodecError(
                f"ZCOMM_CODEC_BACKEND=native, but the native kernels cannot be loaded ({error});"
                " possible here is numpy"
            ) from None
        _warn_once(str(error))
        return _load("reference")
    native.select(instructions)  # type: ignore[attr-defined]
    return native


def _load(name: str) -> Kernels:
    return cast(Kernels, importlib.import_module(f"{__package__}.{name}"))


@functools.cache
def _warn_once(reason: str) -> None:
    logging.getLogger("zcomm").warning(
        "the native codec kernels cannot be loaded (%s): using NumPy, which is much slower", reason
    )
