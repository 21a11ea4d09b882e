from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zcomm.codecs.wire import Bytes, Lengths

Counters = npt.NDArray[np.uint64]

# Format, block, whether rounding is stochastic, whether values are transformed.
Description = tuple[int, int, bool, bool]

def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def select(name: str) -> bool: ...

# Sets from how many bytes on outputs go past the caches, and returns what it was.
def stream_from(nbytes: int) -> int: ...
def encode(
    codec: Description,
    x: Bytes,
    dtype: int,
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
    seed: int,
) -> int: ...
def decode(
    codec: Description,
    wire: Bytes,
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
    dtype: int,
) -> int: ...
def decode_reduce(
    codec: Description,
    wires: Sequence[Bytes],
    starts: Lengths,
    lengths: Lengths,
    out: Bytes,
    dtype: int,
    divisor: int,
) -> int: ...

class Reduction:
    def __init__(
        self,
        codec: Description,
        wires: Sequence[Bytes],
        starts: Lengths,
        lengths: Lengths,
        out: Bytes,
        dtype: int,
        divisor: int,
    ) -> None: ...
    def __call__(self) -> int: ...

def decode_reduce_encode(
    codec_in: Description,
    wires: Sequence[Bytes],
    codec_out: Description,
    lengths: Lengths,
    out: Bytes,
    seed: int,
) -> int: ...

# A region: number of a memory, start and stop in bytes; a negative stop is its end.
Where = tuple[int, int, int]
Rows = npt.NDArray[np.int64]

# Jobs of kernels, run in their order on memories given as rows (address, bytes), see bind.
class Program:
    def __init__(self) -> None: ...
    def copy(self, source: Where, target: Where) -> None: ...
    def encode(
        self,
        codec: Description,
        x: Where,
        dtype: int,
        starts: Sequence[int],
        lengths: Sequence[int],
        out: Where,
    ) -> None: ...
    def decode(
        self,
        codec: Description,
        wire: Where,
        starts: Sequence[int],
        lengths: Sequence[int],
        out: Where,
        dtype: int,
    ) -> None: ...
    def decode_reduce(
        self,
        codec: Description,
        wires: Sequence[Where],
        starts: Sequence[int],
        lengths: Sequence[int],
        out: Where,
        dtype: int,
        divisor: int,
    ) -> None: ...
    def decode_reduce_encode(
        self,
        codec_in: Description,
        wires: Sequence[Where],
        codec_out: Description,
        lengths: Sequence[int],
        out: Where,
    ) -> None: ...
    def run(self, rows: Rows, seeds: Sequence[int]) -> int: ...

def bind(rows: Rows, row: int, array: Bytes) -> None: ...

# Copies runs of bytes of another process, one after the other, to runs of out. Returns 0, an errno,
# or -1 where the system delivers no more. ValueError: runs that do not fit.
def read_process(
    pid: int, addresses: Lengths, lengths: Lengths, out: Bytes, starts: Lengths, sizes: Lengths
) -> int: ...

# Lets other processes of this user read this one, or no longer (Yama). Returns 0 or an errno.
def permit_reading(any: bool) -> int: ...

# 1: on huge pages, 0: not, -1: the system does not say. Looks at `most` bytes in the middle.
def on_huge_pages(memory: Bytes, most: int) -> int: ...

# Counters that processes share: a load acquires, a store releases. IndexError: there is none.
def load_counter(counters: Counters, index: int) -> int: ...
def store_counter(counters: Counters, index: int, value: int) -> None: ...
def equal_counters(counters: Counters, values: Counters) -> bool: ...
