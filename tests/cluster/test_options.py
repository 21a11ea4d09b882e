"""The command line, the link it describes, and what is said where there can be no cluster."""

import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.cluster import __main__ as driver
from benchmarks.cluster.network import Node
from benchmarks.cluster.options import link_for, parse, rate, size_nbytes
from benchmarks.launch import UsageError


@pytest.mark.parametrize(
    ("text", "bits"),
    [("1gbit", 10**9), ("200mbit", 2 * 10**8), ("2.5Gbit", 25 * 10**8), ("64kbit", 64_000)],
)
def test_rates(text, bits):
    assert rate(text) == bits


def test_no_rate():
    assert rate("none") is None


@pytest.mark.parametrize(("text", "nbytes"), [("16384", 16384), ("32kb", 32768), ("1mb", 2**20)])
def test_sizes(text, nbytes):
    assert size_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("bits", "cpu_bound", "burst", "packet"),
    [
        (10**9, False, 32 * 2**10, 2**14),
        (200_000_000, False, 32 * 2**10, 2**14),
        (10**10, False, 320 * 2**10, 2**16),
        (2 * 10**9, False, 64 * 2**10, 2**15),
        (None, False, 0, 2**16),
        (10**9, True, 128 * 2**10, 2**16),
        (10**10, True, 512 * 2**10, 2**16),
    ],
)
def test_link_that_is_chosen(bits, cpu_bound, burst, packet):
    link = link_for(bits, cpu_bound=cpu_bound)
    assert (link.burst_nbytes, link.gso_nbytes) == (burst, packet)
    assert link.credit_seconds() == pytest.approx(burst * 8 / bits if bits else 0)
    assert not link.cuts_packets()


def test_what_is_given_replaces_what_is_chosen():
    options = parse(["--burst", "64kb", "--gso", "65536", "--cpu-bound", "--", "a"])
    assert (options.link.burst_nbytes, options.link.gso_nbytes) == (65536, 65536)
    assert parse(["--burst", "16kb", "--gso", "16385", "--", "a"]).link.cuts_packets()


def test_program_keeps_its_own_flags():
    options = parse(["--nodes", "3", "--", "python", "-m", "x", "--nodes", "4", "--", "y"])
    assert options.num_nodes == 3
    assert options.program == ("python", "-m", "x", "--nodes", "4", "--", "y")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--nodes 0 -- a", "'0' is no whole number from 1 to 64"),
        ("--nodes 65 -- a", "'65'"),
        ("--rate 1gb -- a", "'1gb' is no rate; write 200mbit, 1gbit or none"),
        ("--rate 0bit -- a", "'0bit'"),
        ("--burst 32q -- a", "'32q' is no size"),
        ("--rate none --burst 32kb -- a", "--rate none has no burst"),
        ("--rate none --cpu-bound -- a", "--rate none has no burst"),
        ("--nodes 1 --measure -- a", "two nodes"),
        ("--nodes 2", "program"),
    ],
)
def test_wrong_command_lines(words, part):
    with pytest.raises(UsageError) as raised:
        parse(words.split())
    assert part in str(raised.value)


def test_other_users_than_root_are_told(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="needs Linux and root"):
        driver.check(parse(["--", "a"]))


@pytest.mark.parametrize(("name", "package"), [("tc", "iproute2"), ("nsenter", "util-linux")])
def test_missing_tool_is_told_with_its_package(monkeypatch, name, package):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == name else f"/bin/{tool}")
    with pytest.raises(UsageError, match=f"{name} is missing: apt-get install {package}"):
        driver.check(parse(["--", "a"]))


@pytest.mark.skipif(os.geteuid() != 0, reason="takes rights away, which needs root")
def test_root_without_rights_is_one_line_and_exit_code_2():
    helpless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    words = [sys.executable, "-m", "benchmarks.cluster", "--torch", "--", "true"]
    run = subprocess.run([*helpless, *words], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith("benchmarks.cluster: no namespaces here: unshare")


def test_entering_a_node_keeps_the_directory():
    words = Node("node0", "10.0.0.1", "link0", 17).enter("echo", "a b")
    assert words[0] == "nsenter"
    assert words[-3:] == [f"--chdir={os.getcwd()}", "echo", "a b"]
