"""The XML of NCCL, written from what is known of a machine: ``NCCL_TOPO_FILE`` takes it.

Where the PCI tree is known (from such a file, or from sysfs) it is written as it is. Where only the
matrix is, a tree with the same paths is made up: bridges ``ffff:ff:..`` and bus ids ``fffe:..``
stand for those that nobody knows. NODE becomes PHB, which is all that NCCL knows. Sets
that SYS parts and whose NUMA node is unknown are numbered.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from xml.sax.saxutils import quoteattr

from topology.islands import Weights, connected
from topology.system import FAST, KINDS, Cpu, Gpu, Nic, Pci, System

SWITCH_CLASS = "0x068000"
_SWITCH_BUS = "fffffff:ffff:ff"
_BRIDGE, _GPU_CLASS, _NIC_CLASS = "0x060400", "0x030200", "0x020000"


@dataclass
class _Tag:
    """An element to write."""

    name: str
    attributes: dict[str, object]
    children: list["_Tag"] = field(default_factory=list)

    def lines(self, depth: int = 0) -> Iterable[str]:
        """Yield the lines of this element and all below it."""
        given = {name: value for name, value in self.attributes.items() if value is not None}
        words = "".join(f" {name}={quoteattr(str(value))}" for name, value in given.items())
        start = f"{'  ' * depth}<{self.name}{words}"
        if not self.children:
            yield f"{start}/>"
            return
        yield f"{start}>"
        for child in self.children:
            yield from child.lines(depth + 1)
        yield f"{'  ' * depth}</{self.name}>"


def write_nccl(system: System) -> str:
    """Return the document."""
    xgmi = any(path.kind == "XGMI" for path in system.paths)
    root = _Tag("system", {"version": 2 if xgmi else 1})
    for host in range(len(system.hosts)):
        known = any(pci.host == host for pci in system.pci)
        root.children += (_known_tree if known else _made_up_tree)(system, host)
    return "\n".join(root.lines()) + "\n"


def _known_tree(system: System, host: int) -> list[_Tag]:
    cpus = {cpu.numa: _cpu_tag(system, cpu) for cpu in system.cpus if cpu.host == host}
    pci = [one for one in system.pci if one.host == host]
    tags = {one.bus: _pci_tag(one.bus, one) for one in pci}
    for one in pci:
        above = tags.get(one.parent) if one.parent else None
        home = above or cpus.setdefault(one.numa or 0, _bare_cpu(system, host, one.numa or 0))
        home.children.append(tags[one.bus])
    for number, device in enumerate(system.devices):
        if device.host == host:
            home = tags.get(device.bus or "") or cpus.setdefault(
                device.numa or 0, _bare_cpu(system, host, device.numa or 0)
            )
            _hang(system, number, home)
    return list(cpus.values())


def _hang(system: System, number: int, home: _Tag) -> None:
    """Put a device below its ``<pci>``, or a NIC without one below its CPU."""
    device = system.devices[number]
    if isinstance(device, Gpu):
        # What is known from its class only would become a GPU without NVLinks.
        if not device.source.endswith("class"):
            home.children.append(_gpu_tag(system, number, device))
    elif not device.source.endswith("class"):
        nics = [child for child in home.children if child.name == "nic"]
        nic = nics[0] if nics else _Tag("nic", {})
        if not nics:
            home.children.append(nic)
        nic.children.append(_net_tag(device, number - len(system.gpus)))


def _made_up_tree(system: System, host: int) -> list[_Tag]:
    """Return CPUs, bridges and devices whose paths are those of the matrix."""
    numbers = [number for number, one in enumerate(system.devices) if one.host == host]
    bridges = count(1)
    free = count(max((system.devices[n].numa or 0 for n in numbers), default=-1) + 1)
    tags = []
    for group in _apart(system, numbers, "NODE"):
        numas = [numa for n in group if (numa := system.devices[n].numa) is not None]
        numa = numas[0] if numas else next(free)
        cpu = _cpu_of(system, host, numa)
        for outer in _apart(system, group, "PXB"):
            cpu.children.append(_switches(system, outer, bridges))
        tags.append(cpu)
    return tags


def _apart(system: System, numbers: Sequence[int], kind: str) -> list[tuple[int, ...]]:
    """Return the sets whose members paths of this kind or better connect, NVLink left out."""
    worst = KINDS.index(kind)
    graph: Weights = {number: {} for number in numbers}
    for a in numbers:
        for b in numbers:
            path = system.path(a, b) if a < b else None
            if path and path.kind not in FAST and KINDS.index(path.kind) <= worst:
                graph[a][b] = graph[b][a] = 1
            same = system.devices[a].numa
            if kind == "NODE" and a < b and same is not None and same == system.devices[b].numa:
                graph[a][b] = graph[b][a] = 1
    return list(connected(graph))


def _switches(system: System, group: tuple[int, ...], new: Iterator[int]) -> _Tag:
    """Return the bridges and devices of a set that switches connect."""
    if len(group) == 1:
        return _device_tag(system, group[0])
    inner = _apart(system, group, "PIX")
    below = []
    for some in inner:
        bridge = _bridge_tag(next(new))
        bridge.children += [_device_tag(system, number) for number in some]
        below.append(bridge)
    if len(below) == 1:
        return below[0]
    outer = _bridge_tag(next(new))
    outer.children += below
    return outer


def _bridge_tag(number: int) -> _Tag:
    bus = f"ffff:ff:{number >> 3 & 0xFF:02x}.{number & 7:x}"
    return _Tag("pci", {"busid": bus, "class": _BRIDGE})


def _device_tag(system: System, number: int) -> _Tag:
    device = system.devices[number]
    is_gpu = isinstance(device, Gpu)
    tag = _Tag(
        "pci",
        {"busid": _bus(system, number), "class": _GPU_CLASS if is_gpu else _NIC_CLASS},
    )
    _hang(system, number, tag)
    return tag


def _bus(system: System, number: int) -> str:
    return system.devices[number].bus or f"fffe:{number >> 8 & 0xFF:02x}:{number & 0xFF:02x}.0"


def _cpu_of(system: System, host: int, numa: int) -> _Tag:
    known = (cpu for cpu in system.cpus if (cpu.host, cpu.numa) == (host, numa))
    found = next(known, None)
    return _cpu_tag(system, found) if found else _bare_cpu(system, host, numa)


def _bare_cpu(system: System, host: int, numa: int) -> _Tag:
    return _cpu_tag(system, Cpu(host, numa))


def _cpu_tag(system: System, cpu: Cpu) -> _Tag:
    several = len(system.hosts) > 1
    return _Tag(
        "cpu",
        {
            "host_hash": (system.hosts[cpu.host] or f"0x{cpu.host + 1:x}") if several else None,
            "numaid": cpu.numa,
            "affinity": mask(cpu.cpus) if cpu.cpus else None,
            "arch": cpu.arch,
            "vendor": cpu.vendor,
            "familyid": cpu.family,
            "modelid": cpu.model,
        },
    )


def mask(cpus: str) -> str:
    """Return a list of CPUs as words of 32 bits in hexadecimal, the most significant first."""
    bits = 0
    for run in cpus.split(","):
        first, _, last = run.partition("-")
        num = int(last or first) - int(first) + 1
        bits |= ((1 << max(num, 0)) - 1) << int(first)
    num_words = max(1, -(-bits.bit_length() // 32))
    return ",".join(f"{bits >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(num_words)))


def _pci_tag(bus: str, pci: Pci) -> _Tag:
    speed = None
    if pci.gbytes is not None:
        speed = f"{pci.gbytes * 80 / 7.5 / (pci.width or 16):.1f} GT/s PCIe"
    return _Tag(
        "pci",
        {
            "busid": bus,
            "class": pci.pci_class,
            "vendor": pci.vendor,
            "device": pci.device,
            "link_speed": speed,
            "link_width": pci.width,
        },
    )


def _gpu_tag(system: System, number: int, gpu: Gpu) -> _Tag:
    tag = _Tag(
        "gpu",
        {
            "dev": gpu.dev if gpu.dev is not None else number,
            "sm": gpu.sm,
            "rank": gpu.rank if gpu.rank is not None else number,
        },
    )
    if gpu.switched and gpu.nvlinks:
        link = {"target": _SWITCH_BUS, "count": gpu.nvlinks, "tclass": SWITCH_CLASS}
        tag.children.append(_Tag("nvlink", dict(link)))
        return tag
    for peer, links in sorted(system.nvlink[number].items()):
        path = system.path(number, peer)
        if system.gpus[peer].host == gpu.host and path is not None:
            name = "xgmi" if path.kind == "XGMI" else "nvlink"
            link = {"target": _bus(system, peer), "count": links, "tclass": _GPU_CLASS}
            tag.children.append(_Tag(name, dict(link)))
    return tag


def _net_tag(nic: Nic, number: int) -> _Tag:
    speed = None if nic.gbit is None else round(nic.gbit * 1000)
    return _Tag(
        "net",
        {
            "name": nic.label or nic.name,
            "dev": number if nic.dev is None else nic.dev,
            "speed": speed,
            "port": nic.port,
        },
    )
