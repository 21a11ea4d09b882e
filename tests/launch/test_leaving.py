"""A process ends after those of its threads that are inside torch's code."""

import sys

import pytest

GLOO = """
import hashlib, os, threading, MODULE
large = bytes(400_000_000)
def thread():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
        name.write("pt_gloo_runloop")
    started.set()
    hashlib.sha256(large)  # without the interpreter's lock
    os.write(1, b"freed")
started = threading.Event()
threading.Thread(target=thread, daemon=True).start()
started.wait()
"""

MESSAGE = """
import os, time, numpy as np
from zcomm.transports.process_group import ProcessGroupTransport
class Work:
    def wait(self, limit):
        time.sleep(0.3)
        os.write(1, b"sent")
class Group:
    def rank(self): return 0
    def size(self): return 2
    def send(self, tensors, peer, tag): return Work()
transport = ProcessGroupTransport(Group())
transport.send({1: np.zeros(4, np.uint8)}, 0)
"""

LOST = """
import atexit, threading, time, numpy as np
import zcomm.leaving
from zcomm.transports.process_group import ProcessGroupTransport
class Group:
    def rank(self): return 0
    def size(self): return 2
    def send(self, tensors, peer, tag): return self
    def wait(self, limit): threading.Event().wait()
transport = ProcessGroupTransport(Group())
transport.send({1: np.zeros(4, np.uint8)}, 0)
if GIVEN_UP:
    transport.cancel()
start = time.monotonic()
atexit.unregister(zcomm.leaving._leave)
zcomm.leaving._leave()
print(time.monotonic() - start)
"""

# What was registered before zcomm was imported runs after zcomm has left.
LATE = """
import atexit
@atexit.register
def last():
    late = transport.send({1: memory}, 0)
    while not late.done():
        late.wait(1)
""" + MESSAGE.replace("transport.send({1:", "memory = np.zeros(4, np.uint8); transport.send({1:")


@pytest.mark.skipif(sys.platform != "linux", reason="the states of threads are Linux's")
@pytest.mark.parametrize("module", ["zcomm.work", "zcomm.torch", "zero"])
def test_a_process_ends_after_what_gloo_frees(launch, module):
    run = launch("-c", GLOO.replace("MODULE", module), timeout=60)
    assert (run.returncode, run.stdout) == (0, "freed"), run.stderr


@pytest.mark.parametrize("end", ["", "transport.close()"])
def test_a_process_ends_after_the_message_that_nobody_awaits(launch, end):
    run = launch("-c", MESSAGE + end, timeout=60)
    assert (run.returncode, run.stdout) == (0, "sent"), run.stderr


def test_a_message_after_all_were_awaited_is_sent(launch):
    run = launch("-c", LATE, timeout=60)
    assert (run.returncode, run.stdout) == (0, "sentsent"), run.stderr


@pytest.mark.parametrize("given_up", [False, True])
def test_a_message_that_never_arrives_keeps_no_process_from_ending(launch, given_up):
    run = launch("-c", LOST.replace("GIVEN_UP", str(given_up)), timeout=60)
    assert run.returncode == 0, run.stderr
    assert (float(run.stdout) < 1.0) == given_up
