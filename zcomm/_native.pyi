from collections.abc import Sequence

from zcomm.codecs.wire import Bytes, Lengths

def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def select(name: str) -> bool: ...
def encode(
    format: int,
    block: int,
    x: Bytes,
    dtype: int,
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
) -> int: ...
def decode(
    format: int,
    block: int,
    wire: Bytes,
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
    dtype: int,
) -> int: ...
def decode_reduce(
    format: int,
    block: int,
    wires: Sequence[Bytes],
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
    dtype: int,
    divisor: int,
) -> int: ...
def decode_reduce_encode(
    format_in: int,
    block_in: int,
    wires: Sequence[Bytes],
    format_out: int,
    block_out: int,
    lengths: Lengths,
    out: Bytes,
) -> int: ...
