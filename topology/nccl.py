"""The XML in which NCCL and RCCL write a machine, read in all its dialects.

``<system>`` holds ``<cpu>`` (a NUMA node), which holds a tree of ``<pci>``; below them ``<gpu>``
with ``<nvlink>``, ``<xgmi>`` or ``<c2c>``, and ``<nic>`` with ``<net>``. Cloud files have bus ids
and classes only: what is a GPU is then known from its class, and NVLinks are unknown. One ``<pci>``
bridge stands for one switch, as NCCL writes it. NCCL knows no NODE: host bridges of one NUMA node
are PHB.

Speeds are read as numbers: ``32.0 GT/s`` and ``32.0 GT/s PCIe`` are the same. The bandwidths of an
NVLink by ``sm`` are those of NCCL (``graph/topo.h``).
"""

import re
from dataclasses import dataclass, field, replace

from topology.errors import TopologyError
from topology.markup import Element, parse_xml
from topology.relations import cpu_list, nvlink_gbytes, pair_paths, pcie_gbytes, pcie_paths
from topology.system import Cpu, Gpu, Nic, Path, Pci, System

SOURCE = "file NCCL XML"
GPU_CLASSES, NIC_CLASSES = ("0x03",), ("0x02",)
SWITCH_CLASS, CPU_BRIDGE_CLASS = "0x068000", "0x068001"
_BUS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(\.[0-9a-f])?")
_SPEED = re.compile(r"\s*(\d+(\.\d+)?)\s*(GT/s|gt/s)?(\s+PCIe)?\s*")
_HEX = re.compile(r"[0-9a-fA-F]{1,8}(,[0-9a-fA-F]{1,8})*")


