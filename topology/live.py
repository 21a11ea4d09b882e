"""One host, and all hosts of a job: what NVML, sysfs and MPI say, put together.

``machine`` looks at one host, ``assemble`` joins what the ranks of a job saw. Ranks in containers
may each see one GPU only; what nobody saw together is known from switches and domains. A rank's GPU
is that which CUDA calls by the rank's number on its host; it is found again by its bus id.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from topology import documents, nvml
from topology.relations import cpu_list, pcie_paths, share_switch
from topology.sysfs import Sysfs, short_bus
from topology.system import Cpu, Gpu, Nic, Path, Pci, Rank, System


def machine(host: str = "", api: Any | None = None, sysfs: Sysfs | None = None) -> System:
    """Return this host: GPUs from NVML, NUMA nodes, NICs and the PCI tree from sysfs.

    Args:
        host: its name.
        api: pynvml, started; None: there is none.
        sysfs: None: that of this system.
    """
    kernel = sysfs or Sysfs()
    base = nvml.probe(api, host) if api is not None else System((host,), source="sysfs")
    cpus = kernel.numa_nodes()
    only = cpus[0].numa if len(cpus) == 1 else None
    gpus = tuple(_placed(gpu, kernel, only) for gpu in base.gpus)
    nics = tuple(nic if nic.numa is not None else replace(nic, numa=only) for nic in kernel.nics())
    devices: tuple[Gpu | Nic, ...] = (*gpus, *nics)
    buses = [one.bus for one in devices if one.bus is not None]
    tree = kernel.tree(list(dict.fromkeys(buses)))
    found = pcie_paths([(0, one.bus, one.numa) for one in devices], tree, "sysfs")
    known = {(path.a, path.b) for path in base.paths if path.kind != "NV"}
    paths = [_bridged(path, devices, kernel) for path in found if (path.a, path.b) not in known]
    return replace(base, cpus=cpus, gpus=gpus, nics=nics, pci=tree, paths=(*base.paths, *paths))


def _placed(gpu: Gpu, kernel: Sysfs, only: int | None) -> Gpu:
    """Add the NUMA node from sysfs: NVML's is that of the memory, which on Grace has no CPUs."""
    if gpu.bus is None:
        return replace(gpu, numa=only)
    numa = kernel.numa_of(gpu.bus)
    return replace(gpu, numa=only if numa is None else numa, cpus=kernel.cpus_of(gpu.bus))


def _bridged(path: Path, devices: Sequence[Gpu | Nic], kernel: Sysfs) -> Path:
    """Tell several host bridges of a NUMA node (NODE) from one (PHB)."""
    if path.kind != "PHB":
        return path
    first, second = (kernel.host_bridge(devices[n].bus or "") for n in (path.a, path.b))
    return replace(path, kind="NODE") if first != second else path


