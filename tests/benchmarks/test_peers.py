"""The comparison with peers: what is read, its rows, ratios and verdicts, and who is absent."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from benchmarks.launch import UsageError
from benchmarks.peers import driver, launch, meters, rank, registry, results
from benchmarks.peers.options import Job, parse
from benchmarks.peers.rank import Report
from benchmarks.peers.results import Failed, Row, ends, judge, merge, ratios
from benchmarks.training import data

TINY = "--width 64 --depth 1 --tokens 8 --steps 2 --warmup 1"


def row(name, *, speed=1.0, link=1.0, losses=(2.0, 1.0)):
    return Row(name, 1.0, 0.5, 0.3, 0.2, speed, link, None, 1, losses[-1], tuple(losses))


def reports():
    """Two nodes of two ranks, three steps: wall, core, queue."""
    steps = {
        0: [(1.0, 0.2, 0.1), (2.0, 0.5, 0.0), (9.0, 0.9, 0.0)],
        1: [(1.5, 0.3, 0.0), (1.0, 0.5, 0.5), (9.0, 0.9, 0.0)],
        2: [(1.0, 0.2, 0.2), (1.5, 0.5, 0.0), (9.0, 0.9, 0.0)],
        3: [(1.5, 0.2, 0.8), (1.5, 0.0, 0.4), (9.0, 0.9, 0.0)],
    }
    return [
        Report(r, r % 2, steps[r], [4.0 + r, 2.0 + r], 300 + 60 * r, 90 * r, 1000 + r)
        for r in range(4)
    ]


def test_a_row_is_what_its_ranks_measured():
    made = merge("zero3", reports(), tokens=512, alone_s=0.5)
    # The slowest rank of each step takes 1.5, 2 and 9 s; busy shares are 2/5, 2.4/6 and 3.6/36.
    assert made.step_s == 2.0
    assert made.compute_s + made.other_s == pytest.approx(2.0 * 2 / 5)
    assert (made.compute_s, made.other_s) == (0.5, pytest.approx(0.3))
    assert made.comm_s == pytest.approx(2.0 * 3 / 5)
    assert made.tokens_per_s == 256
    # Ranks 0 and 2 read the counters of their nodes: (300 + 420) / 2 nodes / 3 steps.
    assert made.link_bytes == pytest.approx(120)
    assert made.counted_bytes == pytest.approx(90 * 6 / 2 / 3)
    assert made.peak_rss == 1003
    assert made.losses == (5.5, 3.5)
    assert made.loss == 3.5


def test_the_training_alone_is_all_computing_and_counts_nothing():
    silent = [dataclasses.replace(report, counted_nbytes=None) for report in reports()]
    made = merge("alone", silent, tokens=512)
    assert made.other_s == 0.0
    assert made.compute_s == pytest.approx(0.8)
    assert made.counted_bytes is None


def test_no_more_than_it_was_busy_is_computing():
    made = merge("zero3", reports(), tokens=512, alone_s=100.0)
    assert (made.compute_s, made.other_s) == (pytest.approx(0.8), 0.0)


def test_ratios_are_of_ours_to_each_baseline_that_ran():
    rows = {
        "fsdp2": row("fsdp2", speed=75.0, link=152.0),
        "ddp": row("ddp", speed=100.0, link=76.0),
        "zero3": row("zero3", speed=150.0, link=76.0),
        "zeropp": row("zeropp", speed=375.0, link=19.0),
    }
    found = {(r.name, r.baseline): (r.speed, r.link) for r in ratios(rows)}
    assert found == {("zero3", "fsdp2"): (2.0, 0.5), ("zeropp", "fsdp2"): (5.0, 0.125)}
    rows["fsdp2+zcomm"] = row("fsdp2+zcomm", speed=300.0, link=19.0)
    assert ("fsdp2+zcomm", "fsdp2") in {(r.name, r.baseline) for r in ratios(rows)}
    assert ratios({"zeropp": rows["zeropp"]}) == []
    nothing = {"fsdp2": row("fsdp2", link=0.0), "zero3": row("zero3", link=0.0)}
    assert [ratio.link for ratio in ratios(nothing)] == [None]


def test_losses_are_judged_in_every_step_by_the_bound_of_the_peer():
    rows = {
        "fsdp2": row("fsdp2", losses=(2.0, 1.0)),
        "ddp": row("ddp", losses=(2.0 * 1.006, 1.0)),
        "zero3": row("zero3", losses=(2.0, 0.996)),
        "zeropp": row("zeropp", losses=(2.0, 1.019)),
    }
    found = {v.name: (round(v.difference, 6), v.holds) for v in judge(rows)}
    assert found == {"ddp": (0.006, False), "zero3": (-0.004, True), "zeropp": (0.019, True)}
    rows["fsdp2+zcomm"] = row("fsdp2+zcomm", losses=(2.0, 1.019))
    assert all(verdict.holds for verdict in judge(rows) if verdict.name == "fsdp2+zcomm")
    del rows["fsdp2+zcomm"]
    rows["zeropp"] = row("zeropp", losses=(2.0, 1.021))
    assert [v.holds for v in judge(rows)] == [False, True, False]


def test_a_loss_that_is_no_number_does_not_hold():
    rows = {"fsdp2": row("fsdp2"), "zero3": row("zero3", losses=(2.0, float("nan")))}
    assert [verdict.holds for verdict in judge(rows)] == [False]


def test_losses_are_compared_with_the_first_exact_peer_that_ran():
    assert judge({"zeropp": row("zeropp")}) == []
    (verdict,) = judge({"zero3": row("zero3"), "zeropp": row("zeropp")})
    assert verdict.reference == "zero3"


def test_the_end_of_a_long_training_is_judged_by_its_last_steps():
    def losses(early, late):
        return [early] * 80 + [late] * 20

    rows = {
        "fsdp2": row("fsdp2", losses=losses(4.0, 2.0)),
        "ddp": row("ddp", losses=losses(4.0, 2.0 * 1.011)),
        "fsdp2+codecs": row("fsdp2+codecs", losses=losses(4.0, 2.0 * 1.009)),
        "zeropp": row("zeropp", losses=losses(4.0, float("nan"))),
    }
    found = {end.name: (round(end.difference, 6), end.holds) for end in ends(rows)}
    assert found["ddp"] == (0.011, False)
    assert found["fsdp2+codecs"] == (0.009, True)
    assert not found["zeropp"][1]
    learnt_nothing = {name: row(name, losses=losses(2.0, 2.0)) for name in ("fsdp2", "zeropp")}
    assert [end.holds for end in ends(learnt_nothing)] == [False]
    assert ends({"fsdp2": row("fsdp2"), "zeropp": row("zeropp")}) == []  # two steps
    assert ends({"zeropp": rows["fsdp2"]}) == []


def test_time_on_a_core_is_busy_and_asleep_is_not():
    before = meters.times()
    while (busy := meters.times().since(before)).core < 0.05:
        pass
    # A thread's account is brought up to date at every tick: 100 a second, or more.
    assert busy.wall >= busy.core - 0.01
    before = meters.times()
    time.sleep(0.2)
    asleep = meters.times().since(before)
    assert asleep.wall >= 0.2
    assert asleep.core < 0.1


def test_the_work_of_other_threads_is_not_counted():
    def work():
        before = meters.times()
        while meters.times().since(before).core < 0.2:
            pass

    other = threading.Thread(target=work)
    before = meters.times()
    other.start()
    other.join()
    assert meters.times().since(before).core < 0.1


def test_link_bytes_are_those_that_were_sent():
    nbytes = 2**22
    before = meters.link_nbytes("lo")
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        sender = threading.Thread(target=client.sendall, args=(bytes(nbytes),))
        sender.start()
        got = 0
        while got < nbytes:
            got += len(peer.recv(2**20))
        sender.join()
        client.close()
        peer.close()
    # Others may use this interface at the same time.
    assert meters.link_nbytes("lo") - before >= nbytes


def test_the_peak_of_memory_is_that_since_the_reset():
    nbytes = 2**27
    meters.reset_peak()
    before = meters.peak_nbytes()
    block = np.ones(nbytes, np.uint8)
    assert meters.peak_nbytes() >= before + 0.9 * nbytes
    del block
    meters.reset_peak()
    assert meters.peak_nbytes() <= before + 0.5 * nbytes


def test_every_rank_reads_its_part_of_the_same_batches(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 4)
    options = parse([*TINY.split(), "--data", str(text), "--sequences", "2", "--seed", "3"])
    driver.prepare(options, tmp_path)
    assert Job.load(tmp_path / rank.JOB) == options.job
    read = np.frombuffer(text.read_bytes(), np.uint8)
    parts = [rank.read_batches(tmp_path / rank.BATCHES, r, 4) for r in range(4)]
    for step in range(3):
        whole = data.batch(read, seed=3, step=step, num_sequences=8, num_tokens=8)
        for r in range(4):
            expected = whole.part(r, 4)
            assert parts[r][step].inputs.equal(expected.inputs)
            assert parts[r][step].targets.equal(expected.targets)


@pytest.fixture(autouse=True)
def signals():
    """Give the test session its signals back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def launched(monkeypatch):
    """Replace launches by made-up rows of equal losses; give the names of those launched."""
    names = []

    def run(peer, options, folder):
        names.append(peer.name)
        return reports()

    monkeypatch.setattr(launch, "run", run)
    return names


