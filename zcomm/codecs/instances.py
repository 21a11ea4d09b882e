"""Which instances of the CUDA kernels exist, and which one a call takes.

An *instance* is a kernel template with arguments, named as in C++: ``zc::decode<float, zc::INT4,
false>``. ``encode`` has fast instances for the common codecs and one for every other block,
rounding and transform; ``decode`` and ``decode_reduce`` take any block; ``decode_reduce_encode``
has only fast ones, since what it lacks is a ``decode_reduce`` followed by an ``encode``. Do not
assume that anything is compiled before its first use.
"""

from __future__ import annotations

from itertools import product

from .codec import Codec

DTYPES = {"float32": "float", "bfloat16": "zc::bf16", "float16": "zc::fp16"}
CODES = {"int8": "zc::INT8", "int4": "zc::INT4", "fp8_e4m3": "zc::E4M3", "fp8_e5m2": "zc::E5M2"}
ROUNDINGS = {"nearest": "zc::NEAREST", "stochastic": "zc::STOCHASTIC"}
TRANSFORMS = {"none": "false", "hadamard": "true"}

FAST = tuple(
    map(
        Codec.parse,
        (
            "int8",
            "int8:block=128",
            "int4",
            "int4:block=64",
            "int4:block=256",
            "fp8_e4m3",
            "fp8_e5m2",
            "int8:rounding=stochastic",
            "int4:rounding=stochastic",
            "int4:transform=hadamard",
        ),
    )
)
FAST_PASSES = tuple(
    (Codec.parse(codec_in), Codec.parse(codec_out))
    for codec_in, codec_out in (
        ("int8", "int8"),
        ("int4", "int4"),
        ("int8", "int4"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("int8", "int8:rounding=stochastic"),
        ("int4", "int4:rounding=stochastic"),
        ("int8", "int4:rounding=stochastic"),
        ("int8", "int4:transform=hadamard"),
        ("int4:transform=hadamard", "int4:transform=hadamard"),
    )
)


def encode(codec: Codec, dtype: str) -> str:
    """Return the instance that encodes elements of ``dtype``."""
    return _encode(codec if codec in FAST else None, codec.format, dtype)


def decode(codec: Codec, dtype: str) -> str:
    """Return the instance that decodes one message to ``dtype``."""
    return _named("decode", DTYPES[dtype], CODES[codec.format], TRANSFORMS[codec.transform])


def decode_reduce(codec: Codec, dtype: str) -> str:
    """Return the instance that sums messages to ``dtype``."""
    return _named("decode_reduce", DTYPES[dtype], CODES[codec.format], TRANSFORMS[codec.transform])


def decode_reduce_encode(codec_in: Codec, codec_out: Codec) -> str | None:
    """Return the instance that sums messages and encodes the sum at once, where there is one.

    How wires were rounded is nothing that decoding them depends on; nor is the block of codes that
    lie in memory in the order of their elements.
    """
    for fast_in, fast_out in FAST_PASSES:
        same_in = (codec_in.format, codec_in.transform) == (fast_in.format, fast_in.transform)
        same_block = codec_in.format != "int4" or codec_in.block == codec_out.block
        if same_in and same_block and codec_out == fast_out:
            return _pass(fast_in, fast_out)
    return None


def reduce_casts(source: str, target: str) -> str:
    """Return the instance that sums elements of one dtype as elements of another."""
    return _named("reduce_casts", DTYPES[source], DTYPES[target])


def every() -> tuple[str, ...]:
    """Return the names of all instances."""
    names = [_encode(codec, codec.format, dtype) for codec, dtype in product(FAST, DTYPES)]
    names += [_encode(None, format, dtype) for format, dtype in product(CODES, DTYPES)]
    for kernel in ("decode", "decode_reduce"):
        options = product(DTYPES.values(), CODES.values(), TRANSFORMS.values())
        names += [_named(kernel, *each) for each in options]
    names += [_pass(*codecs) for codecs in FAST_PASSES]
    names += [reduce_casts(source, target) for source, target in product(DTYPES, DTYPES)]
    return tuple(names)


def _encode(codec: Codec | None, format: str, dtype: str) -> str:
    if codec is None:
        return _named("encode", DTYPES[dtype], CODES[format], "0", ROUNDINGS["nearest"], "false")
    return _named("encode", DTYPES[dtype], CODES[format], *_options(codec))


def _pass(codec_in: Codec, codec_out: Codec) -> str:
    block, rounding, transform = _options(codec_out)
    codes = CODES[codec_in.format], CODES[codec_out.format]
    transforms = TRANSFORMS[codec_in.transform], transform
    return _named("decode_reduce_encode", *codes, block, rounding, *transforms)


def _options(codec: Codec) -> tuple[str, str, str]:
    return str(codec.block), ROUNDINGS[codec.rounding], TRANSFORMS[codec.transform]


def _named(kernel: str, *arguments: str) -> str:
    return f"zc::{kernel}<{', '.join(arguments)}>"
