"""What a machine is made of: hosts, CPUs, GPUs, NICs, and what lies between two of them.

Words defined here:

- **device**: a GPU or a NIC. Devices are numbered, GPUs first; what identifies a GPU is its PCI bus
  id or UUID, never an index that a driver gave it.
- **path**: what was found between two devices, and where it was found. Its **letters** are those of
  ``nvidia-smi topo -m``, best first: ``NV#`` (# NVLinks), ``PIX`` (one PCIe switch), ``PXB``
  (several), ``PHB`` (a host bridge), ``NODE`` (several host bridges of one NUMA node), ``SYS``
  (between NUMA nodes); besides ``XGMI`` (AMD's links) and ``NET`` (different hosts).
- **component**: GPUs that reach each other over NVLink, perhaps through others. **island**: GPUs
  that all have a direct link to each other (``topology.islands``).
- **source** of a fact: ``nvml``, ``sysfs``, ``job`` (what ranks said), ``file``, ``assumed``, with
  a word of detail.

A reader must not assume that a fact is known: what nobody could say is None. ``NV12`` behind an
NVSwitch is shared by all peers (``Gpu.switched``), between two GPUs it is theirs alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from topology.errors import TopologyError
from topology.islands import Weights, all_to_all, connected
from topology.model import Level, Topology

KINDS = ("X", "NV", "XGMI", "PIX", "PXB", "PHB", "NODE", "SYS", "NET")
"""Kinds of paths, best first."""
FAST = ("NV", "XGMI")
"""Kinds that do not pass PCIe."""


CPU_LIST = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", re.ASCII)
"""CPUs as the kernel writes them."""


@dataclass(frozen=True)
class Cpu:
    """A NUMA node: ``cpus`` is a list as in ``0-31,64-95``."""

    host: int
    numa: int
    cpus: str | None = None
    arch: str | None = None
    vendor: str | None = None
    family: str | None = None
    model: str | None = None
    source: str = "file"


@dataclass(frozen=True)
class Pci:
    """A device of the PCI tree; ``parent`` is the bus id of the switch above, None at a CPU.

    ``gbytes``: GB/s (1e9) of its link, one way.
    """

    host: int
    bus: str
    parent: str | None = None
    numa: int | None = None
    pci_class: str | None = None
    vendor: str | None = None
    device: str | None = None
    gbytes: float | None = None
    width: int | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU. ``domain``: the NVLink domain across hosts, as ``cluster UUID/clique``.

    ``nvlinks``: its active links, of ``link_gbytes`` GB/s one way each. ``switched``: they end at
    NVSwitches. ``dev`` and ``rank`` are what a file says, or the job.
    """

    name: str
    host: int
    bus: str | None = None
    uuid: str | None = None
    title: str | None = None
    sm: int | None = None
    numa: int | None = None
    cpus: str | None = None
    domain: str | None = None
    nvlinks: int | None = None
    link_gbytes: float | None = None
    switched: bool | None = None
    mig: bool = False
    dev: int | None = None
    rank: int | None = None
    source: str = "file"

    @property
    def gbytes(self) -> float | None:
        """GB/s (1e9), one way, of all NVLinks together."""
        if self.nvlinks is None or self.link_gbytes is None:
            return None
        return self.nvlinks * self.link_gbytes


@dataclass(frozen=True)
class Nic:
    """A network interface (a port); ``label`` is the system's name, such as ``mlx5_0``."""

    name: str
    host: int
    label: str | None = None
    bus: str | None = None
    numa: int | None = None
    gbit: float | None = None
    port: int | None = None
    dev: int | None = None
    source: str = "file"


@dataclass(frozen=True)
class Path:
    """What lies between two devices, ``a < b``. ``links``: number of NVLinks.

    ``gbytes``: GB/s (1e9), one way, if nothing else is under way.
    """

    a: int
    b: int
    kind: str
    links: int = 0
    gbytes: float | None = None
    source: str = "file"

    @property
    def letters(self) -> str:
        """Return the cell of the matrix."""
        return f"NV{self.links}" if self.kind == "NV" else self.kind


@dataclass(frozen=True)
class Rank:
    """A process of the job: its host, its GPU (a number, or None), the CPUs it may run on."""

    rank: int
    host: int
    gpu: int | None = None
    cpus: str | None = None
    numa: int | None = None


