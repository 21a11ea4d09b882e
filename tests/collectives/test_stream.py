"""What becomes of a stream's worker thread when its process, or a fork of it, ends."""

LAST = """
import atexit, threading, time
atexit.register(lambda: print([t.name for t in threading.enumerate() if "zcomm" in t.name]))
from zcomm.work import Stream
stream = Stream()
stream.submit(lambda: print("first"))
stream.submit(lambda: (time.sleep(0.3), print("last")))
"""

HANGS = """
import threading, zcomm.work
zcomm.leaving.SECONDS = 0.2
streams = [zcomm.work.Stream() for _ in range(2)]
for stream in streams:
    stream.submit(threading.Event().wait)
"""

FORKED = """
import os, sys
from zcomm.work import Stream
stream = Stream()
stream.submit(lambda: None).wait()
stream._lock.acquire()  # as the worker thread may have it when somebody forks
child = os.fork()
if child == 0:
    sys.exit(7)
stream._lock.release()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_ends_after_what_its_stream_has_to_do(launch):
    run = launch("-c", LAST, timeout=60)
    assert (run.returncode, run.stdout.split("\n")) == (0, ["first", "last", "[]", ""]), run.stderr


def test_a_stream_that_hangs_keeps_no_process_from_ending(launch):
    assert launch("-c", HANGS, timeout=60).returncode == 0


def test_a_fork_ends_though_it_has_no_worker_thread(launch):
    run = launch("-c", FORKED, timeout=60)
    assert run.stdout.strip() == "7", run.stderr
