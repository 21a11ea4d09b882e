"""What people see: the verdict, the matrix, the tree, the picture, the command."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.topology import machines
from topology import TopologyError, parse
from topology.documents import SCHEMA
from topology.files import of_levels, parse_text, read_system
from topology.nccl import parse_nccl
from topology.picture import png, svg
from topology.report import matrix, report, verdict
from topology.smi import parse_matrix
from zcomm import cli

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"
FILES = sorted(path.name for path in DATA.glob("[ns]*.[tx]*"))
SVG = "{http://www.w3.org/2000/svg}"

VERDICTS = {
    "smi_dgx1_v100_cube_mesh.txt": "1 node x 8 GPU, NVLink islands of 4 + 4 (direct links, 6 links"
    " a GPU), 4 rails a node, 8 ranks = 1 x 2 x 4 (network x node x domain), block placement",
    "nccl_dgx_a100_nvswitch.xml": "1 node x 8 GPU (sm80), NVLink all-to-all in a node (NVSwitch,"
    " 12 links a GPU), 8 rails a node, 8 ranks = 1 x 8 (network x node), block placement",
    "smi_rtx4090_pcie_phb_node_sys.txt": "1 node x 8 GPU, no NVLink, 8 ranks = 1 x 8 (network x"
    " node), block placement",
    "nccl_cloud_static_h100.xml": "1 node x 8 GPU, NVLink unknown, 8 rails a node, 8 ranks = 1 x 8"
    " (network x node), block placement, 1 warning",
    "nccl_busids_only.xml": "1 node without a GPU, 1 warning",
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name):
    assert verdict(read_system(DATA / name)) == VERDICTS[name]


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("smi")])
def test_the_matrix_that_is_shown_can_be_read_again(name):
    system = read_system(DATA / name)
    lines = matrix(system).splitlines()
    # What stands behind the devices is ours: the nearest NIC, NUMA, CPUs.
    names = [device.name for device in system.devices]
    cut = [" ".join(line.split()[: len(names) + 1]) for line in lines[1 : len(names) + 1]]
    again = parse_matrix("\n".join([f"{' '.join(names)} CPU Affinity", *cut]))
    assert [p.letters for p in again.paths] == [p.letters for p in system.paths]


def test_the_tree_says_bandwidths_and_sources():
    lines = report(read_system(DATA / "nccl_dgx1_v100.xml")).splitlines()
    assert "+ NUMA 0, CPUs 0-19,40-59 [file NCCL XML]" in lines
    expected = "+ GPU0, sm70, 0000:06:00.0, PCIe 12 GB/s, 6 NVLinks of 20 GB/s [file NCCL XML]"
    assert f"  {expected}" in lines
    assert "    + NV2[40 GB/s] - GPU3 [file NCCL XML]" in lines
    assert "    + PIX[12 GB/s] - NIC0 (mlx5_0) (rail) [file NCCL XML]" in lines
    assert "  domain: 0 1 2 3 | 4 5 6 7" in lines


def test_equal_hosts_are_shown_once():
    switch = [("0000:c0:00.0", 18, "0x068000")]
    tray = machines.gpu("0008:01:00.0", switch, sm=100) + machines.gpu(
        "0009:01:00.0", switch, sm=100
    )
    cpus = "".join(f"<cpu numaid='0' host_hash='0x{h}'>{tray}</cpu>" for h in ("a1", "b2"))
    system = parse_nccl(f"<system version='1'>{cpus}</system>")
    assert verdict(system).startswith(
        "2 nodes x 2 GPU (sm100), NVLink domains across nodes (NVSwitch, 18 links a GPU)"
    )
    assert matrix(system).splitlines()[:4] == [
        "a1, b2",
        "      GPU0  GPU1  nearest NIC  NUMA  CPUs",
        "GPU0  X     NV18  -            0     ?",
        "GPU1  NV18  X     -            0     ?",
    ]


@pytest.mark.parametrize("name", [*FILES, "2x3", "2x2x2"])
def test_pictures(name):
    system = of_levels(parse(name)) if name[0] == "2" else read_system(DATA / name)
    root = ElementTree.fromstring(svg(system, verdict(system)))
    words = [element.text for element in root.iter(f"{SVG}text")]
    devices = [
        one.label if hasattr(one, "label") and one.label else one.name for one in system.devices
    ]
    ranks = [] if system.gpus else [f"rank {rank.rank}" for rank in system.ranks]
    for name in [*devices, *ranks]:
        assert name in words or name[:8] in {word[:8] for word in words}
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.iter(f"{SVG}rect"):
        assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= width
        assert 0 <= float(box.get("y")) <= float(box.get("y")) + float(box.get("height")) <= height


@pytest.mark.parametrize(
    ("text", "shown", "more"),
    [
        ("24x16", 16, ["node 0 (+ 8 more)", "network (and 22 more nodes)"]),
        ("3x8", 16, ["network (and 1 more node)"]),
        ("18x4", 16, ["network (and 14 more nodes)"]),
        ("64", 16, ["node 0 (+ 48 more)"]),
        ("2x2x8", 16, ["node 1 (+ 8 more)"]),
    ],
)
def test_a_picture_of_many_ranks_fits_a_slide(text, shown, more):
    """What is left out is counted in words; boxes of ranks do not meet."""
    system = of_levels(parse(text))
    root = ElementTree.fromstring(svg(system, verdict(system)))
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert len([word for word in words if word.startswith("rank ")]) == shown
    assert set(more) <= set(words)
    assert float(root.get("width")) < 1400
    places = [box for box in root.iter(f"{SVG}rect") if box.get("width") == "58"]
    lefts = sorted(float(box.get("x")) for box in places)
    assert min(b - a for a, b in itertools.pairwise(lefts)) >= 58


def test_a_title_breaks_behind_commas():
    system = read_system(DATA / "smi_dgx1_v100_cube_mesh.txt")
    root = ElementTree.fromstring(svg(system, verdict(system)))
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert words[0] == "1 node x 8 GPU, NVLink islands of 4 + 4 (direct links, 6 links a GPU),"
    assert words[1].startswith("4 rails a node, 8 ranks = 1 x 2 x 4 (network x node x domain), ")


def test_a_name_cannot_break_the_picture():
    text = json.dumps(
        {"schema": SCHEMA, "hosts": ["<a>&\u0001"], "gpus": [{"name": "<", "host": 0}]}
    )
    system = parse_text(text)
    root = ElementTree.fromstring(svg(system, verdict(system)))
    assert "<a>&?" in [element.text for element in root.iter(f"{SVG}text")]


def test_a_job_without_gpus():
    cpus = {"host": 0, "numa": 0, "cpus": "0-3"}, {"host": 0, "numa": 1, "cpus": "4-7"}
    places = (0, 0, "0-3"), (0, 1, "4-7"), (1, None, "0-7"), (1, None, "0-7")
    ranks = [
        {"rank": rank, "host": host, "cpus": cpus, "numa": numa}
        for rank, (host, numa, cpus) in enumerate(places)
    ]
    document = {"schema": SCHEMA, "hosts": ["a", "b"], "cpus": list(cpus), "ranks": ranks}
    system = parse_text(json.dumps(document))
    lines = report(system).splitlines()
    assert lines[0] == (
        "2 nodes x 2 ranks on CPUs, 4 ranks = 2 x 2 (network x node), block placement"
    )
    assert lines[3] == "rank0  X      SYS    NET    NET"
    assert lines[5] == "rank2  NET    NET    X      ?"
    assert "  + rank 1, may run on CPUs 4-7 [file]" in lines
    assert "+ ranks 2-3, may run on CPUs 0-7 [file]" in lines
    assert lines[-2:] == ["  node: 0 1 | 2 3", "  network: 0 1 2 3"]


def test_png(tmp_path, monkeypatch):
    system = read_system(DATA / "smi_a100_pcie_nvlink_bridge_pairs.txt")
    pytest.importorskip("matplotlib")
    png(system, "two pairs", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TopologyError, match="a PNG needs matplotlib: pip install"):
        png(system, "two pairs", tmp_path / "b.png")


def test_command(tmp_path, capsys):
    source = DATA / "smi_a100_pcie_nvlink_bridge_pairs.txt"
    assert (
        cli.main(["topo", "--file", str(source), "--json", "--xml", str(tmp_path / "a.xml")]) == 0
    )
    printed = capsys.readouterr().out
    assert json.loads(printed)["levels"][0]["groups"] == [[0, 1], [2, 3]]
    (tmp_path / "a.json").write_text(printed)
    for name in ("a.json", "a.xml"):
        assert (
            cli.main(["topo", "--file", str(tmp_path / name), "--svg", str(tmp_path / "a.svg")])
            == 0
        )
        shown = capsys.readouterr().out
        assert "NVLink islands of 2 + 2" in shown.splitlines()[0]
        assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_command_with_a_file_that_is_none(tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("nothing")
    assert cli.main(["topo", "--file", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"zcomm topo: topology file '{path}': it begins with")
    assert cli.main(["topo", "--file", str(tmp_path / "absent")]) == 2
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    """As `zcomm topo | head -1`; files are written all the same."""
    source, drawn = DATA / "smi_dgx1_v100_cube_mesh.txt", tmp_path / "a.svg"
    words = [sys.executable, "-m", "zcomm.cli", "topo", "--file", source, "--svg", drawn]
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (run.returncode, run.stderr) == (141, "")
    assert drawn.read_text().startswith("<svg")


@pytest.mark.parametrize("variables", [{}, {"ZCOMM_TOPOLOGY": "2x1"}])
def test_command_in_a_job(launch, tmp_path, variables):
    """All ranks look, one shows; ZCOMM_TOPOLOGY replaces the levels."""
    picture = tmp_path / "job.svg"
    words = ["-m", "zcomm.cli", "topo", "--json", "--svg", picture]
    child = launch(*words, num_ranks=2, env=variables)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    nodes = next(level for level in found["levels"] if level["name"] == "node")
    assert nodes["groups"] == ([[0], [1]] if variables else [[0, 1]])
    assert "rank 1" in picture.read_text()


@pytest.mark.slow
def test_command_under_torchrun(launch):
    """Without MPI ranks find each other through a process group; nodes are hosts."""
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    child = launch(*run, "-m", "zcomm.cli", "topo", "--json", timeout=110)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert [level["groups"] for level in found["levels"]] == [[[0, 1]], [[0, 1]]]