def visible_gpus() -> list[str]:
    """Return the bus ids of the GPUs that CUDA shows this process, in its order; maybe none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, text = ctypes.c_int(), ctypes.create_string_buffer(64)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    buses = []
    for number in range(count.value):
        device = ctypes.c_int()
        failed = cuda.cuDeviceGet(ctypes.byref(device), number)
        if not failed and cuda.cuDeviceGetPCIBusId(text, len(text), device) == 0:
            buses.append(short_bus(text.value.decode()))
    return buses


def record(seen: System, own_bus: str | None) -> str:
    """Return what a rank tells the others: its GPU, its CPUs, and the host as it sees it."""
    cpus = cpu_list(sorted(os.sched_getaffinity(0)))
    head = json.dumps({"bus": own_bus, "cpus": cpus})
    return f"{head}\n{documents.to_json(seen, indent=None)}"


def assemble(nodes: Sequence[int], hosts: Sequence[str], records: Sequence[str]) -> System:
    """Join what the ranks saw.

    Args:
        nodes: by rank, a number that identifies its node.
        hosts: by rank, the name of its host.
        records: by rank, what ``record`` gave; empty where a rank could not say anything.
    """
    host_of = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    names: dict[int, str] = {}
    for node, name in zip(nodes, hosts, strict=True):
        names.setdefault(host_of[node], name)
    joined = _Joined()
    heads: list[Mapping[str, Any]] = []
    parsed: dict[str, System] = {}
    for node, text in zip(nodes, records, strict=True):
        head, _, body = text.partition("\n")
        heads.append(json.loads(head) if head else {})
        if body and (host_of[node], body) not in joined.done:
            joined.done.add((host_of[node], body))
            if body not in parsed:
                parsed[body] = documents.from_json(body)
            joined.add(parsed[body], host_of[node])
    gpus = tuple(joined.gpus.values())
    number_of = {key: number for number, key in enumerate(joined.gpus)}
    ranks = []
    for rank, (node, said) in enumerate(zip(nodes, heads, strict=True)):
        host = host_of[node]
        gpu = number_of.get((host, said.get("bus")))
        cpus = said.get("cpus")
        numa = _numa(cpus, [cpu for cpu in joined.cpus.values() if cpu.host == host])
        ranks.append(Rank(rank, host, gpu, cpus, numa))
        if said.get("bus") is not None and gpu is None:
            joined.warnings.append(f"rank {rank} has GPU {said['bus']}, which NVML does not show")
    paths = joined.all_paths()
    joined.warn_of_ends_nobody_sees(paths)
    return System(
        tuple(names[host] for host in range(len(names))),
        tuple(joined.cpus.values()),
        gpus,
        tuple(joined.nics.values()),
        paths,
        tuple(joined.pci.values()),
        tuple(ranks),
        warnings=tuple(dict.fromkeys(joined.warnings)),
        source="job",
    )


def _numa(cpus: str | None, nodes: Sequence[Cpu]) -> int | None:
    """Return the NUMA node that holds all CPUs of a rank, None where it may roam."""
    mine = _numbers(cpus or "")
    for node in nodes:
        if mine and mine <= _numbers(node.cpus or ""):
            return node.numa
    return None


def _numbers(cpus: str) -> set[int]:
    found: set[int] = set()
    for run in cpus.split(",") if cpus else ():
        first, _, last = run.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


class _Joined:
    """Devices of all hosts by what identifies them, and paths between them."""

    def __init__(self) -> None:
        self.done: set[tuple[int, str]] = set()
        self.cpus: dict[Any, Cpu] = {}
        self.gpus: dict[Any, Gpu] = {}
        self.nics: dict[Any, Nic] = {}
        self.pci: dict[Any, Pci] = {}
        self.paths: dict[Any, Path] = {}
        self.together: set[frozenset[Any]] = set()
        self.warnings: list[str] = []

    def add(self, seen: System, host: int) -> None:
        """Add what one rank saw of its host."""
        for cpu in seen.cpus:
            self.cpus.setdefault((host, cpu.numa), replace(cpu, host=host))
        for pci in seen.pci:
            self.pci.setdefault((host, pci.bus), replace(pci, host=host))
        keys: list[Any] = []
        for gpu in seen.gpus:
            keys.append((host, gpu.bus or gpu.uuid or gpu.name))
            name = f"GPU{len(self.gpus)}"
            self.gpus.setdefault(keys[-1], replace(gpu, host=host, name=name))
        self.together |= {frozenset(pair) for pair in combinations(keys, 2)}
        for nic in seen.nics:
            keys.append((host, nic.label, nic.bus, nic.port))
            name = f"NIC{len(self.nics)}"
            self.nics.setdefault(keys[-1], replace(nic, host=host, name=name))
        for path in seen.paths:
            kind = "link" if path.kind == "NV" else "pcie"
            self.paths.setdefault((keys[path.a], keys[path.b], kind), path)
        self.warnings += seen.warnings

    def all_paths(self) -> tuple[Path, ...]:
        """Return all paths by number, with those through switches that no rank saw both ends of."""
        order = [*self.gpus, *self.nics]
        number_of = {key: number for number, key in enumerate(order)}
        found = []
        for (first, second, _), path in self.paths.items():
            a, b = sorted((number_of[first], number_of[second]))
            found.append(replace(path, a=a, b=b))
        linked = {(path.a, path.b) for path in found if path.kind == "NV"}
        gpus = list(self.gpus.items())
        for b, (second, two) in enumerate(gpus):
            for a, (first, one) in enumerate(gpus[:b]):
                judged = (a, b) in linked or frozenset((first, second)) in self.together
                if not judged and share_switch(one, two):
                    links = min(one.nvlinks or 0, two.nvlinks or 0)
                    found.append(Path(a, b, "NV", links, source="nvml, switch"))
        return tuple(found)

    def warn_of_ends_nobody_sees(self, paths: Sequence[Path]) -> None:
        """Name GPUs whose links go to others of the host directly: no rank sees both ends."""
        joined = {end for path in paths if path.kind == "NV" for end in (path.a, path.b)}
        lonely = []
        for number, (key, gpu) in enumerate(self.gpus.items()):
            others = [other for other in self.gpus if other != key and other[0] == key[0]]
            apart = any(frozenset((key, other)) not in self.together for other in others)
            if gpu.nvlinks and not gpu.switched and number not in joined and apart:
                lonely.append(gpu.name)
        if lonely:
            self.warnings.append(
                f"no rank sees the other ends of the NVLinks of {nvml.few(lonely)}: they are not"
                " used; let each container see all GPUs of its host, or set ZCOMM_TOPOLOGY"
            )
