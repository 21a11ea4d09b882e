"""Values of every dtype, their bits, and roundings written out by hand.

A *stored* array is NumPy memory with the bits of a dtype: float16 as itself, bfloat16 as uint16.
``wide`` values are what sums are made of: float32 for 16-bit floating point, else the type itself.
"""

import functools
import sys
import threading

import numpy as np
import torch

from tests.device.fake import FakeArray, as_fake

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
COMPLEX = ("complex64", "complex128")
EVERY = (*FLOATS, *INTEGERS, "bool", *COMPLEX)
HALF = ("float16", "bfloat16")

# Every pair that exists: NumPy has no bfloat16.
KINDS = [(kind, dtype) for kind in ("numpy", "torch") for dtype in EVERY]
KINDS.remove(("numpy", "bfloat16"))

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "complex64": 8}
ITEMSIZE |= {"int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1, "complex128": 16}

ARRAYS = {"numpy": np.ndarray, "torch": torch.Tensor, "fake": FakeArray, "cuda": torch.Tensor}
ARRAYS["accel"] = torch.Tensor
TORCH_DEVICES = ("cuda", "accel")

CANONICAL_NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}


def round_to_bfloat16(values):
    """Return float32 values as bfloat16 bits: to nearest, ties to even, one form of NaN."""
    words = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def store(values, dtype):
    """Round wide values to a dtype and return the stored array; NaN has one form."""
    values = np.asarray(values)
    if dtype == "bfloat16":
        return round_to_bfloat16(values.astype(np.float32))
    with np.errstate(over="ignore", invalid="ignore"):
        stored = values.astype(dtype)
    if dtype in CANONICAL_NAN:
        bits = stored.view(f"uint{8 * ITEMSIZE[dtype]}")
        bits[...] = np.where(np.isnan(stored), bits.dtype.type(CANONICAL_NAN[dtype]), bits)
    return stored


def widen(stored, dtype):
    """Return what a stored array means, in the type that sums are made in."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32) if dtype == "float16" else stored


def exact(stored, dtype):
    """Return what a stored array of floating point means, in float64."""
    return widen(stored, dtype).astype(np.float64)


def as_array(stored, dtype, kind):
    """Return a new array with these bits, of a kind: that of a device, "numpy", "torch", "cupy"."""
    if kind == "numpy":
        return stored.copy()
    if kind in TORCH_DEVICES:
        return as_array(stored, dtype, "torch").to(kind)
    if kind == "cupy":
        return sys.modules["cupy"].asarray(stored)
    if kind == "fake":
        return as_fake(stored, dtype)
    if dtype == "bfloat16":
        return as_array(stored.view(np.int16), "int16", kind).view(torch.bfloat16)
    return torch.empty(stored.shape, dtype=getattr(torch, dtype)).copy_(torch.from_numpy(stored))


def stored_in(array):
    """Return (stored array, dtype name) of an array of any kind."""
    if isinstance(array, np.ndarray):
        return array, array.dtype.name
    if isinstance(array, FakeArray):
        return array.numpy(), array.dtype
    if not isinstance(array, torch.Tensor):
        return array.get(), array.dtype.name  # CuPy
    name = str(array.dtype).removeprefix("torch.")
    array = array.detach().contiguous().cpu()
    if name == "bfloat16":
        return array.view(torch.int16).numpy().view(np.uint16), name
    return array.numpy(), name


def filled(shape, dtype, kind, value=0):
    """Return an array that holds one value everywhere."""
    return as_array(store(np.full(shape, value), dtype), dtype, kind)


def assert_bits(array, expected, dtype, kind=None):
    """Compare an array with a stored one: kind, dtype, shape and every bit."""
    if kind is not None:
        assert isinstance(array, ARRAYS[kind] if kind in ARRAYS else sys.modules["cupy"].ndarray)
        assert kind not in TORCH_DEVICES or array.device.type == kind
    found, name = stored_in(array)
    assert name == dtype
    assert found.shape == expected.shape
    same = raw(found) == raw(expected)
    assert same.all(), (
        f"{np.count_nonzero(~same)} of {same.size} bytes differ, first at byte {np.argmin(same)}: "
        f"{found.reshape(-1)[np.argmin(same) // found.itemsize]} instead of "
        f"{expected.reshape(-1)[np.argmin(same) // found.itemsize]}"
    )


def raw(stored):
    """Return the bytes of a stored array, one-dimensional."""
    return np.ascontiguousarray(stored).reshape(-1).view(np.uint8)


def once(function):
    """Let all threads share the result of a small call: each rank of a test expects the same."""
    lock, results = threading.RLock(), {}

    def key(value):
        if isinstance(value, np.ndarray):
            return value.shape, value.dtype.str, value.tobytes()
        return tuple(map(key, value)) if isinstance(value, list | tuple) else value

    @functools.wraps(function)
    def call(*arguments, **options):
        if any(isinstance(value, np.ndarray) and value.size > 10**5 for value in arguments):
            return function(*arguments, **options)
        asked = key(arguments), tuple(sorted((name, key(v)) for name, v in options.items()))
        with lock:
            if len(results) > 500:
                results.clear()
            if asked not in results:
                results[asked] = function(*arguments, **options)
            return results[asked]

    return call


@once
def drawn(shape, dtype, seed, rank):
    """Return the stored values of one rank: magnitudes spread, so that the order of a sum shows."""
    rng = np.random.default_rng([seed, rank])
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    values = _spread(rng, shape)
    if dtype in COMPLEX:
        values = values + 1j * _spread(rng, shape)
    return store(values, dtype)


def _spread(rng, shape):
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, shape)
