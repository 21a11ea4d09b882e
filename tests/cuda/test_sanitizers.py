"""The kernels under sanitizers: addresses and undefined behaviour, then races between real threads.

Each build runs the small table of cases in a process of its own. Memory is allocated exactly as
long as it is, so that a read behind its end shows.
"""

import os
import subprocess
import sys

import pytest

from tests.codecs.test_sanitizers import runtime_of
from tests.cuda import emulator

PROGRAM = """
import sys
import numpy as np
from tests.codecs.cases import cases, differences, outcomes
from tests.codecs.inputs import memory
from tests.cuda.emulator import EmulatedDevice
from tests.cuda.on_device import OnDevice
from zcomm.codecs import cuda, instances, parameters, reference
from zcomm.codecs.wire import layout

library, threads, most_segments = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cuda.THREADS = parameters.THREADS = threads
parameters.BLOCKS_PER_MULTIPROCESSOR = 2
device = EmulatedDevice(library)
kernels = [OnDevice(device, margin=0, aligned=aligned) for aligned in (False, True)]
for case in cases("smoke"):
    if len(case.sizes) <= most_segments:
        inputs = case.call.inputs()
        wanted = outcomes(reference, case.call, inputs)
        assert differences(kernels[case.number % 2], case.call, wanted, inputs) == [], case
        print(case, flush=True)
for codec_in, codec_out in instances.FAST_PASSES:
    lengths = np.array([5 * codec_out.block + 75])
    wires = [memory(layout(codec_in, lengths).nbytes) for _ in range(5)]
    written, expected = (memory(layout(codec_out, lengths).nbytes) for _ in range(2))
    kernels[1].decode_reduce_encode(codec_in, wires, codec_out, lengths, written)
    reference.decode_reduce_encode(codec_in, wires, codec_out, lengths, expected)
    assert (written == expected).all()
"""


def run(library, preload, options, threads, most_segments):
    """Run the program in a child; return what it printed, and how it ended."""
    environment = {**os.environ, **options, "PYTHONPATH": str(emulator.ROOT)}
    environment["LD_PRELOAD"] = " ".join(map(runtime_of, preload))
    command = [sys.executable, "-c", PROGRAM, library, str(threads), str(most_segments)]
    child = subprocess.run(
        [*map(str, command)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return child.returncode, child.stdout


@pytest.mark.sanitizer
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(emulator.why_not), reason=str(emulator.why_not))
@pytest.mark.parametrize(
    ("sanitizer", "preload", "options", "threads", "most_segments", "least_cases"),
    [
        ("address", ("asan", "ubsan"), {"ASAN_OPTIONS": "detect_leaks=0"}, 256, 99, 90),
        ("thread", ("tsan",), {"TSAN_OPTIONS": "halt_on_error=1"}, 64, 5, 50),
    ],
)
def test_no_report(tmp_path, sanitizer, preload, options, threads, most_segments, least_cases):
    library = emulator.build(tmp_path, sanitizer)
    status, printed = run(library, preload, options, threads, most_segments)
    assert status == 0, printed[-5000:]
    assert printed.count("\n") >= least_cases
