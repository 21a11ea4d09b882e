"""Discovery on real kinds of machines: a recorded NVML, a played sysfs, jobs of several hosts."""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.topology import nvml_double as doubles
from tests.topology.test_discover import Cluster
from topology import discover, live, nvml
from topology.discover import survey
from topology.documents import from_json, to_json
from topology.nccl import parse_nccl
from topology.nccl_writer import write_nccl
from topology.report import report, verdict
from topology.sysfs import Sysfs, short_bus
from topology.system import Gpu

HGX_BUSES = [short_bus(bus) for bus in doubles.hgx_h200().buses]


def names_of(links):
    return {gpu: dict(peers) for gpu, peers in links.items()}


def test_an_nvswitch_node():
    system = nvml.probe(doubles.hgx_h200())
    assert [gpu.bus for gpu in system.gpus] == HGX_BUSES
    assert {gpu.switched for gpu in system.gpus} == {True}
    assert {gpu.nvlinks for gpu in system.gpus} == {18}
    assert system.gpus[0].gbytes == pytest.approx(18 * 26.562)
    assert all(system.letters(a, b) == "NV18" for a in range(8) for b in range(8) if a != b)
    assert system.islands == (tuple(range(8)),)
    assert [level.name for level in system.topology.levels] == ["node", "network"]
    assert system.notes == ()
    pcie = {(p.a, p.b): p.kind for p in system.paths if p.kind != "NV"}
    assert (pcie[0, 3], pcie[0, 4]) == ("NODE", "SYS")


def test_a_cube_mesh():
    system = nvml.probe(doubles.dgx1())
    assert names_of(system.nvlink) == doubles.CUBE
    assert system.islands == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert len(system.components) == 1
    assert [system.letters(0, peer) for peer in (1, 3, 5)] == ["NV1", "NV2", "SYS"]
    assert system.path(0, 3).gbytes == pytest.approx(2 * 25.781)
    assert system.topology.shape == (4, 2, 1)


def test_bridged_pairs():
    system = nvml.probe(doubles.bridged_pcie())
    assert system.islands == ((0, 1), (2, 3))
    assert system.letters(0, 1) == "NV12"
    assert system.letters(1, 2) == "SYS"
    assert system.topology.shape == (2, 2, 1)


def test_no_nvlink():
    system = nvml.probe(doubles.l40s())
    assert [gpu.nvlinks for gpu in system.gpus] == [0, 0]
    assert "no NVLink" in verdict(system)


def test_a_degraded_gpu_is_a_warning():
    links = [list(one) for one in doubles.hgx_h200().links]
    links[3][5] = links[3][6] = None
    system = nvml.probe(doubles.hgx_h200(links=links))
    assert system.letters(3, 4) == "NV16"
    assert system.warnings == ("GPU3 has 16 NVLinks, others 18: degraded",)
    assert len(system.islands) == 1


def test_a_link_that_one_end_lacks_is_a_warning():
    links = [list(one) for one in doubles.dgx1().links]
    links[0] = [None if end[0] == doubles.dgx1().buses[1] else end for end in links[0]]
    system = nvml.probe(doubles.dgx1(links=links))
    assert system.warnings[0] == "GPU0 has 0 links to GPU1, which has 1 back: the fewer are taken"


def test_links_whose_use_is_refused_join_nobody():
    system = nvml.probe(doubles.bridged_pcie(joined=doubles.pairs([(2, 3)])))
    assert system.islands == ((0,), (1,), (2, 3))
    assert "P2P status of the pair is 5: they are not used" in system.warnings[0]


def test_mig_has_no_nvlink():
    system = nvml.probe(doubles.hgx_h200(mig={0}))
    assert system.gpus[0].mig
    assert system.islands == ((0,), tuple(range(1, 8)))


def test_a_driver_that_only_knows_pairs():
    """The state of links is not to be had: the P2P status still joins the pairs."""
    refused = ["nvmlDeviceGetNvLinkState", "nvmlDeviceGetFieldValues"]
    system = nvml.probe(doubles.bridged_pcie(refused=refused))
    assert system.islands == ((0, 1), (2, 3))
    assert system.gpus[0].nvlinks is None
    assert "1 is taken" in system.warnings[0]


def test_of_an_unknown_architecture_all_links_are_asked_for():
    system = nvml.probe(doubles.hgx_h200(refused=["nvmlDeviceGetCudaComputeCapability"]))
    assert [gpu.nvlinks for gpu in system.gpus] == [18] * 8
    assert system.islands == (tuple(range(8)),)
    assert system.notes == ()