def objects_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_peer_that_is_not_installed_is_listed_as_absent(launched, monkeypatch, capsys, tmp_path):
    missing = dataclasses.replace(registry.DEEPSPEED, package="a_package_that_is_not_there")
    monkeypatch.setitem(registry.PEERS, "deepspeed", missing)
    path = tmp_path / "rows.jsonl"
    assert driver.main([*TINY.split(), "-J", str(path)]) == 0
    others = ["ddp", "fsdp2+codecs", "fsdp2+zcomm", "zero3", "zeropp"]
    assert launched == ["alone", "fsdp2", *others]
    printed = capsys.readouterr().out
    assert "a_package_that_is_not_there is not" in printed
    objects = objects_in(path)
    assert [o["name"] for o in objects if o["kind"] == "row"] == launched
    (absent,) = (o for o in objects if o["kind"] == "absent")
    assert absent["name"] == "deepspeed"
    assert "pip install" in absent["reason"]
    assert objects[0]["kind"] == "header"
    assert objects[0]["peers"]["fsdp2"].startswith("torch ")
    assert objects[-1]["kind"] == "end"


def test_a_peer_that_fails_is_told_and_makes_the_exit_code(monkeypatch, capsys, tmp_path):
    def run(peer, options, folder):
        return Failed("exit code 7: out of luck") if peer.name == "ddp" else reports()

    monkeypatch.setattr(launch, "run", run)
    path = tmp_path / "rows.jsonl"
    arguments = [*TINY.split(), "--peers", "ddp", "zero3", "-J", str(path)]
    assert driver.main(arguments) == 1
    assert "failed: exit code 7: out of luck" in capsys.readouterr().out
    (failed,) = (o for o in objects_in(path) if o["kind"] == "failed")
    assert failed == {"kind": "failed", "name": "ddp", "reason": "exit code 7: out of luck"}