@dataclass(frozen=True)
class System:
    """One or more hosts, and what a job has of them.

    ``hosts`` are names. ``given``: levels that a person wrote, which go before all others.
    ``warnings``: what a person should know of, in words.

    Raises:
        TopologyError: numbers of hosts or devices that do not exist, a kind of path that is none.
    """

    hosts: tuple[str, ...]
    cpus: tuple[Cpu, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    paths: tuple[Path, ...] = ()
    pci: tuple[Pci, ...] = ()
    ranks: tuple[Rank, ...] = ()
    given: Topology | None = None
    warnings: tuple[str, ...] = ()
    source: str = field(default="file")

    def __post_init__(self) -> None:
        if not self.hosts:
            raise TopologyError("a system needs at least one host, got none")
        placed: tuple[Cpu | Gpu | Nic | Pci | Rank, ...]
        placed = (*self.cpus, *self.gpus, *self.nics, *self.pci, *self.ranks)
        for item in placed:
            if not 0 <= item.host < len(self.hosts):
                raise TopologyError(f"{item}: there are {len(self.hosts)} hosts")
        seen: set[tuple[int, str]] = set()
        for pci in self.pci:
            if pci.parent is not None and (pci.host, pci.parent) not in seen:
                raise TopologyError(f"{pci}: its parent is expected before it")
            seen.add((pci.host, pci.bus))
        lists: tuple[Cpu | Gpu | Rank, ...] = (*self.cpus, *self.gpus, *self.ranks)
        for place in lists:
            if place.cpus is not None and not CPU_LIST.fullmatch(place.cpus):
                raise TopologyError(f"{place}: cpus such as 0-31,64-95 are expected")
        for path in self.paths:
            if not 0 <= path.a < path.b < len(self.devices) or path.kind not in KINDS:
                raise TopologyError(
                    f"{path}: 0 <= a < b < {len(self.devices)} is expected, and one of "
                    f"{', '.join(KINDS)}"
                )
        for number, rank in enumerate(self.ranks):
            if rank.rank != number or not (rank.gpu is None or 0 <= rank.gpu < len(self.gpus)):
                raise TopologyError(f"{rank}: rank {number} is expected, of {len(self.gpus)} GPUs")

    @cached_property
    def devices(self) -> tuple[Gpu | Nic, ...]:
        """GPUs, then NICs."""
        return (*self.gpus, *self.nics)

    @cached_property
    def _best(self) -> dict[tuple[int, int], Path]:
        best: dict[tuple[int, int], Path] = {}
        for path in self.paths:
            known = best.get((path.a, path.b))
            if known is None or KINDS.index(path.kind) < KINDS.index(known.kind):
                best[path.a, path.b] = path
        return best

    def path(self, a: int, b: int) -> Path | None:
        """Return the best known path between two devices, None where nothing is known."""
        found = self._best.get((min(a, b), max(a, b)))
        if found is None and self.devices[a].host != self.devices[b].host:
            return Path(min(a, b), max(a, b), "NET", source="assumed")
        return found

    def letters(self, a: int, b: int) -> str:
        """Return the cell of the matrix, ``?`` where nothing is known."""
        if a == b:
            return "X"
        found = self.path(a, b)
        return found.letters if found else "?"

    @cached_property
    def nvlink(self) -> Weights:
        """For every GPU, its peers over direct links or a switch, and the number of links."""
        weights: Weights = {number: {} for number in range(len(self.gpus))}
        for (a, b), path in self._best.items():
            if path.kind in FAST and b < len(self.gpus):
                weights[a][b] = weights[b][a] = max(path.links, 1)
        return weights

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """GPUs that reach each other over NVLink, perhaps through others."""
        return connected(self.nvlink)

    @cached_property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Partition of the GPUs into sets that are really all-to-all over NVLink."""
        return all_to_all(self.nvlink)

    @cached_property
    def switch_groups(self) -> tuple[tuple[int, ...], ...]:
        """GPUs that reach each other through PCIe switches, as far as the matrix shows."""
        weights: Weights = {number: {} for number in range(len(self.gpus))}
        for (a, b), path in self._best.items():
            if path.kind in ("PIX", "PXB") and b < len(self.gpus):
                weights[a][b] = weights[b][a] = 1
        return connected(weights)

    def nearest_nics(self, gpu: int) -> tuple[int, ...]:
        """Return the NICs (numbers of devices) that no other of the host is nearer than.

        None has the same number as its GPU, in general: what counts is the path.
        """
        first = len(self.gpus)
        known = {
            first + number: path.kind
            for number, nic in enumerate(self.nics)
            if nic.host == self.gpus[gpu].host and (path := self.path(gpu, first + number))
        }
        best = min((KINDS.index(kind) for kind in known.values()), default=None)
        return tuple(nic for nic, kind in known.items() if KINDS.index(kind) == best)

    @cached_property
    def rails(self) -> tuple[int | None, ...]:
        """For every GPU one of its nearest NICs: the one that the fewest others have taken."""
        taken: dict[int, int] = {}
        chosen: list[int | None] = []
        for gpu in range(len(self.gpus)):
            nics = self.nearest_nics(gpu)
            nic = min(nics, key=lambda one: (taken.get(one, 0), one), default=None)
            if nic is not None:
                taken[nic] = taken.get(nic, 0) + 1
            chosen.append(nic)
        return tuple(chosen)

    @cached_property
    def topology(self) -> Topology:
        """The levels of the ranks; a system without ranks has one rank for each GPU, in order.

        Raises:
            TopologyError: neither ranks nor GPUs.
        """
        return self._levels[0]

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings, those about levels included."""
        more = self._levels[1] if self.ranks or self.gpus else ()
        return self.warnings + more

    @cached_property
    def _levels(self) -> tuple[Topology, tuple[str, ...]]:
        if self.given is not None:
            return self.given, ()
        ranks = self.ranks or tuple(
            Rank(number, gpu.host, number) for number, gpu in enumerate(self.gpus)
        )
        if not ranks:
            raise TopologyError("it describes no GPU, so it says nothing about ranks")
        nodes = _grouped([rank.host for rank in ranks])
        network = Level("network", (tuple(range(len(ranks))),))
        held = [rank.gpu for rank in ranks]
        islands, notes = self._islands_of(held)
        domain, node = Level("domain", islands), Level("node", nodes)
        where = _place(domain.groups, node.groups)
        if where == "same":
            return Topology((node, network)), notes
        if where is None or not Topology((*_in_order(where, domain, node), network)).uniform:
            sizes = ", ".join(map(str, sorted({len(island) for island in islands})))
            note = f"NVLink islands of {sizes} GPUs do not fit the nodes evenly: no level"
            return Topology((node, network)), (*notes, note)
        return Topology((*_in_order(where, domain, node), network)), notes

    def _islands_of(
        self, held: Sequence[int | None]
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """Return the islands of the ranks' GPUs, as ranks, and why there are none."""
        alone = tuple((rank,) for rank in range(len(held)))
        rank_of = {gpu: rank for rank, gpu in enumerate(held) if gpu is not None}
        if not rank_of:
            return alone, ()
        if len(rank_of) < len(held):
            return alone, ("not every rank has a GPU of its own: NVLink makes no level",)
        weights = {
            rank_of[gpu]: {rank_of[peer]: n for peer, n in peers.items() if peer in rank_of}
            for gpu, peers in self.nvlink.items()
            if gpu in rank_of
        }
        return all_to_all(weights), ()


def _grouped(keys: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    groups: dict[int, list[int]] = {}
    for rank, key in enumerate(keys):
        groups.setdefault(key, []).append(rank)
    return tuple(tuple(group) for group in groups.values())


Partition = tuple[tuple[int, ...], ...]


def _place(islands: Partition, nodes: Partition) -> str | None:
    """Say whether islands are "inside" nodes, "across" them, the "same" or nothing, or None."""
    if islands == nodes or all(len(island) == 1 for island in islands):
        return "same"
    if _refines(islands, nodes):
        return "inside"
    return "across" if _refines(nodes, islands) else None


def _refines(inner: Partition, outer: Partition) -> bool:
    home = {rank: number for number, group in enumerate(outer) for rank in group}
    return all(len({home[rank] for rank in group}) == 1 for group in inner)


def _in_order(where: str, domain: Level, node: Level) -> tuple[Level, Level]:
    return (domain, node) if where == "inside" else (node, domain)
