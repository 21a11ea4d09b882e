"""Files of real kinds of machines: what must be read from them stands in expected.json."""

import json
import re
from pathlib import Path

import pytest

from tests.topology import machines
from topology import TopologyError, parse
from topology.documents import from_json, to_json
from topology.files import parse_text, read_system
from topology.nccl import parse_nccl
from topology.smi import parse_matrix

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"
EXPECTED = json.loads((DATA / "expected.json").read_text())
MATRICES = sorted(name for name in EXPECTED if name.startswith("smi"))
DOCUMENTS = sorted(name for name in EXPECTED if name.endswith("xml"))


def groups(partition):
    return [list(group) for group in partition]


@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name):
    system, expected = read_system(DATA / name), EXPECTED[name]
    assert (len(system.gpus), len(system.nics)) == (expected["gpus"], expected["nics"])
    num_links = sum(sum(peers.values()) for peers in system.nvlink.values()) // 2
    assert num_links == expected["nvlinks_total"]
    assert groups(system.components) == expected["nvlink_islands"]
    all_to_all = len(system.islands) == 1 and len(system.gpus) > 1
    assert all_to_all == expected["nvlink_all_to_all"]
    assert groups(system.switch_groups) == expected["pcie_switch_islands"]
    best = {
        gpu.name: [system.devices[nic].name for nic in system.nearest_nics(number)]
        for number, gpu in enumerate(system.gpus)
    }
    assert {name: nics for name, nics in best.items() if nics} == expected["best_nic"]
    said = expected["affinity_gpu0"]
    assert system.gpus[0].cpus == said[0]
    assert str(system.gpus[0].numa) == ("None" if said[1:2] in ([], ["N/A"]) else said[1])
    assert system.notes == ()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name):
    text = (DATA / name).read_text()
    system, expected = parse_nccl(text), EXPECTED[name]
    assert len(system.cpus) == expected["cpus"]
    assert len(system.hosts) == expected["hosts"]
    assert sum(1 for gpu in system.gpus if gpu.sm is not None) == expected["gpus"]
    by_class = [pci for pci in system.pci if (pci.pci_class or "").startswith("0x03")]
    assert len(system.gpus) == len(by_class) == expected["pci_gpu_class"]
    assert sum(1 for nic in system.nics if nic.label) == expected["nics"]
    assert sum(gpu.nvlinks or 0 for gpu in system.gpus) == expected["nvlink_count_sum"]
    assert len(set(re.findall(r'nvlink target="(\S+)"', text))) == expected["nvlink_targets"]


def test_the_matrix_and_the_document_of_one_machine_agree():
    """The cube mesh as nvidia-smi and as NCCL see it; NCCL numbers the NICs in another order."""
    matrix = read_system(DATA / "smi_dgx1_v100_cube_mesh.txt")
    document = read_system(DATA / "nccl_dgx1_v100.xml")
    nic_of = {nic.label: number for number, nic in enumerate(document.nics)}
    same = [*range(8), *(8 + nic_of[nic.label] for nic in matrix.nics)]
    for a in range(12):
        for b in range(12):
            assert matrix.letters(a, b) == document.letters(same[a], same[b])
    assert document.path(0, 3).gbytes == 40
    assert document.path(0, 8).gbytes == 12


@pytest.mark.parametrize("name", [*MATRICES, *DOCUMENTS])
def test_our_json_holds_all_of_a_system(name):
    system = read_system(DATA / name)
    assert from_json(to_json(system)) == system
    assert parse_text(to_json(system, indent=None)) == system


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\t", "        "),
        lambda text: "\n".join(f"    {line.strip()}" for line in text.splitlines()),
        lambda text: "$ nvidia-smi topo -m\r\n" + text.replace("\n", "\r\n"),
        lambda text: text.partition("Legend")[0],
        lambda text: "\x1b[4m" + text.replace("GPU NUMA ID", "GPU NUMA ID\x1b[0m", 1),
        lambda text: "\ufeff" + text + "\n(base) host:~$ ",
    ],
    ids=["blanks", "indented", "prompt", "no legend", "colours", "mark and prompt"],
)
def test_a_matrix_as_it_is_pasted(change):
    text = (DATA / "smi_hgx_h200_rail_permuted.txt").read_text()
    system, changed = parse_matrix(text), parse_text(change(text))
    assert changed.paths == system.paths
    assert changed.gpus == system.gpus


