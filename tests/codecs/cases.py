"""The table of cases that every implementation of the kernels passes, wherever it runs.

A *case* is one call of each of the four kernels: what is encoded, what is decoded, with which seed.
``cases(level)`` gives them: ``smoke`` is one for every codec in every block size, about a hundred,
small enough for slow runners; ``full`` is every codec with every dtype and kind of values, and
contains ``smoke``. A *call* is what a case, or a test that draws its own, hands to the kernels:
``outcomes`` gives what they write, ``expected`` what the oracle says. Do not assume that
neighbouring cases differ in one thing only: sizes, wires, divisors and seeds are drawn by the
number of the case.
"""

import functools
import random
from dataclasses import dataclass

import numpy as np

from tests.codecs import oracle
from tests.codecs.inputs import DTYPES, KINDS, Message, memory
from zcomm import Codec
from zcomm.codecs.wire import layout

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
TRANSFORMS = ("", ",transform=hadamard")
ROUNDINGS = ("", ",rounding=stochastic")
INTEGERS = tuple(rounding + transform for rounding in ROUNDINGS for transform in TRANSFORMS)
OPTIONS = {"int8": INTEGERS, "int4": INTEGERS, "fp8_e4m3": TRANSFORMS, "fp8_e5m2": TRANSFORMS}
CASTS = ("bf16", "fp16", "none")
OTHERS = ("int8", "none", "fp8_e4m3:block=64", "int4:rounding=stochastic", "bf16")
WIRES = (1, 2, 3, 4, 5, 9)
DIVISORS = (1, 2, 3, 41, 2**24 + 1)
SEEDS = (0, 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15)
TOO_SMALL = ("tiny", "edge", "edge_hadamard", "subnormal")  # for float16 they are all zero
MARGIN = 48


@dataclass(frozen=True)
class Call:
    """What the four kernels are given; ``message`` says how the values are laid out and drawn."""

    message: Message
    codec_out: Codec
    dtype_out: str
    num_wires: int
    divisor: int
    seed: int

    @property
    def codec(self):
        return self.message.codec

    @property
    def cost(self):
        """Elements that pass through an encoder or a decoder: what the oracle's time depends on."""
        return int(self.message.lengths.sum()) * (self.num_wires + 2)

    def inputs(self):
        """The memory to encode, the wires to decode, and the memory that results are written to."""
        before = self.message.values(self.dtype_out, stream=99)
        return self.message.values(), self.message.wires(self.num_wires), before


@dataclass(frozen=True)
class Case:
    """One call of each kernel; texts are codecs, ``sizes`` the elements of the segments."""

    text: str
    text_out: str
    dtype: str
    dtype_out: str
    sizes: tuple[int, ...]
    kind: str
    num_wires: int
    divisor: int
    seed: int
    number: int
    level: str

    def __str__(self):
        return f"{self.text}-{self.dtype}-{self.kind}-{self.number}"

    @property
    def call(self):
        """This case for the kernels: every second segment behind the others, with gaps."""
        lengths = np.array(self.sizes, np.int64)
        order = np.argsort(np.arange(len(lengths)) % 2, kind="stable")
        ends = np.cumsum(lengths[order] + self.number % 3)
        starts = np.empty_like(lengths)
        starts[order] = ends - lengths[order]
        codec, codec_out = Codec.parse(self.text), Codec.parse(self.text_out)
        numel, offset = int(ends[-1]) + self.number % 5, self.number % 17
        message = Message(codec, self.dtype, starts, lengths, numel, self.kind, self.number, offset)
        return Call(message, codec_out, self.dtype_out, self.num_wires, self.divisor, self.seed)


def texts(block=None):
    """The codecs, in every block size or in one; the casts have none."""
    quantised = [
        f"{format}:block={each}{option}"
        for format, options in OPTIONS.items()
        for each in ((block,) if block else BLOCKS)
        for option in options
    ]
    return [*quantised, *CASTS]


def texts_of_256_bytes():
    """The quantised codecs in the block size that has 256 bytes of codes."""
    return [
        *(text for text in texts(256) if text.startswith(("int8", "fp8"))),
        *(text for text in texts(512) if text.startswith("int4")),
    ]


