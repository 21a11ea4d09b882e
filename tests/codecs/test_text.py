"""The text form of a codec: what it accepts, what it says about the rest."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcomm import Codec, CodecError

BLOCKS = [32, 64, 128, 256, 512, 1024, 2048, 4096]
ACCEPTED = re.compile("bf16|fp16|none|int[48](:block=0*(32|64|128|256|512|1024|2048|4096))?")


@pytest.mark.parametrize(
    ("text", "format", "block"),
    [
        ("int8", "int8", 256),
        ("int4", "int4", 128),
        ("bf16", "bf16", 0),
        ("fp16", "fp16", 0),
        ("none", "none", 0),
        *((f"{name}:block={block}", name, block) for name in ("int8", "int4") for block in BLOCKS),
    ],
)
def test_parse_and_back(text, format, block):
    codec = Codec.parse(text)
    assert (codec.format, codec.block) == (format, block)
    assert Codec.parse(str(codec)) == codec
    assert Codec.parse(codec) is codec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int5", "unknown format 'int5'; possible are int8, int4, bf16, fp16, none"),
        ("fp8_e4m3", "unknown format 'fp8_e4m3'; possible are int8, int4, bf16, fp16, none"),
        ("", "unknown format ''"),
        ("INT8", "unknown format 'INT8'"),
        (" int8", "unknown format ' int8'"),
        ("int8:blok=64", "int8 has no option 'blok'; it has block"),
        ("int4:rounding=stochastic", "int4 has no option 'rounding'; it has block"),
        ("int4:block=64,transform=hadamard", "int4 has no option 'transform'; it has block"),
        ("bf16:block=64", "bf16 has no option 'block'; it has no options at all"),
        ("none:none=64", "none has no option 'none'; it has no options at all"),
        ("int8:block=64,block=64", "option 'block' is given twice"),
        ("int8:block=48", "block '48'; possible are powers of two from 32 to 4096"),
        ("int8:block=16", "block '16'"),
        ("int8:block=8192", "block '8192'"),
        ("int8:block=-64", "block '-64'"),
        ("int8:block=64.0", "block '64.0'"),
        ("int8:block=٦٤", "block '٦٤'"),
        ("int8:block=", "block ''"),
        ("int8:block", "option 'block' has no value"),
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
        (("int8", 100), "block 100: possible are powers of two from 32 to 4096"),
        (("bf16", 64), "format bf16 has no option block, 64 given"),
    ],
)
def test_built_directly(arguments, says):
    with pytest.raises(CodecError, match=says):
        Codec(*arguments)


@given(st.text(alphabet="int48bfp16noeblck:=,0 ", max_size=24))
def test_any_other_text_is_an_error_that_quotes_it(text):
    if ACCEPTED.fullmatch(text):
        assert Codec.parse(str(Codec.parse(text))) == Codec.parse(text)
    else:
        with pytest.raises(CodecError, match=re.escape(repr(text))):
            Codec.parse(text)
