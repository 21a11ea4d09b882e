"""Run PyTorch's own distributed tests on gloo and on zcomm, and print both counts.

``python -m tests.torch.suite`` runs all of them; ``--slice 0/8`` an eighth, ``--only NAME`` one.
Needs expecttest. The exit code is 1 when a test passes on gloo, does not on zcomm, and is not on
the list in ``expected.py``.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

from tests.torch.suite.expected import NOT_PASSED

ROOT = Path(__file__).resolve().parents[3]
SILENCE_SECONDS = 90
"""A test that says nothing for so long hangs."""


class Verdict(NamedTuple):
    """How a test went on all ranks: passed, skipped, failed or hung."""

    word: str
    reason: str = ""


def names() -> list[str]:
    os.environ.setdefault("BACKEND", "gloo")
    os.environ.setdefault("WORLD_SIZE", "2")
    from torch.testing._internal.distributed import distributed_test

    base = distributed_test.DistributedTest._DistTestBase
    return sorted(name for name in dir(base) if name.startswith("test_"))


class Rank:
    """A process that runs tests, and what it has said."""

    def __init__(self, backend: str, rank: int, size: int, folder: Path, tests: list[str]) -> None:
        command = [sys.executable, "-m", "tests.torch.suite.rank", backend, str(rank), str(size)]
        log = (folder / f"{backend}.{rank}.log").open("a")
        self.process = subprocess.Popen(
            [*command, str(folder / backend)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdin is not None
        self.process.stdin.write("\n".join(tests))
        self.process.stdin.close()
        self.said: dict[str, Verdict] = {}
        self.spoke = threading.Event()
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            name, _, rest = line.rstrip("\n").partition("\t")
            word, tab, reason = rest.partition("\t")
            if tab:
                self.said[name] = Verdict(word, reason)
            self.spoke.set()
        self.process.wait()
        self.spoke.set()


def run(backend: str, size: int, tests: list[str], folder: Path) -> dict[str, Verdict]:
    """Run tests on ranks that are started again after a failure."""
    verdicts: dict[str, Verdict] = {}
    while tests:
        ranks = [Rank(backend, rank, size, folder, tests) for rank in range(size)]
        failed = _watch(ranks, tests, verdicts)
        for rank in ranks:
            rank.process.kill()
        tests = tests[tests.index(failed) + 1 :] if failed else []
    return verdicts


def _watch(ranks: list[Rank], tests: list[str], verdicts: dict[str, Verdict]) -> str | None:
    """Collect verdicts until all tests are done; return the one that ended the ranks, if any."""
    for name in tests:
        for rank in ranks:
            while name not in rank.said:
                rank.spoke.clear()
                if name in rank.said:
                    break
                if rank.process.poll() is not None:
                    rank.listener.join(30)  # what it said before it ended counts
                    if name in rank.said:
                        break
                    verdicts[name] = _worst(ranks, name) or Verdict("failed", "the process ended")
                    return name
                if not rank.spoke.wait(SILENCE_SECONDS):
                    verdicts[name] = _worst(ranks, name) or Verdict("hung")
                    return name
        verdicts[name] = _worst(ranks, name) or Verdict("passed")
        print(f"# {name}: {verdicts[name].word}", file=sys.stderr, flush=True)
        if verdicts[name].word == "failed":
            return name
    return None


def _worst(ranks: list[Rank], name: str) -> Verdict | None:
    found = [rank.said[name] for rank in ranks if name in rank.said]
    for word in ("failed", "skipped"):
        for verdict in found:
            if verdict.word == word:
                return verdict
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="+", default=["gloo", "zcomm"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slice", default="0/1", help="K/N: every N-th test, from K")
    parser.add_argument("--only", nargs="*", help="names of tests")
    parser.add_argument("--logs", type=Path, help="folder for what the ranks print")
    chosen = parser.parse_args()
    part, parts = map(int, chosen.slice.split("/"))
    tests = chosen.only or names()[part::parts]
    folder = chosen.logs or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for backend in chosen.backends:
        results[backend] = run(backend, chosen.ranks, tests, folder)
        words = [verdict.word for verdict in results[backend].values()]
        counts = ", ".join(f"{words.count(word)} {word}" for word in sorted(set(words)))
        print(f"{backend}: {len(words)} tests on {chosen.ranks} ranks: {counts}", flush=True)
    return report(results)


def report(results: dict[str, dict[str, Verdict]]) -> int:
    """Say what passes on gloo and not on zcomm; return the exit code."""
    wrong = 0
    for name, verdict in results.get("zcomm", {}).items():
        before = results.get("gloo", {}).get(name, Verdict("passed"))
        if before.word != "passed" or verdict.word == "passed":
            continue
        listed = NOT_PASSED.get(name)
        wrong += listed is None
        why = listed or f"NOT ON THE LIST: {verdict.reason}"
        print(f"  {name}: {verdict.word} on zcomm: {why}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
