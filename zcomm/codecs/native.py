"""The kernels in C++: the functions of ``reference``, with the same bits, at the speed of memory.

The compiled module checks every size before it touches memory and answers with a status; what is
wrong is then worked out here, by the checks that ``reference`` uses. Do not assume that the
floating point settings of the calling thread matter: they are set aside for the time of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zcomm import _native
from zcomm.errors import CodecError

from .codec import FORMATS, Codec
from .wire import Bytes, Lengths, check_decode, check_encode, check_out, check_wires

_FORMATS = {
    name: i
    for i, name in enumerate(("none", "bf16", "fp16", "int8", "int4", "fp8_e4m3", "fp8_e5m2"))
}
_DTYPES = {name: i for i, name in enumerate(("float32", "bfloat16", "float16"))}
_DONE = 0

assert set(_FORMATS) == set(FORMATS)


def select(name: str) -> None:
    """Use the instruction set avx512, avx2 or baseline from now on; "": the widest there is.

    Raises:
        CodecError: this CPU, or this build, lacks it.
    """
    if not _native.select(name):
        raise CodecError(
            f"ZCOMM_CPU={name}: this machine has {', '.join(_native.instruction_sets())}"
        )


def instruction_sets() -> list[str]:
    """Return the instruction sets that this build and this CPU have, widest first."""
    return _native.instruction_sets()


def instruction_set() -> str:
    """Return the instruction set in use: avx512, avx2 or baseline."""
    return _native.instruction_set()


def encode(
    codec: Codec,
    x: Bytes,
    dtype: str,
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
    seed: int = 0,
) -> None:
    """Do what ``reference.encode`` does."""
    status = _native.encode(_described(codec), x, _DTYPES[dtype], starts, lengths, out, seed)
    if status != _DONE:
        check_encode(codec, x, dtype, starts, lengths, out)
        raise AssertionError(f"native encode refused valid memory: status {status}")


def decode(
    codec: Codec, wire: Bytes, starts: Lengths, lengths: Lengths, out: Bytes, dtype: str
) -> None:
    """Do what ``reference.decode`` does."""
    status = _native.decode(_described(codec), wire, starts, lengths, out, _DTYPES[dtype])
    if status != _DONE:
        check_decode(codec, [wire], starts, lengths, out, dtype)
        raise AssertionError(f"native decode refused valid memory: status {status}")


def decode_reduce(
    codec: Codec,
    wires: list[Bytes],
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
    dtype: str,
    divisor: int,
) -> None:
    """Do what ``reference.decode_reduce`` does."""
    status = _native.decode_reduce(
        _described(codec), wires, starts, lengths, out, _DTYPES[dtype], divisor
    )
    if status != _DONE:
        check_decode(codec, wires, starts, lengths, out, dtype, divisor)
        raise AssertionError(f"native decode_reduce refused valid memory: status {status}")


def prepare_reduce(
    codec: Codec,
    wires: list[Bytes],
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
    dtype: str,
    divisor: int,
) -> Callable[[], object]:
    """Return what does :func:`decode_reduce` with these arguments, whatever memory holds then."""
    decode_reduce(codec, wires, starts, lengths, out, dtype, divisor)  # says what is wrong
    place = starts, lengths, out, _DTYPES[dtype], divisor
    return _native.Reduction(_described(codec), wires, *place)


def decode_reduce_encode(
    codec_in: Codec,
    wires: list[Bytes],
    codec_out: Codec,
    lengths: Lengths,
    out: Bytes,
    seed: int = 0,
) -> None:
    """Do what ``reference.decode_reduce_encode`` does."""
    status = _native.decode_reduce_encode(
        _described(codec_in), wires, _described(codec_out), lengths, out, seed
    )
    if status != _DONE:
        check_wires(codec_in, wires, lengths)
        check_out(codec_out, lengths, out)
        raise AssertionError(f"native decode_reduce_encode refused valid memory: status {status}")


class Program:
    """Kernels' work, prepared once and done many times on memories that are given as rows.

    A *region* is (number of a memory, start, stop) in bytes, a negative stop being its end. A row
    is what :func:`bind` writes. Nothing is checked before the program runs.
    """

    def __init__(self) -> None:
        self._program = _native.Program()

    def copy(self, source: _native.Where, target: _native.Where) -> None:
        """Copy bytes."""
        self._program.copy(source, target)

    def encode(
        self,
        codec: Codec,
        x: _native.Where,
        dtype: str,
        starts: Lengths,
        lengths: Lengths,
        out: _native.Where,
    ) -> None:
        """Do what :func:`encode` does."""
        place = starts.tolist(), lengths.tolist()
        self._program.encode(_described(codec), x, _DTYPES[dtype], *place, out)

    def decode(
        self,
        codec: Codec,
        wire: _native.Where,
        starts: Lengths,
        lengths: Lengths,
        out: _native.Where,
        dtype: str,
    ) -> None:
        """Do what :func:`decode` does."""
        place = starts.tolist(), lengths.tolist(), out, _DTYPES[dtype]
        self._program.decode(_described(codec), wire, *place)

    def decode_reduce(
        self,
        codec: Codec,
        wires: Sequence[_native.Where],
        starts: Lengths,
        lengths: Lengths,
        out: _native.Where,
        dtype: str,
        divisor: int,
    ) -> None:
        """Do what :func:`decode_reduce` does."""
        place = starts.tolist(), lengths.tolist(), out, _DTYPES[dtype], divisor
        self._program.decode_reduce(_described(codec), wires, *place)

    def decode_reduce_encode(
        self,
        codec_in: Codec,
        wires: Sequence[_native.Where],
        codec_out: Codec,
        lengths: Lengths,
        out: _native.Where,
    ) -> None:
        """Do what :func:`decode_reduce_encode` does."""
        into = _described(codec_out), lengths.tolist(), out
        self._program.decode_reduce_encode(_described(codec_in), wires, *into)

    def run(self, rows: _native.Rows, seeds: Sequence[int]) -> bool:
        """Do all of it; tell whether all memory was as it must be, see :func:`encode`.

        ``seeds`` has one for each job, or none.
        """
        return self._program.run(rows, seeds) == _DONE


bind = _native.bind


def _described(codec: Codec) -> tuple[int, int, bool, bool]:
    stochastic, transformed = codec.rounding == "stochastic", codec.transform == "hadamard"
    return _FORMATS[codec.format], codec.block, stochastic, transformed
