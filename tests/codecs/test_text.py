"""The text form of a codec: what it accepts, what it says about the rest."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcomm import Codec, CodecError

BLOCKS = [32, 64, 128, 256, 512, 1024, 2048, 4096]
DEFAULTS = {"int8": 256, "int4": 128, "fp8_e4m3": 128, "fp8_e5m2": 128}
FORMATS = [*DEFAULTS, "bf16", "fp16", "none"]
POSSIBLE = "possible are int8, int4, fp8_e4m3, fp8_e5m2, bf16, fp16, none"


def texts():
    """Every codec: its text, and the arguments that build it."""
    for format in FORMATS[4:]:
        yield format, (format, 0, "nearest", "none")
    for format, default in DEFAULTS.items():
        roundings = ["nearest", "stochastic"] if format.startswith("int") else ["nearest"]
        for block in BLOCKS:
            for rounding in roundings:
                for transform in ("none", "hadamard"):
                    options = [
                        *([f"block={block}"] if block != default else []),
                        *(["rounding=stochastic"] if rounding == "stochastic" else []),
                        *(["transform=hadamard"] if transform == "hadamard" else []),
                    ]
                    text = format + ":" * bool(options) + ",".join(options)
                    yield text, (format, block, rounding, transform)


ALL = dict(texts())


@pytest.mark.parametrize("text", ALL)
def test_parse_and_back(text):
    codec = Codec.parse(text)
    assert (codec.format, codec.block, codec.rounding, codec.transform) == ALL[text]
    assert codec == Codec(*ALL[text])
    assert str(codec) == text
    assert Codec.parse(codec) is codec


def test_every_codec_is_tried():
    assert len(ALL) == 3 + 8 * (4 + 4 + 2 + 2)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("int8:block=256", "int8"),
        ("int8:block=0064", "int8:block=64"),
        ("int8:block=" + "0" * 5000 + "64", "int8:block=64"),
        ("fp8_e5m2:block=128,transform=none", "fp8_e5m2"),
        ("int4:rounding=nearest", "int4"),
        (
            "int4:transform=hadamard,rounding=stochastic,block=64",
            "int4:block=64,rounding=stochastic,transform=hadamard",
        ),
    ],
)
def test_only_what_is_not_default_is_printed_and_in_order(text, printed):
    assert str(Codec.parse(text)) == printed


def test_default_blocks_and_bits():
    for format, block in DEFAULTS.items():
        assert Codec(format).block == block
        assert Codec(format).bits == (4 if format == "int4" else 8)
        assert Codec(format).quantised
    assert not any(Codec(format).quantised for format in FORMATS[4:])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int5", f"unknown format 'int5'; {POSSIBLE}"),
        ("fp8", f"unknown format 'fp8'; {POSSIBLE}"),
        ("", "unknown format ''"),
        ("INT8", "unknown format 'INT8'"),
        (" int8", "unknown format ' int8'"),
        ("int8:blok=64", "int8 has no option 'blok'; it has block, rounding, transform"),
        ("int4:seed=1", "int4 has no option 'seed'; it has block, rounding, transform"),
        (
            "fp8_e4m3:rounding=nearest",
            "fp8_e4m3 has no option 'rounding'; it has block, transform",
        ),
        ("bf16:block=64", "bf16 has no option 'block'; it has no options at all"),
        ("fp16:transform=hadamard", "fp16 has no option 'transform'; it has no options at all"),
        ("none:none=64", "none has no option 'none'; it has no options at all"),
        ("none:transform=none", "none has no option 'transform'; it has no options at all"),
        ("int8:block=64,block=64", "option 'block' is given twice"),
        ("int8:transform=none,block=64,transform=none", "option 'transform' is given twice"),
        ("int4:rounding=up", "rounding 'up'; possible are nearest, stochastic"),
        ("int4:rounding=", "rounding ''; possible are nearest, stochastic"),
        ("int4:rounding=Nearest", "rounding 'Nearest'"),
        ("fp8_e4m3:transform=fft", "transform 'fft'; possible are none, hadamard"),
        ("int8:block=48", "block '48'; possible are powers of two from 32 to 4096"),
        ("int8:block=16", "block '16'"),
        ("int8:block=0", "block '0'"),
        ("int8:block=" + "9" * 5000, "possible are powers of two from 32 to 4096"),
        ("int8:block=8192", "block '8192'"),
        ("int8:block=-64", "block '-64'"),
        ("int8:block=64.0", "block '64.0'"),
        ("int8:block=٦٤", "block '٦٤'"),
        ("int8:block=", "block ''"),
        ("int8:block", "option 'block' has no value"),
        ("int8:block=64,rounding", "option 'rounding' has no value"),
        ("int8:", "option '' has no value"),
        ("int8,block=64", "',' at position 4, ':' expected"),
        ("int8:block:64", "':' at position 10, '=' expected"),
        ("int8:block=64=64", "'=' at position 13, ',' expected"),
    ],
)
def test_errors_quote_the_text_and_say_why(text, says):
    with pytest.raises(CodecError) as error:
        Codec.parse(text)
    assert repr(text) in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize("given_", [None, 8, ["int8"]])
def test_neither_text_nor_codec(given_):
    with pytest.raises(TypeError, match="a text or a Codec is expected"):
        Codec.parse(given_)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("int3",), "format 'int3': possible are int8"),
        (("int8", 100), "block 100; possible are powers of two from 32 to 4096"),
        (("int8", -64), "block -64"),
        (("int8", 64.0), r"block 64\.0"),
        (("int8", "64"), "block '64'"),
        (("bf16", 64), "format bf16 has no option block, 64 given; it has no options at all"),
        (("int8", 64, "up"), "rounding 'up'; possible are nearest, stochastic"),
        (("int8", 64, "nearest", 1), "transform 1; possible are none, hadamard"),
        (
            ("fp8_e5m2", 64, "stochastic"),
            "fp8_e5m2 has no option rounding, 'stochastic' given; it has block, transform",
        ),
        (("none", 0, "nearest", "hadamard"), "none has no option transform, 'hadamard' given"),
    ],
)
def test_built_directly(arguments, says):
    with pytest.raises(CodecError, match=says):
        Codec(*arguments)


@pytest.mark.parametrize("seed", [0, 2**64 - 1, np.uint64(2**64 - 1), np.int32(5)])
def test_seeds(seed):
    for text in ("int8", "int8:rounding=stochastic", "none"):
        codec = Codec.parse(text)
        wire = codec.encode(np.ones(3, np.float32), seed=seed)
        assert wire.tobytes() == codec.encode(np.ones(3, np.float32), seed=int(seed)).tobytes()


@pytest.mark.parametrize("text", ["int8", "int8:rounding=stochastic", "none"])
@pytest.mark.parametrize(
    ("seed", "error", "says"),
    [
        (-1, ValueError, "seed -1: possible are 0 to 2\\^64 - 1"),
        (2**64, ValueError, "seed 18446744073709551616: possible are 0 to 2\\^64 - 1"),
        (1.0, TypeError, "seed 1.0: an int is expected"),
        (None, TypeError, "seed None: an int is expected"),
    ],
)
def test_seeds_that_are_refused(text, seed, error, says):
    with pytest.raises(error, match=says):
        Codec.parse(text).encode(np.ones(3, np.float32), seed=seed)


OPTION = st.sampled_from(
    ["block=64", "block=48", "rounding=stochastic", "rounding=x", "transform=hadamard", "block", ""]
)
TEXTS = st.one_of(
    st.text(alphabet="int48bfp16noeblck_em3:=,0 ", max_size=24),
    st.builds(
        lambda format, options, colon: format + colon + ",".join(options),
        st.sampled_from([*FORMATS, "int5"]),
        st.lists(OPTION, max_size=3),
        st.sampled_from([":", "", ","]),
    ),
)


def is_a_codec(text):
    format, colon, rest = text.partition(":")
    options = [option.partition("=")[::2] for option in rest.split(",")] if colon else []
    possible = {"block": [str(block) for block in BLOCKS], "transform": ["none", "hadamard"]}
    if format.startswith("int"):
        possible["rounding"] = ["nearest", "stochastic"]
    names = [name for name, _ in options]
    return (
        format in FORMATS
        and (not colon or format in DEFAULTS)
        and len(set(names)) == len(names)
        and all(re.sub("^0+", "", value) in possible.get(name, []) for name, value in options)
    )


@given(TEXTS)
def test_any_other_text_is_an_error_that_quotes_it(text):
    if is_a_codec(text):
        assert Codec.parse(str(Codec.parse(text))) == Codec.parse(text)
    else:
        with pytest.raises(CodecError, match=re.escape(repr(text))):
            Codec.parse(text)