def test_old_drivers_say_soc():
    text = (DATA / "smi_dgx1_v100_cube_mesh.txt").read_text().partition("Legend")[0]
    assert parse_matrix(text.replace("SYS", "SOC")) == parse_matrix(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "PIX\tSYS\tPHB\tSYS\t0-19",
            "PIX\tSYSPHB\tSYS\t0-19",
            "row 'GPU0' .*'SYSPHB' under mlx5_2",
        ),
        ("GPU3\tNV2", "GPU3\tNV0", "row 'GPU3' .*'NV0' under GPU0; possible: X, NV#"),
        ("GPU3\tNV2\t", "GPU3\t", "row 'GPU3' .*under GPU"),
        ("GPU3", "GPU9", "row 'GPU"),
        ("GPU0\t X ", "GPU0\tSYS", "row 'GPU0' .*'SYS' under GPU0; X belongs under GPU0 only"),
        ("mlx5_3\tSYS\tSYS\tSYS", "mlx5_3\tSYS", "row 'mlx5_3' .*"),
        ("20-39,60-79\nmlx5_0", "20-39,sixty\nmlx5_0", "row 'GPU7' .*'20-39,sixty' is no affinity"),
        ("mlx5_1\tPHB", "GPU7\tPHB", "row 'GPU7' is there twice"),
        ("GPU4\tNV2", "\nGPU4\tNV2", "row 'GPU4' is missing"),
        ("GPU5\tSYS", "garbage\nGPU5\tSYS", "row 'GPU5' is expected in line 7, got 'garbage'"),
        ("GPU1\tGPU2", "GPU1\tGPU1", "names 'GPU1' twice"),
        ("GPU4\tNV2", "GPU4\tNV٢", "row 'GPU4' .*'NV٢' under GPU0"),
        ("\t0-19,", "\t٠-19,", "row 'GPU0' .*'٠-19,40-59' is no affinity"),
    ],
)
def test_damaged_matrices_name_the_row(old, new, message):
    text = (DATA / "smi_dgx1_v100_cube_mesh.txt").read_text()
    assert old in text
    with pytest.raises(TopologyError, match=message) as caught:
        parse_text(text.replace(old, new, 1))
    assert "\n" not in str(caught.value)


def test_a_matrix_of_p2p_capabilities_is_told_apart():
    with pytest.raises(TopologyError, match=r"'OK' under GPU1.*topo -p2p"):
        parse_text("\tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n")


def test_a_matrix_of_rocm_smi_is_told_apart():
    text = "       GPU0         GPU1         \nGPU0   0            15           \n"
    with pytest.raises(TopologyError, match=r"'0' under GPU0.*rocm-smi"):
        parse_text(f"{text}GPU1   15           0            \n")


def test_a_matrix_that_ends_too_early_names_the_row_that_is_missing():
    text = (DATA / "smi_dgx1_v100_cube_mesh.txt").read_text()
    for num_rows in (0, 3, 11):
        missing = text.splitlines()[num_rows + 1].split()[0]
        with pytest.raises(TopologyError, match=f"row '{missing}' is missing"):
            parse_text("\n".join(text.splitlines()[: num_rows + 1]))


def test_affinities_of_other_drivers():
    text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    rows = "GPU0\t X \tNV4\t0-3\t0\t\tN/A{0}\nGPU1\tNV4\t X \t0-3\t1\t\tN/A{0}\n"
    usual = parse_matrix(text + rows.format(""))
    assert parse_matrix(text.replace("ID", "ID\tNIC Affinity") + rows.format("\t0,1")) == usual
    narrow = "\tGPU0\tGPU1\tNUMA Affinity\nGPU0\tX\tNV4\t0\nGPU1\tNV4\tX\t1\n"
    assert [(gpu.cpus, gpu.numa) for gpu in parse_matrix(narrow).gpus] == [(None, 0), (None, 1)]


