"""What Linux says of a host without any library: NUMA nodes, the PCI tree, NICs.

Everything is optional: in a container a file may be missing or hidden, and then a fact is None.
Only devices that matter are read: the GPUs that somebody names, and NICs with a PCI device. A
bridge of ``Pci`` is a switch, as in NCCL's files: of the two bridges of which a switch consists the
upper one is kept.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from topology.relations import pcie_gbytes
from topology.system import Cpu, Nic, Pci

_BUS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
SOURCE = "sysfs"


def short_bus(bus: str) -> str:
    """Return a bus id as sysfs writes it; NVML's has a domain of 8 digits and capitals."""
    text = bus.strip("\0 ").lower()
    return text[4:] if len(text.partition(":")[0]) == 8 and text.startswith("0000") else text


class Sysfs:
    """A tree such as ``/sys``; ``root`` is another one in tests."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        self._root = root

    def numa_nodes(self) -> tuple[Cpu, ...]:
        """Return the NUMA nodes that have CPUs."""
        cpus = []
        for folder in sorted(self._glob("devices/system/node", "node[0-9]*"), key=_trailing):
            listed = _read(folder / "cpulist")
            if listed:
                cpus.append(
                    Cpu(0, _trailing(folder), listed, arch=os.uname().machine, source=SOURCE)
                )
        return tuple(cpus)

    def numa_of(self, bus: str) -> int | None:
        """Return the NUMA node of a PCI device; -1 of the kernel means that it knows none."""
        found = _number(_read(self._device(bus) / "numa_node"))
        return None if found is None or found < 0 else int(found)

    def cpus_of(self, bus: str) -> str | None:
        """Return the CPUs near a PCI device."""
        return _read(self._device(bus) / "local_cpulist") or None

    def nics(self) -> tuple[Nic, ...]:
        """Return physical NICs: InfiniBand and RoCE ports, and network interfaces beside them."""
        found: list[Nic] = []
        for folder in self._glob("class/infiniband", "*"):
            bus = self._bus_of(folder / "device")
            for port in sorted((folder / "ports").glob("[0-9]*")) if bus else ():
                gbit = _number(_read(port / "rate"))
                found.append(self._nic(folder.name, bus, gbit, int(_trailing(port))))
        known = {nic.bus for nic in found}
        for folder in self._glob("class/net", "*"):
            bus = self._bus_of(folder / "device")
            if bus and bus not in known:
                mbit = _number(_read(folder / "speed"))
                found.append(
                    self._nic(folder.name, bus, mbit / 1000 if mbit and mbit > 0 else None)
                )
        return tuple(
            Nic(f"NIC{number}", 0, one.label, one.bus, one.numa, one.gbit, one.port, source=SOURCE)
            for number, one in enumerate(found)
        )

    def tree(self, buses: Sequence[str]) -> tuple[Pci, ...]:
        """Return these PCI devices and the switches above them."""
        found: dict[str, Pci] = {}
        for bus in buses:
            chain = self._chain(bus)
            for position, here in enumerate(chain):
                above = chain[position - 1] if position else None
                found.setdefault(here, self._pci(here, above))
        return tuple(found.values())

    def host_bridge(self, bus: str) -> str | None:
        """Return the name of the host bridge above a device, such as ``pci0000:00``."""
        path = os.path.realpath(self._device(bus))
        return next(
            (
                part
                for part in path.split("/")
                if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)
            ),
            None,
        )

    def _nic(self, label: str, bus: str | None, gbit: float | None, port: int | None = None) -> Nic:
        return Nic(label, 0, label, bus, self.numa_of(bus or ""), gbit, port)

    def _pci(self, bus: str, parent: str | None) -> Pci:
        folder = self._device(bus)
        transfers, lanes = (
            _number(_read(folder / name)) for name in ("max_link_speed", "max_link_width")
        )
        known = transfers and lanes
        pci_class = _read(folder / "class") or None
        return Pci(
            0,
            bus,
            parent,
            self.numa_of(bus),
            pci_class,
            _read(folder / "vendor") or None,
            _read(folder / "device") or None,
            pcie_gbytes(transfers, int(lanes)) if transfers and lanes else None,
            int(lanes) if known and lanes else None,
        )

    def _chain(self, bus: str) -> list[str]:
        """Return the switches above a device, from the top, and the device.

        The path in sysfs is: host bridge, root port, then two bridges for each switch.
        """
        path = os.path.realpath(self._device(bus)).split("/")
        buses = [part for part in path if _BUS.fullmatch(part)]
        if not buses or buses[-1] != bus:
            return [bus]
        return [*buses[1:-1][::2], bus]

    def _bus_of(self, link: Path) -> str | None:
        """Return the PCI device that a link leads to; virtual functions lead through others."""
        buses = [part for part in os.path.realpath(link).split("/") if _BUS.fullmatch(part)]
        return buses[-1] if buses and link.exists() else None

    def _device(self, bus: str) -> Path:
        return self._root / "bus" / "pci" / "devices" / (bus or "none")

    def _glob(self, folder: str, pattern: str) -> Iterator[Path]:
        try:
            yield from sorted((self._root / folder).glob(pattern))
        except OSError:
            return


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _number(text: str) -> float | None:
    match = _NUMBER.match(text)
    return float(match[0]) if match else None


def _trailing(path: Path) -> int:
    match = re.search(r"\d+$", path.name)
    return int(match[0]) if match else 0