@dataclass
class _Reading:
    """What was read until now."""

    hosts: list[str] = field(default_factory=list)
    cpus: list[Cpu] = field(default_factory=list)
    pci: list[Pci] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    nics: list[Nic] = field(default_factory=list)
    links: list[tuple[int, Element]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    places: dict[tuple[int, str], Element] = field(default_factory=dict)


def parse_nccl(text: str) -> System:
    """Read a topology file of NCCL or RCCL.

    Raises:
        TopologyError: not such a document, or one with a value that cannot be meant; the message
            names the line.
    """
    root = parse_xml(text)
    if root.tag != "system":
        what = "what NCCL found, not a machine" if root.tag.startswith("graph") else "another thing"
        raise TopologyError(
            f"line {root.line}: <{root.tag}> is {what}; <system> of NCCL_TOPO_DUMP_FILE is expected"
        )
    version = root.number("version")
    if version not in (1, 2):
        raise TopologyError(f"{root.where}: version {version}; possible: 1 (NCCL), 2 (RCCL)")
    reading = _Reading()
    hashes = _hosts(root)
    for child in root.children:
        if child.tag == "cpu":
            _cpu(child, hashes.index(child.attributes.get("host_hash", "")), reading)
        else:
            reading.warnings.append(f"{child.where} is not known: ignored")
    if not reading.cpus:
        raise TopologyError(f"{root.where}: it has no <cpu>")
    reading.hosts = [_host_name(name) for name in hashes]
    return _system(reading)


def _hosts(root: Element) -> list[str]:
    names = [cpu.attributes.get("host_hash", "") for cpu in root.find("cpu")]
    return list(dict.fromkeys(names))


def _host_name(name: str) -> str:
    return name.removeprefix("0x")


def _cpu(element: Element, host: int, reading: _Reading) -> None:
    numa = element.number("numaid")
    if numa is None:
        raise TopologyError(f"{element.where}: a numaid is expected")
    if any(cpu.host == host and cpu.numa == numa for cpu in reading.cpus):
        raise TopologyError(f"{element.where}: NUMA node {numa} is there twice")
    given = element.attributes
    reading.cpus.append(
        Cpu(
            host,
            numa,
            _affinity(element),
            arch=given.get("arch"),
            vendor=given.get("vendor"),
            family=given.get("familyid"),
            model=given.get("modelid"),
            source=SOURCE,
        )
    )
    _children(element, host, numa, None, reading)


def _children(
    element: Element, host: int, numa: int, parent: Pci | None, reading: _Reading
) -> None:
    for child in element.children:
        if child.tag == "pci":
            _pci(child, host, numa, parent.bus if parent else None, reading)
        elif child.tag == "nic":
            _nic(child, host, numa, parent.bus if parent else None, reading)
        elif child.tag == "gpu" and parent is not None:
            _gpu(child, parent, reading)
        elif child.tag not in ("pcilink", "nvlink", "c2c", "xgmi"):
            reading.warnings.append(f"{child.where} is not expected here: ignored")


def _pci(element: Element, host: int, numa: int, parent: str | None, reading: _Reading) -> None:
    bus = _bus(element, "busid")
    if (host, bus) in reading.places:
        other = reading.places[host, bus].line
        raise TopologyError(f"{element.where}: bus id {bus} is there twice (line {other})")
    reading.places[host, bus] = element
    given = element.attributes
    pci_class = given.get("class", "").lower() or None
    gbytes, width = _pci_speed(element)
    one = Pci(
        host, bus, parent, numa, pci_class, given.get("vendor"), given.get("device"), gbytes, width
    )
    reading.pci.append(one)
    num_known = len(reading.gpus) + len(reading.nics)
    _children(element, host, numa, one, reading)
    if len(reading.gpus) + len(reading.nics) == num_known and not element.find("pci"):
        _by_class(one, reading)


def _by_class(pci: Pci, reading: _Reading) -> None:
    """Take a PCI device without further elements for what its class says."""
    source = f"{SOURCE}, class"
    if (pci.pci_class or "").startswith(GPU_CLASSES):
        name = f"GPU{len(reading.gpus)}"
        reading.gpus.append(Gpu(name, pci.host, pci.bus, numa=pci.numa, source=source))
    elif (pci.pci_class or "").startswith(NIC_CLASSES):
        name = f"NIC{len(reading.nics)}"
        reading.nics.append(Nic(name, pci.host, bus=pci.bus, numa=pci.numa, source=source))


def _gpu(element: Element, pci: Pci, reading: _Reading) -> None:
    number = len(reading.gpus)
    if number and (reading.gpus[-1].host, reading.gpus[-1].bus) == (pci.host, pci.bus):
        raise TopologyError(f"{element.where}: a second <gpu> of {pci.bus}")
    reading.gpus.append(
        Gpu(
            f"GPU{number}",
            pci.host,
            pci.bus,
            title=element.attributes.get("gcn") or element.attributes.get("arch"),
            sm=element.number("sm"),
            numa=pci.numa,
            dev=element.number("dev"),
            rank=element.number("rank"),
            source=SOURCE,
        )
    )
    for child in element.children:
        if child.tag in ("nvlink", "xgmi"):
            reading.links.append((number, child))
        elif child.tag != "c2c":
            reading.warnings.append(f"{child.where} is not expected here: ignored")


def _nic(element: Element, host: int, numa: int, bus: str | None, reading: _Reading) -> None:
    for net in element.find("net"):
        speed = net.number("speed")
        reading.nics.append(
            Nic(
                f"NIC{len(reading.nics)}",
                host,
                label=net.attributes.get("name"),
                bus=bus,
                numa=numa,
                gbit=None if not speed or speed < 0 else speed / 1000,
                port=net.number("port"),
                dev=net.number("dev"),
                source=SOURCE,
            )
        )


def _bus(element: Element, name: str) -> str:
    text = element.attributes.get(name, "").strip().lower()
    if not _BUS.fullmatch(text):
        raise TopologyError(
            f"{element.where}: {name}={text[:40]!r} is no bus id such as 0000:3b:00.0"
        )
    return text


def _affinity(element: Element) -> str | None:
    """Return the mask of CPUs, words of 32 bits with the most significant first, as a list."""
    text = element.attributes.get("affinity", "").strip()
    if not text:
        return None
    if not _HEX.fullmatch(text):
        raise TopologyError(f"{element.where}: affinity={text[:40]!r} is no mask such as 00ff,ff00")
    mask = 0
    for word in text.split(","):
        mask = mask << 32 | int(word, 16)
    bits = reversed(f"{mask:b}")
    return cpu_list(number for number, bit in enumerate(bits) if bit == "1") or None


def _pci_speed(element: Element) -> tuple[float | None, int | None]:
    """Return GB/s one way and lanes; NCCL takes a width of 0 for 16."""
    text = element.attributes.get("link_speed", "").strip()
    width = element.number("link_width")
    if not text or text.lower().startswith("unknown"):
        return None, width or None
    match = _SPEED.fullmatch(text)
    if not match or (width is not None and not 0 <= width <= 64):
        raise TopologyError(
            f"{element.where}: link_speed={text[:40]!r} link_width={width}; such as "
            '"16.0 GT/s PCIe" and 16 is expected'
        )
    lanes = width or 16
    return pcie_gbytes(float(match[1]), lanes), lanes


def _system(reading: _Reading) -> System:
    gpus = list(reading.gpus)
    paths, warnings = pair_paths(gpus, _fast_links(reading, gpus), SOURCE)
    reading.warnings += warnings
    buses = [(gpu.host, gpu.bus, gpu.numa) for gpu in gpus]
    buses += [(nic.host, nic.bus, nic.numa) for nic in reading.nics]
    paths += pcie_paths(buses, reading.pci, SOURCE)
    if gpus and not reading.links and any(gpu.source != SOURCE for gpu in gpus):
        reading.warnings.append("the file names GPUs by class only: NVLinks are unknown")
    elif not gpus:
        reading.warnings.append("the file describes no GPU")
    return System(
        tuple(reading.hosts),
        tuple(reading.cpus),
        tuple(gpus),
        tuple(reading.nics),
        tuple(paths),
        tuple(reading.pci),
        warnings=tuple(reading.warnings),
        source=SOURCE,
    )


def _fast_links(reading: _Reading, gpus: list[Gpu]) -> dict[tuple[int, int], Path]:
    """Return direct links by ordered pair, and write links to switches into ``gpus``."""
    number_of = {(gpu.host, gpu.bus): number for number, gpu in enumerate(gpus)}
    direct: dict[tuple[int, int], Path] = {}
    own = dict.fromkeys(range(len(gpus)), 0)
    to_switch = dict.fromkeys(range(len(gpus)), 0)
    for number, element in reading.links:
        count = element.number("count")
        if count is None or not 0 < count <= 256:
            raise TopologyError(f"{element.where}: count={count}; 1 to 256 is expected")
        target = element.attributes.get("target", "").strip().lower()
        peer = number_of.get((gpus[number].host, target))
        if peer == number:
            reading.warnings.append(f"{element.where}: a link of {gpus[number].name} to itself")
            continue
        if element.attributes.get("tclass", "").lower().startswith(CPU_BRIDGE_CLASS):
            continue  # POWER9: it joins a GPU and its processor, no two GPUs
        own[number] += count
        if peer is not None:
            kind = "XGMI" if element.tag == "xgmi" else "NV"
            links = count + (direct[number, peer].links if (number, peer) in direct else 0)
            direct[number, peer] = Path(min(number, peer), max(number, peer), kind, links)
        elif _is_switch(element, target):
            to_switch[number] += count
        else:
            reading.warnings.append(f"{element.where}: its target is not in the file")
    for number, gpu in enumerate(gpus):
        if gpu.source == SOURCE:
            gpus[number] = _with_links(gpu, own[number], to_switch[number], len(reading.hosts))
    return direct


def _is_switch(element: Element, target: str) -> bool:
    """Say whether a link ends at an NVSwitch; in virtual machines these are not to be seen."""
    pci_class = element.attributes.get("tclass", "").lower()
    return pci_class.startswith(SWITCH_CLASS) or target.startswith("fffffff")


def _with_links(gpu: Gpu, total: int, to_switch: int, num_hosts: int) -> Gpu:
    speed = nvlink_gbytes(gpu.sm) if total else None
    # NCCL writes several hosts into one file only where one NVLink domain holds them.
    domain = "one file" if to_switch and num_hosts > 1 else None
    switched = to_switch > 0
    return replace(gpu, nvlinks=total, link_gbytes=speed, switched=switched, domain=domain)