def test_losses_that_differ_make_the_exit_code(monkeypatch, capsys):
    def run(peer, options, folder):
        worse = 1.1 if peer.name == "zero3" else 1.0
        return [
            dataclasses.replace(report, losses=[worse * loss for loss in report.losses])
            for report in reports()
        ]

    monkeypatch.setattr(launch, "run", run)
    assert driver.main([*TINY.split(), "--peers", "ddp", "zero3"]) == 1
    assert "FAILED: losses of zero stage 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "patience", "expected"),
    [
        ("echo it broke >&2; exit 7", 60, "exit code 7: it broke"),
        ("echo slow; exec sleep 60", 2, "did not end within 2 s: slow"),
    ],
)
def test_a_launch_says_how_it_failed(monkeypatch, tmp_path, program, patience, expected):
    monkeypatch.setattr(launch, "command", lambda *_: ["sh", "-c", program])
    options = parse([*TINY.split(), "--patience", str(patience)])
    start = time.monotonic()
    assert launch.run(registry.DDP, options, tmp_path) == Failed(expected)
    assert time.monotonic() - start < 30


def test_a_signal_ends_the_launch_that_runs(monkeypatch, tmp_path):
    started = tmp_path / "pid"
    program = (
        f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    monkeypatch.setattr(launch, "command", lambda *_: [sys.executable, "-c", program])

    def stop_when_started():
        while not (started.exists() and started.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_started).start()
    with pytest.raises(SystemExit) as raised:
        driver.main(TINY.split())
    assert raised.value.code == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_no_cluster_is_a_usage_error(monkeypatch, tmp_path):
    program = "import sys; print('benchmarks.cluster: no root', file=sys.stderr); sys.exit(2)"
    monkeypatch.setattr(launch, "command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(UsageError, match=r"^no root$"):
        launch.run(registry.DDP, parse(TINY.split()), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "--steps 0: at least 1"),
        ("--warmup 0", "--warmup 0: at least 1"),
        ("--width 65", "--width 65: heads have 64"),
        ("--peers ddp horovod", "--peers horovod: possible are fsdp2, deepspeed, ddp"),
        ("--rate fast", "--rate: 'fast' is no rate"),
        ("--ranks-per-node 0", "--ranks-per-node 0: at least 1"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(arguments, message, capsys):
    assert driver.main(arguments.split()) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"benchmarks.peers: {message}")
    assert printed.count("\n") == 1


def test_a_result_is_never_overwritten(launched, capsys, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("kept")
    assert driver.main([*TINY.split(), "-J", str(path)]) == 2
    assert path.read_text() == "kept"
    assert launched == []


def test_the_driver_imports_no_peer():
    program = "import sys, benchmarks.peers.driver; print('deepspeed' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_bounds_are_those_that_documents_state():
    assert (results.EXACT_BOUND, results.QUANTISED_BOUND, results.LATE_BOUND) == (0.005, 0.02, 0.01)
