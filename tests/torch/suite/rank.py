"""One rank of a run: it runs the named tests of PyTorch's suite, one after the other.

Usage: rank.py BACKEND RANK SIZE FOLDER < names.

The suite knows backends by name and skips most tests for one that it does not know: here it is
always told "gloo", while the default group is that of BACKEND. A test that makes a group of backend
"gloo" by itself gets one. PyTorch starts new processes for every test; here they live on, and every
test has a process group, a store and a folder of its own. A line per test tells how it went: NAME
TAB passed, skipped or failed TAB reason.
"""

import os
import sys
import tempfile
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

BACKEND, RANK, SIZE, FOLDER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
os.environ |= {
    "BACKEND": "gloo",
    "WORLD_SIZE": str(SIZE),
    "TEMP_DIR": str(FOLDER),
    "MASTER_ADDR": "localhost",
    "TORCH_DIST_INIT_BARRIER": "1",
}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

import zcomm.torch  # noqa: E402, F401

LIMIT = timedelta(seconds=30)


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """The suite, in processes that exist already."""

    def setUp(self) -> None:
        """Start no processes."""


def run(name: str) -> tuple[str, str]:
    folder = FOLDER / name
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(folder)
    distributed_test.Barrier.barrier_id = 0
    test = Suite(name)
    test.rank = RANK
    test.file_name = str(folder / "store")
    test.skip_return_code_checks = []
    torch.manual_seed(0)
    try:
        store = dist.FileStore(test.file_name, SIZE)
        limit = distributed_test.CUSTOM_PG_TIMEOUT.get(name)
        timeout = LIMIT if limit is None else timedelta(seconds=limit)
        dist.init_process_group(BACKEND, store=store, rank=RANK, world_size=SIZE, timeout=timeout)
        test._barrier()
        getattr(test, name)()
        test._barrier()  # nobody leaves the group while another's test runs
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        reasons = {each.exit_code: each.message for each in common_distributed.TEST_SKIPS.values()}
        return ("skipped", reasons[end.code]) if end.code in reasons else ("failed", f"exit {end}")
    except BaseException as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
    return "passed", ""


def main() -> None:
    for name in sys.stdin.read().split():
        print(f"### {name}", file=sys.stderr, flush=True)
        with patch.object(tempfile, "tempdir", str(FOLDER)):
            verdict, reason = run(name)
        sys.__stdout__.write(f"{name}\t{verdict}\t{reason}\n")
        sys.__stdout__.flush()
        if verdict == "failed":
            os._exit(1)  # what it left behind is of no use to the next test
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