def test_a_link_that_saves_power_is_not_degraded():
    asleep = doubles.hgx_h200()
    awake = asleep._field
    asleep._field = lambda gpu, field, link: (
        SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=2))
        if (gpu, field) == (3, 165)
        else awake(gpu, field, link)
    )
    assert nvml.probe(asleep) == nvml.probe(doubles.hgx_h200())


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (doubles.dgx1, "nvmlDeviceGetNvLinkState"),
        (doubles.dgx1, "nvmlDeviceGetNvLinkRemotePciInfo"),
        (doubles.bridged_pcie, "nvmlDeviceGetPciInfo"),
        (doubles.hgx_h200, "nvmlDeviceGetNvLinkRemoteDeviceType"),
    ],
)
def test_links_that_nobody_can_place_are_a_warning(make, refused):
    """Neither the other ends nor the status of pairs: no island, but never without a word."""
    system = nvml.probe(make(refused=[refused, "nvmlDeviceGetP2PStatus"]))
    assert {len(island) for island in system.islands} == {1}
    assert "does not say whether NVLink joins GPU0, GPU1, GPU2" in system.warnings[-1]
    assert "no NVLink" not in verdict(system)


QUERIES = sorted(name for name in dir(doubles.Recorded) if name.startswith("nvml"))


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize(
    "make", [doubles.hgx_h200, doubles.dgx1, lambda **k: doubles.gb200_tray(0, **k)]
)
def test_every_query_may_be_refused(make, query):
    system = nvml.probe(make(refused=[query]))
    assert from_json(to_json(system)) == system
    assert report(system)
    if query in ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"):
        assert not system.gpus
        assert system.warnings[0] == f"NVML refuses {query}: Not Supported"
    else:
        assert len(system.gpus) in (4, 8)


def test_nothing_may_be_answered():
    system = nvml.probe(doubles.hgx_h200(refused=set(QUERIES) - {"nvmlDeviceGetCount"}))
    assert system.gpus == ()
    assert len(system.warnings) == 1  # for all eight


def play_sysfs(root, devices, nics=(), nodes=("0-31", "32-63")):
    """Make a /sys of PCI devices: bus -> (path below /sys/devices, NUMA node)."""
    links = root / "bus" / "pci" / "devices"
    links.mkdir(parents=True)
    for node, cpus in enumerate(nodes):
        folder = root / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for path, numa in devices:
        here = root / "devices"
        for part in path.split("/"):
            here = here / part
            here.mkdir(exist_ok=True)
            if not part.startswith("pci"):
                (here / "numa_node").write_text(f"{numa}\n")
                (here / "max_link_speed").write_text("32.0 GT/s PCIe\n")
                (here / "max_link_width").write_text("16\n")
                if not (links / part).exists():
                    os.symlink(here, links / part)
        (here / "local_cpulist").write_text(f"{nodes[max(numa, 0)]}\n")
    for name, bus, rate in nics:
        port = root / "class" / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text(f"{rate} Gb/sec (4X NDR)\n")
        os.symlink(os.path.realpath(links / bus), port.parents[1] / "device")
    return Sysfs(root)


def hgx_sysfs(root):
    """Each GPU behind a switch of its own with a NIC; the NICs' names are permuted."""
    devices, nics = [], []
    for number, bus in enumerate(HGX_BUSES):
        numa, slot = number // 4, bus[5:7]
        above = f"pci0000:{slot}/0000:{slot}:01.0/0000:{slot}:02.0"
        # Root port, upper and lower bridge of the switch, and what hangs below.
        devices.append((f"{above}/0000:{slot}:03.0/{bus}", numa))
        nic = f"0000:{slot}:10.0"
        devices.append((f"{above}/0000:{slot}:04.0/{nic}", numa))
        nics.append((f"mlx5_{(number * 3 + 4) % 8}", nic, 400))
    return play_sysfs(root, devices, nics)


def test_a_host_with_its_nics(tmp_path):
    system = live.machine("a", doubles.hgx_h200(), hgx_sysfs(tmp_path))
    assert [cpu.cpus for cpu in system.cpus] == ["0-31", "32-63"]
    assert [gpu.numa for gpu in system.gpus] == [0] * 4 + [1] * 4
    assert system.gpus[5].cpus == "32-63"
    rails = [system.devices[nic].label for nic in system.rails]
    assert rails == [f"mlx5_{(number * 3 + 4) % 8}" for number in range(8)]
    own = system.path(0, system.rails[0])
    assert (own.kind, own.gbytes, own.source) == ("PIX", 48, "sysfs")
    assert system.letters(0, system.rails[1]) == "NODE"
    assert system.letters(0, system.rails[7]) == "SYS"
    assert "8 rails a node" in verdict(system)


