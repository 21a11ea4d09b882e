"""What is written as NCCL's XML and read again has the same paths."""

from itertools import combinations
from pathlib import Path

import pytest

from tests.topology import machines
from topology.files import read_system
from topology.nccl import parse_nccl
from topology.nccl_writer import mask, write_nccl

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"
FILES = sorted(path.name for path in DATA.glob("[ns]*.[tx]*"))


def letters(system):
    """Return the matrix by what identifies devices: dev, or the bus id where it has none."""
    names = [
        ("gpu" if number < len(system.gpus) else "nic", one.dev if one.dev is not None else one.bus)
        for number, one in enumerate(system.devices)
    ]
    assert len(set(names)) == len(names)
    return {
        frozenset((names[a], names[b])): system.letters(a, b)
        for a, b in combinations(range(len(names)), 2)
    }


@pytest.mark.parametrize("name", FILES)
def test_paths_stay(name):
    system = read_system(DATA / name)
    again = parse_nccl(write_nccl(system))
    if name.startswith("smi"):
        # A matrix has no dev numbers; the writer numbers devices in order.
        first = len(system.gpus)
        expected = {
            frozenset(
                ("gpu", n) if n < first else ("nic", n - first) for n in (a, b)
            ): system.letters(a, b)
            for a, b in combinations(range(len(system.devices)), 2)
        }
    else:
        expected = letters(system)
    found = letters(again)
    assert found == {pair: "PHB" if cell == "NODE" else cell for pair, cell in expected.items()}
    assert again.islands == system.islands


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("xml")])
def test_a_document_that_was_written_is_written_again_the_same(name):
    system = read_system(DATA / name)
    text = write_nccl(system)
    again = parse_nccl(text)
    assert write_nccl(again) == text
    assert (again.cpus, again.pci, again.nics) == (system.cpus, system.pci, system.nics)
    assert [gpu.gbytes for gpu in again.gpus] == [gpu.gbytes for gpu in system.gpus]


def test_amd_links_are_written_as_such():
    inside = [
        machines.gpu("0000:01:00.0", [("0000:02:00.0", 1, "0x038000")], tag="xgmi"),
        machines.gpu("0000:02:00.0", [("0000:01:00.0", 1, "0x038000")], tag="xgmi"),
    ]
    text = write_nccl(parse_nccl(machines.document(*inside, version=2)))
    assert '<system version="2">' in text
    assert text.count("<xgmi ") == 2
    assert parse_nccl(text).letters(0, 1) == "XGMI"


def test_hosts_are_told_apart():
    switch = [("0000:c0:00.0", 18, "0x068000")]
    tray = machines.gpu("0008:01:00.0", switch, sm=100) + machines.gpu(
        "0009:01:00.0", switch, sm=100
    )
    cpus = "".join(f"<cpu numaid='0' host_hash='0x{h}'>{tray}</cpu>" for h in ("a1", "b2"))
    again = parse_nccl(write_nccl(parse_nccl(f"<system version='1'>{cpus}</system>")))
    assert again.hosts == ("a1", "b2")
    assert again.islands == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [("0", "00000001"), ("0-3,32", "00000001,0000000f"), ("0-19,40-59", "0fffff00,000fffff")],
)
def test_masks(cpus, expected):
    assert mask(cpus) == expected
