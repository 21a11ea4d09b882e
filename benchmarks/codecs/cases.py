"""The cases that are timed, and the targets that some of them have.

A target is a part of what a *yardstick* reaches in the same run: bytes per second of a copy, or
elements per second of encoding float32 to int8. Do not assume that the targets of a CPU hold for
narrow instruction sets: they are meant for AVX-512.
"""

from __future__ import annotations

from dataclasses import dataclass

from zcomm.codecs import Codec
from zcomm.codecs.wire import ITEMSIZE


@dataclass(frozen=True)
class Case:
    """A kernel on one kind of memory: ``dtype`` is the caller's side, ``wires`` are summed."""

    kernel: str
    dtype: str
    codec: str
    wires: int = 1


@dataclass(frozen=True)
class Target:
    """The least ratio to a yardstick: ``of_int8`` says that it is not a copy but encoding int8."""

    ratio: float
    of_int8: bool = False

    def __str__(self) -> str:
        return f"{self.ratio:.2f}{'/int8' if self.of_int8 else ''}"


ENCODE_INT8 = Case("encode", "float32", "int8")

_BARE, _USUAL = ("encode", "decode"), ("float32", "bfloat16")
_PLAIN = ("int8", "int4")
_OTHERS = (
    "fp8_e4m3",
    "fp8_e5m2",
    *(f"{format}:rounding=stochastic" for format in _PLAIN),
    *(f"{format}:transform=hadamard" for format in _PLAIN),
)

CASES = (
    *(
        Case(kernel, dtype, c)
        for kernel in ("encode", "decode")
        for c in _PLAIN
        for dtype in ITEMSIZE
    ),
    *(
        Case(kernel, dtype, c)
        for kernel in ("encode", "decode")
        for c in _OTHERS
        for dtype in ("float32", "bfloat16")
    ),
    *(Case("decode_reduce", "float32", c, 4) for c in (*_PLAIN, *_OTHERS)),
    *(Case("decode_reduce_encode", "-", c, n) for c in (*_PLAIN, *_OTHERS) for n in (4, 2)),
    Case("encode", "float32", "none"),
    Case("encode", "bfloat16", "bf16"),
    Case("decode", "bfloat16", "bf16"),
    Case("encode", "float16", "fp16"),
    Case("decode", "float16", "fp16"),
    Case("decode_reduce", "float32", "none", 4),
    Case("decode_reduce", "bfloat16", "bf16", 4),
    Case("decode_reduce", "float16", "none", 4),
    Case("decode_reduce_encode", "-", "bf16", 4),
)

_ENCODE_TARGETS = {
    ("int8", "float32"): 0.9,
    ("int8", "bfloat16"): 0.6,
    ("int8", "float16"): 0.6,
    ("int4", "float32"): 0.65,
    ("int4", "bfloat16"): 0.65,
    ("int4", "float16"): 0.65,
}


def cpu_target(case: Case) -> Target | None:
    """Return the target of a case on one core with AVX-512, if it has one."""
    codec = Codec.parse(case.codec)
    if case == Case("decode_reduce_encode", "-", "int4", 4):
        return Target(0.6, of_int8=True)
    if not codec.quantised or case.kernel not in _BARE:
        return None
    if codec.transform == "hadamard":
        return Target(0.3)
    if codec.format.startswith("fp8"):
        return Target(0.4)
    if case.kernel == "decode":
        return Target(0.9)
    if codec.rounding == "stochastic":
        return Target(0.3)
    return Target(_ENCODE_TARGETS[codec.format, case.dtype])


def cuda_target(case: Case) -> Target:
    """Return the target of a case on a CUDA device."""
    return Target(0.9 if case.kernel in _BARE else 0.8)