def test_two_rows_that_differ_are_a_warning():
    text = (DATA / "smi_dgx_a100_nvswitch.txt").read_text()
    system = parse_matrix(text.replace("GPU2\tNV12", "GPU2\tNV10", 1))
    assert system.letters(0, 2) == "NV10"
    assert system.warnings == (
        "row 'GPU0' says NV12 for GPU2, row 'GPU2' NV10 for GPU0: NV10 is taken",
    )
    assert len(system.islands) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty; possible: JSON"),
        ("hello", "it begins with 'hello'"),
        ("<graphs version='1'/>", "line 1: <graphs> is what NCCL found, not a machine"),
        ("<html/>", "line 1: <html> is another thing"),
        ("<system version='1'>", "line 1: XML is damaged: no element found"),
        ("<system version='7'/>", "version 7; possible: 1 .NCCL., 2 .RCCL."),
        ("<system version='1'/>", "it has no <cpu>"),
        ("<system version='1'>\n<cpu/></system>", "line 2, <cpu>: a numaid is expected"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><system/>", "line 1: a document type is not expected"),
        ("<a>" * 80, "line 1, <a>: more than 64 elements deep"),
        (machines.document("<pci busid='GPU'/>"), "busid='gpu' is no bus id"),
        (machines.document(machines.gpu("0000:01:00.0") * 2), "0000:01:00.0 is there twice"),
        (machines.document(machines.gpu("0000:01:00.0", sm="x")), "sm='x' is not a whole number"),
        (
            machines.document("<pci busid='0000:01:00.0' link_speed='fast'/>"),
            "link_speed='fast'",
        ),
        ("[1]", "it begins with"),
        ("{}", "exactly the keys"),
        ('{"schema": "zcomm.system/1"}', "at least one host"),
        (
            '{"schema": "zcomm.system/1", "hosts": [""], "gpus": [{"name": 1}]}',
            r"gpus\[0\]: name=1",
        ),
        ('{"schema": "zcomm.system/1", "hosts": [""], "gpus": [{}]}', r"gpus\[0\]: lacks"),
        ("<?xml version='1.0' encoding='foo-9'?><system/>", "line 1: XML is damaged: .*foo-9"),
        *(
            (
                f'{{"schema": "zcomm.system/1", "hosts": [""], "{part}": '
                f'[{{"name": "A", "host": 0, "{name}": {value}}}]}}',
                rf"{part}\[0\]: {name}=.*: 0 to 2.63 is expected",
            )
            for part, name, value in (
                ("gpus", "nvlinks", "-1"),
                ("gpus", "link_gbytes", "1" + "0" * 400),
                ("gpus", "link_gbytes", "NaN"),
                ("nics", "gbit", "Infinity"),
            )
        ),
        (
            '{"schema": "zcomm.system/1", "hosts": [""], "pci": [{"host": 0, "bus": "a", '
            '"parent": "a"}]}',
            "its parent is expected before it",
        ),
    ],
)
def test_texts_that_are_none(text, message):
    with pytest.raises(TopologyError, match=message) as caught:
        parse_text(text)
    assert "\n" not in str(caught.value)


def test_dialects_of_documents():
    """Speeds with and without words, short masks, a switch that a virtual machine hides."""
    inside = [
        machines.gpu("0000:01:00.0", [("fffffff:ffff:ff", 18, "")], sm=90, speed="32.0 GT/s"),
        machines.gpu(
            "0000:02:00.0", [("fffffff:ffff:ff", 16, "")], sm=90, speed="16 GT/s", width=0
        ),
        machines.gpu("0000:03:00.0", [("0000:03:00.0", 2, "0x030200")], sm=90, speed=""),
        "<nic><net name='eth0' speed='25000'/></nic>",
    ]
    system = parse_nccl(machines.document(*inside, affinity="1,0000000f"))
    assert system.cpus[0].cpus == "0-3,32"
    assert [gpu.nvlinks for gpu in system.gpus] == [18, 16, 0]
    assert system.letters(0, 1) == "NV16"
    assert [pci.gbytes for pci in system.pci] == [48, 24, None]
    assert system.letters(0, 3) == "PHB"
    assert system.nics[0].gbit == 25
    assert system.warnings[0].endswith("a link of GPU2 to itself")
    assert system.warnings[1] == "GPU1 has 16 NVLinks, others 18: degraded"


