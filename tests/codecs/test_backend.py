"""The choice of kernels by environment variables, and that they let other threads run."""

import logging
import sys
import threading

import numpy as np
import pytest

from zcomm import Codec, CodecError
from zcomm.codecs import backend, kernels, native, reference


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.delenv("ZCOMM_CODEC_BACKEND", raising=False)
    monkeypatch.delenv("ZCOMM_CPU", raising=False)
    yield monkeypatch
    native.select("")


@pytest.fixture
def without_native(environment):
    environment.setitem(sys.modules, "zcomm.codecs.native", None)
    backend._warn_once.cache_clear()
    yield environment
    backend._warn_once.cache_clear()


def test_choice(environment):
    assert kernels() is native
    assert native.instruction_set() == native.instruction_sets()[0]
    environment.setenv("ZCOMM_CODEC_BACKEND", "numpy")
    assert kernels() is reference
    environment.setenv("ZCOMM_CODEC_BACKEND", "native")
    environment.setenv("ZCOMM_CPU", "baseline")
    assert kernels() is native
    assert native.instruction_set() == "baseline"


def test_unknown_values(environment):
    environment.setenv("ZCOMM_CODEC_BACKEND", "rocm")
    with pytest.raises(ValueError, match="ZCOMM_CODEC_BACKEND='rocm': possible are numpy, native"):
        kernels()
    environment.setenv("ZCOMM_CPU", "neon")
    for choice in ("native", "numpy"):
        environment.setenv("ZCOMM_CODEC_BACKEND", choice)
        with pytest.raises(ValueError, match="ZCOMM_CPU='neon': possible are avx512, avx2, base"):
            kernels()


def test_kernels_of_a_device_do_not_read_host_memory(environment):
    environment.setenv("ZCOMM_CODEC_BACKEND", "cuda")
    with pytest.raises(CodecError, match="an array lies on the host; possible for it are numpy"):
        Codec("int8").encode(np.ones(3, np.float32))


def test_instruction_set_that_the_cpu_lacks(environment):
    environment.setenv("ZCOMM_CPU", "avx512")
    with environment.context() as patch:
        patch.setattr(native._native, "select", lambda name: False)
        with pytest.raises(CodecError, match=r"ZCOMM_CPU=avx512: this machine has .*baseline"):
            kernels()


def test_native_kernels_that_are_missing_but_forced(without_native):
    without_native.setenv("ZCOMM_CODEC_BACKEND", "native")
    with pytest.raises(CodecError, match="ZCOMM_CODEC_BACKEND=native, but the native kernels"):
        kernels()


def test_numpy_with_one_warning_where_native_is_missing(without_native, caplog):
    with caplog.at_level(logging.WARNING, logger="zcomm"):
        assert kernels() is reference
        assert kernels() is reference
    assert len([r for r in caplog.records if "using NumPy" in r.getMessage()]) == 1


def progress_during(call):
    """How many steps this thread takes between the start and the end of ``call`` in another."""
    inside, steps = threading.Event(), 0

    def run():
        inside.set()
        call()
        inside.clear()

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait(0.01)
    while inside.is_set():
        steps += 1
    thread.join()
    return steps


def test_other_threads_run_during_every_kernel(environment):
    chosen, codec, numel = kernels(), Codec("int8"), 1 << 22
    starts, lengths = np.zeros(1, np.int64), np.array([numel])
    x, wire = np.ones(4 * numel, np.uint8), np.zeros(codec.wire_nbytes(numel), np.uint8)
    out = wire.copy()
    calls = [
        lambda: chosen.encode(codec, x, "float32", starts, lengths, wire),
        lambda: chosen.decode(codec, wire, starts, lengths, x, "float32"),
        lambda: chosen.decode_reduce(codec, [wire] * 9, starts, lengths, x, "float32", 9),
        lambda: chosen.decode_reduce_encode(codec, [wire] * 9, codec, lengths, out),
    ]
    for call in calls:
        assert max(progress_during(call) for _ in range(20)) > 100