def test_a_live_host_is_written_for_nccl(tmp_path):
    system = live.machine("a", doubles.hgx_h200(), hgx_sysfs(tmp_path))
    again = parse_nccl(write_nccl(system))
    number_of = {(one.bus, isinstance(one, Gpu)): n for n, one in enumerate(again.devices)}
    same = [number_of[one.bus, isinstance(one, Gpu)] for one in system.devices]
    for a in range(16):
        for b in range(16):
            expected = system.letters(a, b).replace("NODE", "PHB")
            assert again.letters(same[a], same[b]) == expected
    assert [again.gpus[same[gpu]].numa for gpu in range(8)] == [0] * 4 + [1] * 4


def test_paths_of_the_pci_tree(tmp_path):
    """PIX in one switch, PXB over two, PHB below one host bridge; two ports of a card are PIX."""
    top = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02"
    devices = [
        (f"{top}:01.0/0000:03:00.0", 0),
        (f"{top}:02.0/0000:04:00.0", 0),
        (f"{top}:03.0/0000:05:00.0/0000:06:01.0/0000:07:00.0", 0),
        ("pci0000:00/0000:00:02.0/0000:08:00.0", 0),
        ("pci0000:00/0000:00:02.0/0000:08:00.1", 0),
    ]
    buses = [path.rpartition("/")[2] for path, _ in devices]
    nics = [(f"mlx5_{number}", bus, 100) for number, bus in enumerate(buses)]
    system = live.machine("", None, play_sysfs(tmp_path, devices, nics))
    cells = [system.letters(0, other) for other in range(1, 5)]
    assert cells == ["PIX", "PXB", "PHB", "PHB"]
    assert system.letters(3, 4) in ("PIX", "PHB")


def test_a_machine_that_says_nothing(tmp_path):
    system = live.machine("a", None, Sysfs(tmp_path / "none"))
    assert (system.cpus, system.devices) == ((), ())
    assert report(system).startswith("1 node without a GPU")


@pytest.fixture
def played(monkeypatch):
    """Let every rank of a played cluster see a machine of its own."""

    def play(cluster, machine_of_rank, bus_of_rank):
        def rank():
            return cluster.rank_of_thread[threading.get_ident()]

        monkeypatch.setattr(live, "machine", lambda host, api: machine_of_rank(rank()))
        monkeypatch.setattr(live, "visible_gpus", lambda: [bus_of_rank(rank())])
        monkeypatch.setattr(nvml, "load", object)
        monkeypatch.setitem(sys.modules, "mpi4py", cluster.mpi4py)

    return play