def test_amd_links_and_their_document():
    inside = [
        machines.gpu("0000:01:00.0", [("0000:02:00.0", 1, "0x038000")], tag="xgmi", gcn="gfx90a"),
        machines.gpu("0000:02:00.0", [("0000:01:00.0", 1, "0x038000")], tag="xgmi", gcn="gfx90a"),
    ]
    system = parse_nccl(machines.document(*inside, version=2))
    assert system.letters(0, 1) == "XGMI"
    assert system.gpus[0].title == "gfx90a"
    assert system.islands == ((0, 1),)


def test_links_to_a_processor_join_no_gpus():
    """POWER9: the class of the processor's end of an NVLink is nearly that of a switch."""
    bridge = ("0004:00:00.0", 3, "0x068001")
    inside = [
        machines.gpu("0004:04:00.0", [bridge, ("0004:05:00.0", 3, "0x030200")], sm=70),
        machines.gpu("0004:05:00.0", [bridge, ("0004:04:00.0", 3, "0x030200")], sm=70),
        machines.gpu("0035:03:00.0", [bridge], sm=70),
    ]
    system = parse_nccl(machines.document(*inside))
    assert system.islands == ((0, 1), (2,))
    assert [gpu.nvlinks for gpu in system.gpus] == [3, 3, 0]
    assert system.letters(0, 1) == "NV3"
    assert not any(gpu.switched for gpu in system.gpus)


def test_hosts_of_one_document_share_a_domain():
    switch = [("0000:c0:00.0", 18, "0x068000")]
    tray = machines.gpu("0008:01:00.0", switch, sm=100) + machines.gpu(
        "0009:01:00.0", switch, sm=100
    )
    cpus = "".join(
        f"<cpu numaid='0' host_hash='0x{host}' arch='arm64'>{tray}</cpu>" for host in ("a1", "b2")
    )
    system = parse_nccl(f"<system version='1'>{cpus}</system>")
    assert system.hosts == ("a1", "b2")
    assert system.islands == ((0, 1, 2, 3),)
    names = [level.name for level in system.topology.levels]
    assert names == ["node", "domain", "network"]
    assert system.topology.shape == (2, 2, 1)


def test_a_file_as_the_topology_of_a_job(tmp_path):
    mesh = parse(DATA / "smi_dgx1_v100_cube_mesh.txt", 16)
    assert mesh.shape == (4, 2, 2)
    assert mesh.group(0, 6) == (4, 5, 6, 7)
    assert mesh.rail(2, 1) == (1, 9)
    assert parse(DATA / "nccl_dgx_a100_nvswitch.xml", 8).shape == (8, 1)
    path = tmp_path / "bridges.json"
    path.write_text(to_json(read_system(DATA / "smi_a100_pcie_nvlink_bridge_pairs.txt")))
    assert parse(path, 4).shape == (2, 2, 1)
    with pytest.raises(TopologyError, match=r"8 ranks .* but the job has 12 ranks"):
        parse(DATA / "smi_dgx1_v100_cube_mesh.txt", 12)
    with pytest.raises(TopologyError, match="describes no GPU"):
        parse(DATA / "nccl_busids_only.xml", 4)


def test_affinities_may_be_lists_or_unknown():
    """A GB200 tray: the memory of a GPU is a NUMA node of its own; near are lists of others."""
    text = (
        "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tNV18\tSYS\t0-71\t0,3-9,11-17\t\t2\n"
        "GPU1\tNV18\t X \tSYS\tN/A\t0-1\t\tN/A\n"
        "NIC0\tSYS\tSYS\t X \t\t\t\t\n"
    )
    system = parse_matrix(text)
    assert [(gpu.cpus, gpu.numa) for gpu in system.gpus] == [("0-71", None), (None, None)]
    assert system.letters(0, 1) == "NV18"
    assert system.gpus[0].nvlinks == 18
    assert system.notes == ()
