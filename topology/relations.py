"""Paths between devices, from what each of them says of itself.

The PCI tree gives PIX, PXB, PHB and SYS; links of pairs and to switches give NV. Nothing here knows
where the facts come from: readers of files, of NVML and of sysfs bring them in one form.
"""

from collections.abc import Iterable, Mapping, Sequence

from topology.system import Gpu, Path, Pci

NVLINK_GBYTES = ((100, 40.1), (90, 20.6), (86, 12.0), (80, 20.0), (70, 20.0), (60, 18.0))
"""GB/s of one NVLink one way, from this compute capability on (NCCL, graph/topo.h)."""

Place = tuple[int, str | None, int | None]
"""Host, bus id and NUMA node of a device."""


def nvlink_gbytes(sm: int | None) -> float | None:
    """Return GB/s one way of one NVLink of a GPU that has some."""
    if sm is None:
        return None
    return next((gbytes for first, gbytes in NVLINK_GBYTES if sm >= first), None)


def pcie_gbytes(transfers: float, lanes: int) -> float:
    """Return GB/s one way of a PCIe link of so many GT/s, as NCCL reckons: 12 for gen3 x16."""
    return lanes * transfers * 7.5 / 80


def cpu_list(numbers: Iterable[int]) -> str:
    """Return ascending numbers as the kernel writes them: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{lo}-{hi}" if hi > lo else f"{lo}" for lo, hi in runs)


def pair_paths(
    gpus: Sequence[Gpu], direct: Mapping[tuple[int, int], Path], source: str
) -> tuple[list[Path], list[str]]:
    """Return the NVLink paths of all pairs, and a warning for each that is not symmetric.

    Args:
        gpus: with the number of their links, and whether these end at switches.
        direct: links as each GPU says of itself, by ordered pair.
        source: of the paths.
    """
    paths, warnings = [], []
    for a, first in enumerate(gpus):
        for b in range(a + 1, len(gpus)):
            there, back = direct.get((a, b)), direct.get((b, a))
            if there is None and back is None:
                if share_switch(first, gpus[b]):
                    links = min(first.nvlinks or 0, gpus[b].nvlinks or 0)
                    gbytes = _least(first.gbytes, gpus[b].gbytes)
                    paths.append(Path(a, b, "NV", links, gbytes, f"{source}, switch"))
                continue
            counts = [one.links if one else 0 for one in (there, back)]
            if counts[0] != counts[1]:
                warnings.append(
                    f"{first.name} has {counts[0]} links to {gpus[b].name}, which has {counts[1]} "
                    "back: the fewer are taken"
                )
            if min(counts):
                kind = (there or back).kind  # type: ignore[union-attr]
                each = _least(first.link_gbytes, gpus[b].link_gbytes)
                gbytes = None if each is None else each * min(counts)
                paths.append(Path(a, b, kind, min(counts), gbytes, source))
    switched = [gpu for gpu in gpus if gpu.switched]
    most = max((gpu.nvlinks or 0 for gpu in switched), default=0)
    warnings += [
        f"{gpu.name} has {gpu.nvlinks} NVLinks, others {most}: degraded"
        for gpu in switched
        if (gpu.nvlinks or 0) < most
    ]
    return paths, warnings


def share_switch(first: Gpu, second: Gpu) -> bool:
    """Say whether links of two GPUs meet in switches.

    NVSwitches of a host are one fabric; those of several hosts where they say so.
    """
    if not (first.switched and second.switched):
        return False
    if first.domain is not None or second.domain is not None:
        return first.domain == second.domain
    return first.host == second.host


def pcie_paths(places: Sequence[Place], pci: Sequence[Pci], source: str) -> list[Path]:
    """Return the paths through the PCI tree of all pairs of devices of one host."""
    parents = {(one.host, one.bus): one for one in pci}
    chains = [_bridges(place, parents) for place in places]
    paths = []
    for b, second in enumerate(places):
        for a, first in enumerate(places[:b]):
            if first[0] == second[0]:
                kind = _pcie_kind(first, second, chains[a], chains[b])
                if kind:
                    gbytes = _least(_width(first, parents), _width(second, parents))
                    paths.append(Path(a, b, kind, gbytes=gbytes, source=source))
    return paths


def _bridges(place: Place, parents: Mapping[tuple[int, str], Pci]) -> list[str]:
    """Return the switches above a device, the nearest first."""
    host, bus, _ = place
    chain: list[str] = []
    here = parents.get((host, bus)) if bus else None
    while here is not None and here.parent is not None:
        chain.append(here.parent)
        here = parents.get((host, here.parent))
    return chain


def _pcie_kind(first: Place, second: Place, above: list[str], below: list[str]) -> str | None:
    if first[1] is not None and first[1] == second[1]:
        return "PIX"  # two ports of one card
    shared = next((bus for bus in above if bus in below), None)
    if shared is not None:
        num_switches = above.index(shared) + below.index(shared) + 1
        return "PIX" if num_switches == 1 else "PXB"
    if first[2] is None or second[2] is None:
        return None
    return "PHB" if first[2] == second[2] else "SYS"


def _width(place: Place, parents: Mapping[tuple[int, str], Pci]) -> float | None:
    one = parents.get((place[0], place[1])) if place[1] else None
    return one.gbytes if one else None


def _least(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if len(known) == len(values) else None