def test_a_job_on_two_trays_of_a_rack(played):
    """Ranks round-robin on two trays: the fabric joins what MPI calls two nodes."""
    trays = [nvml.probe(doubles.gb200_tray(tray)) for tray in (0, 1)]
    cluster = Cluster([0, 1] * 4)
    played(cluster, lambda r: trays[r % 2], lambda r: trays[r % 2].gpus[r // 2].bus)
    systems = cluster.run(survey)
    assert len({to_json(system) for system in systems}) == 1
    system = systems[0]
    assert system.islands == (tuple(range(8)),)
    assert [level.name for level in system.topology.levels] == ["node", "domain", "network"]
    assert system.topology.group(0, 2) == (0, 2, 4, 6)
    assert system.topology.shape == (4, 2, 1)
    assert "NVLink domains across nodes" in verdict(system)
    assert cluster.run(discover)[3] == system.topology


@pytest.mark.parametrize(
    ("fabrics", "names"),
    [
        ([(bytes(16), 0, 3)] * 2, ["node", "network"]),  # of a single host: no UUID
        ([(b"\1" * 16, 7, 2), (b"\1" * 16, 7, 3)], ["node", "network"]),  # still in progress
        ([(b"\1" * 16, 7, 3), (b"\1" * 16, 8, 3)], ["node", "network"]),  # another clique
        ([(b"\1" * 16, 7, 3), (b"\2" * 16, 7, 3)], ["node", "network"]),  # another rack
        ([(b"\0" * 15 + b"\1", 7, 3)] * 2, ["node", "domain", "network"]),
    ],
)
def test_only_one_clique_of_a_fabric_that_is_up_joins_hosts(played, fabrics, names):
    trays = [nvml.probe(doubles.gb200_tray(n, fabric=fabrics[n])) for n in (0, 1)]
    cluster = Cluster([0, 0, 0, 0, 1, 1, 1, 1])
    played(cluster, lambda r: trays[r // 4], lambda r: trays[r // 4].gpus[r % 4].bus)
    system = cluster.run(survey)[0]
    assert [level.name for level in system.topology.levels] == names
    assert system.topology.group(0, 5) == (4, 5, 6, 7)


def test_a_switch_does_not_join_what_nvml_refused(played):
    """Also where nothing else is known of the pair."""
    unknown = ["nvmlDeviceGetTopologyCommonAncestor"]
    node = nvml.probe(doubles.hgx_h200(joined=doubles.pairs([range(4)]), refused=unknown))
    cluster = Cluster([0] * 8)
    played(cluster, lambda r: node, lambda r: HGX_BUSES[r])
    assert cluster.run(survey)[0].islands == node.islands == ((0, 1, 2, 3), (4,), (5,), (6,), (7,))


def test_a_gpu_that_nvml_does_not_show_is_a_warning(played):
    pairs = nvml.probe(doubles.bridged_pcie())
    cluster = Cluster([0] * 2)
    played(cluster, lambda r: pairs, lambda r: (pairs.gpus[0].bus, "0000:99:00.0")[r])
    system = cluster.run(survey)[0]
    assert "rank 1 has GPU 0000:99:00.0, which NVML does not show" in system.notes


def test_a_job_that_sees_one_gpu_in_each_container(played):
    """Each rank sees its own GPU only, by another index than its neighbours': the switch joins."""
    whole = doubles.hgx_h200()
    single = [
        nvml.probe(doubles.hgx_h200(buses=[whole.buses[n]], links=[whole.links[n]], joined=set()))
        for n in range(8)
    ]
    cluster = Cluster([0] * 8)
    played(cluster, lambda r: single[7 - r], lambda r: HGX_BUSES[7 - r])
    system = cluster.run(survey)[0]
    assert [system.gpus[rank.gpu].bus for rank in system.ranks] == HGX_BUSES[::-1]
    assert len(system.islands) == 1
    assert [level.name for level in system.topology.levels] == ["node", "network"]


def test_links_of_which_each_container_sees_one_end_are_a_warning(played):
    """Direct ones, without a switch: each rank sees its own GPU only."""
    whole = doubles.dgx1()
    single = [
        nvml.probe(doubles.dgx1(buses=[whole.buses[n]], links=[whole.links[n]], joined=set()))
        for n in range(8)
    ]
    cluster = Cluster([0] * 8)
    played(cluster, lambda r: single[r], lambda r: whole.buses[r])
    system = cluster.run(survey)[0]
    assert len(system.islands) == 8
    assert "no rank sees the other ends of the NVLinks of GPU0, GPU1, " in " ".join(system.notes)
    together = nvml.probe(whole)
    played(cluster, lambda r: together, lambda r: whole.buses[r])
    assert "no rank sees" not in " ".join(cluster.run(survey)[0].notes)


def test_a_part_of_a_cube_mesh(played):
    """Blink: of GPUs 0, 1, 4, 5 the pairs with the most links are the islands."""
    mesh = nvml.probe(doubles.dgx1())
    cluster = Cluster([0] * 4)
    played(cluster, lambda r: mesh, lambda r: mesh.gpus[(0, 1, 4, 5)[r]].bus)
    found = cluster.run(discover)
    assert set(found) == {found[0]}
    assert found[0].levels[0].name == "domain"
    assert found[0].levels[0].groups == ((0, 2), (1, 3))


def test_ranks_that_share_a_gpu_make_no_island(played, caplog):
    pairs = nvml.probe(doubles.bridged_pcie())
    cluster = Cluster([0] * 8)
    played(cluster, lambda r: pairs, lambda r: pairs.gpus[r % 4].bus)
    found = cluster.run(discover)[0]
    assert [level.name for level in found.levels] == ["node", "network"]
    assert "not every rank has a GPU of its own" in caplog.text


def test_a_rank_whose_host_cannot_be_read_does_not_hang_the_others(played, caplog):
    pairs = nvml.probe(doubles.bridged_pcie())

    def look(rank):
        if rank == 2:
            raise OSError("no such device")
        return pairs

    cluster = Cluster([0] * 4)
    played(cluster, look, lambda r: pairs.gpus[r].bus)
    found = cluster.run(discover)
    assert [level.name for level in found[0].levels] == ["node", "network"]
    assert "rank 2 cannot look at its host: no such device" in caplog.text


def test_the_machine_that_runs_the_tests():
    system = live.machine("here")
    assert from_json(to_json(system)) == system
    assert report(system)
    kernel = Path("/sys/devices/system/node/node0/cpulist")
    if kernel.exists():
        assert system.cpus[0].cpus == kernel.read_text().strip()