def sizes_of(block):
    """Lengths of segments around what may go wrong; a case has one of these."""
    return (
        (block - 1, block, block + 1),
        tuple(range(1, 36)),
        (2 * block + 17, 0, 1),
        tuple(range(36, 71)),
        (5, 3 * block, 33),
        (block // 2 + 1,),
        (3 * block + 31, 2, block),
    )


@functools.cache
def cases(level):
    """The cases of a level, a tuple: ``smoke`` or ``full``."""
    if level == "smoke":
        return tuple(_case(i, text, None, None, "smoke") for i, text in enumerate(texts()))
    crossed = [(text, d, kind) for text in texts() for d in DTYPES for kind in KINDS]
    first = len(cases("smoke"))
    full = [_case(first + i, *each, "full") for i, each in enumerate(crossed)]
    return (*cases("smoke"), *full, *_many(first + len(full)))


def _case(number, text, dtype, kind, level):
    choose = random.Random(number).choice
    kind = kind or choose(KINDS)
    dtypes = [each for each in DTYPES if each != "float16" or kind not in TOO_SMALL]
    return Case(
        text=text,
        text_out=choose((text, text, *OTHERS)),
        dtype=dtype or choose(dtypes),
        dtype_out=choose(DTYPES),
        sizes=choose(sizes_of(Codec.parse(text).block or 100)),
        kind=kind,
        num_wires=choose(WIRES),
        divisor=choose(DIVISORS),
        seed=choose(SEEDS),
        number=number,
        level=level,
    )


def _many(number):
    """More segments, and more wires, than one launch of a kernel takes."""
    segments = tuple(7 * i % 50 for i in range(700))
    for i, text in enumerate(texts(64)):
        case = _case(number + i, text, "float32", "normal", "full")
        yield Case(**{**vars(case), "sizes": segments})
        yield Case(**{**vars(case), "sizes": (300, 45), "num_wires": 1024, "divisor": 1024})


def outcomes(kernels, call, inputs=None):
    """What each kernel writes, by its name, with the bytes around it, which must stay."""
    values, wires, before = inputs or call.inputs()
    message, codec, codec_out, seed = call.message, call.codec, call.codec_out, call.seed
    dtype, starts, lengths = call.dtype_out, message.starts, message.lengths
    wire, wire_buffer = _framed(message.wire_nbytes, message.offset)
    kernels.encode(codec, values, message.dtype, starts, lengths, wire, seed)
    decoded, decoded_buffer = _framed(before, message.offset + 1)
    kernels.decode(codec, wires[0], starts, lengths, decoded, dtype)
    total, total_buffer = _framed(before, message.offset + 2)
    kernels.decode_reduce(codec, wires, starts, lengths, total, dtype, call.divisor)
    passed_on, passed_on_buffer = _framed(layout(codec_out, lengths).nbytes, message.offset + 3)
    kernels.decode_reduce_encode(codec, wires, codec_out, lengths, passed_on, seed)
    return {
        "encode": wire_buffer.tobytes(),
        "decode": decoded_buffer.tobytes(),
        "decode_reduce": total_buffer.tobytes(),
        "decode_reduce_encode": passed_on_buffer.tobytes(),
    }


def expected(call, inputs=None):
    """What ``outcomes`` has to be."""
    values, wires, before = inputs or call.inputs()
    message, codec, lengths = call.message, call.codec, call.message.lengths.tolist()
    loaded = oracle.load(values, message.dtype)
    spans = zip(message.starts.tolist(), lengths, strict=True)
    segments = [loaded[start : start + length] for start, length in spans]
    decoded = [oracle.decode(codec, wire, lengths) for wire in wires]
    total = oracle.reduced(decoded, call.divisor)
    passed_on = oracle.encode(call.codec_out, oracle.reduced(decoded), call.seed)
    written = {
        "encode": oracle.encode(codec, segments, call.seed),
        "decode": _placed(call, before, decoded[0], saturate=True),
        "decode_reduce": _placed(call, before, total, saturate=False),
        "decode_reduce_encode": passed_on,
    }
    frames = zip(written.items(), range(message.offset, message.offset + 4), strict=True)
    return {
        name: _framed(np.frombuffer(content, np.uint8), offset)[1].tobytes()
        for (name, content), offset in frames
    }


def differences(kernels, call, wanted, inputs=None):
    """The names of the kernels that do not write what is wanted."""
    written = outcomes(kernels, call, inputs)
    return [name for name in wanted if written[name] != wanted[name]]


def _placed(call, before, segments, *, saturate):
    """The bytes of memory after segments were written to it."""
    size, memory_after = oracle.ITEMSIZE[call.dtype_out], bytearray(before.tobytes())
    for start, values in zip(call.message.starts.tolist(), segments, strict=True):
        stored = oracle.store(values, call.dtype_out, saturate=saturate)
        memory_after[start * size : (start + len(values)) * size] = stored
    return bytes(memory_after)


def _framed(content, offset):
    """Memory of a content, or of a number of bytes, inside a buffer with a margin on each side."""
    nbytes = content if isinstance(content, int) else content.nbytes
    buffer = memory(nbytes + 2 * MARGIN, offset % 16, fill=0xA5)
    inside = buffer[MARGIN : MARGIN + nbytes]
    if not isinstance(content, int):
        inside[:] = content
    return inside, buffer
