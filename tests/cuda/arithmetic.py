"""What the functions of codec.h that differ on a device have to give, from NumPy's arithmetic.

``FUNCTIONS`` maps the name of each to (a, b, c, expected): arrays of 32-bit patterns, among them
every bfloat16 value and every float16 value. NaN may have any form.
"""

from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("arithmetic.cu")
FLOAT_RESULTS = ("ADD", "SUB", "MUL", "QUOTIENT", "FUSED", "INVERSE", "FROM_FP16")


def instance(name):
    return f"zc::apply<zc::{name}>"


def cases():
    """The inputs and the expected output of every function, by its name."""
    rng = np.random.default_rng(11)
    halves = np.arange(65536, dtype=np.uint32)
    every = halves << 16
    other = rng.permutation(every) | rng.integers(0, 65536, 65536, np.uint32)
    a, b = every.view(np.float32), other.view(np.float32)
    with np.errstate(all="ignore"):
        results = {"ADD": a + b, "SUB": a - b, "MUL": a * b, "QUOTIENT": a / b}
        found = {name: (every, other, other, value) for name, value in results.items()}
    with np.errstate(invalid="ignore"):
        widened = halves.astype(np.uint16).view(np.float16).astype(np.float32)
    found["FROM_FP16"] = (halves, halves, halves, widened)
    return found | _fused(rng) | _inverse(every) | _to_fp16(every, other) | _floor(rng) | _high(rng)


def _fused(rng):
    """Products of few bits and a third number near them: their sum is exact in float64."""
    a, b = (rng.integers(-255, 256, 65536).astype(np.float32) for _ in range(2))
    c = (rng.integers(-(2**23), 2**23, 65536) * 2.0 ** rng.integers(-20, 20, 65536)).astype(
        np.float32
    )
    expected = (a.astype(np.float64) * b + c).astype(np.float32)
    return {"FUSED": (*(x.view(np.uint32) for x in (a, b, c)), expected)}


def _inverse(every):
    values = every.view(np.float32)
    scales = every[np.isfinite(values) & (np.abs(values) >= np.float32(2.0**-100))]
    return {"INVERSE": (scales, scales, scales, np.float32(1) / scales.view(np.float32))}


def _to_fp16(every, other):
    values = np.concatenate([every, other]).view(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    pattern = values.view(np.uint32)
    return {"TO_FP16": (pattern, pattern, pattern, expected)}


def _floor(rng):
    whole = np.arange(-128, 129, dtype=np.float32)
    beside = [np.nextafter(whole, np.float32(side)) for side in (-1e9, 1e9)]
    tiny = np.float32([1e-45, -1e-45, 1e-38, -1e-38, 0.0, -0.0])
    values = np.concatenate([whole, *beside, tiny, rng.uniform(-128, 128, 65536)]).astype(
        np.float32
    )
    expected = (np.floor(values).astype(np.int64) + 0x4B400000).astype(np.uint32)
    pattern = values.view(np.uint32)
    return {"FLOOR": (pattern, pattern, pattern, expected)}


def _high(rng):
    a, b = (rng.integers(0, 2**32, 4096, np.uint64) for _ in range(2))
    inputs = a.astype(np.uint32), b.astype(np.uint32)
    return {"HIGH_PRODUCT": (*inputs, inputs[0], (a * b >> np.uint64(32)).astype(np.uint32))}


def same(name, written, expected):
    """Which results are as expected."""
    if name not in FLOAT_RESULTS:
        return written == expected
    both_nan = np.isnan(written.view(np.float32)) & np.isnan(expected)
    return (written == expected.view(np.uint32)) | both_nan


def outcome(device, launch, inputs):
    """What a device writes; ``launch`` takes the grid, threads and arguments of the kernel."""
    from zcomm.device import from_host, on_host

    memories = []
    for pattern in inputs:
        memories.append(device.empty(pattern.nbytes))
        from_host(memories[-1], pattern.view(np.uint8))
    out = device.empty(inputs[0].nbytes)
    addresses = (np.uint64(memory.pointer) for memory in (*memories, out))
    launch(4, 64, (*addresses, np.int64(inputs[0].size)))
    return on_host(out).view(np.uint32)
