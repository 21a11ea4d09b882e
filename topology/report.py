"""A system in words: one line of verdict, the matrix, a tree with bandwidths and sources.

Bandwidths are GB/s (1e9) one way. A word in brackets behind a fact is its source.
"""

from collections.abc import Sequence

from topology.model import Topology
from topology.relations import cpu_list
from topology.system import FAST, Gpu, Nic, System

LEGEND = """\
X = itself   NV# = # NVLinks   PIX = one PCIe switch   PXB = several PCIe switches
PHB = a host bridge   NODE = host bridges of one NUMA node   SYS = between NUMA nodes
NET = different hosts   XGMI = links of AMD   ? = unknown"""
MAX_HOSTS_IN_TREE = 8


def report(system: System) -> str:
    """Return everything, for a terminal."""
    parts = [verdict(system), matrix(system), tree(system)]
    parts += [f"warning: {note}" for note in system.notes]
    return "\n\n".join(part for part in parts if part)


def verdict(system: System) -> str:
    """Return one line: hosts, devices, what is all-to-all, rails, levels."""
    words = [_size(system)]
    if system.gpus:
        words.append(links_in_words(system))
    used = {nic for nic in system.rails if nic is not None}
    if used:
        per_host = sorted({_count_on(system, used, host) for host in range(len(system.hosts))})
        rails = "-".join(map(str, (per_host[0], per_host[-1])[: len(per_host)]))
        words.append(f"{rails} rail{'' if rails == '1' else 's'} a node")
    if system.ranks or system.gpus or system.given:
        words.append(system.topology.describe())
    if system.notes:
        words.append(f"{len(system.notes)} warning{'s' if len(system.notes) > 1 else ''}")
    return ", ".join(words)


def _count_on(system: System, devices: set[int], host: int) -> int:
    return sum(1 for number in devices if system.devices[number].host == host)


def _size(system: System) -> str:
    num_hosts = len(system.hosts)
    nodes = f"{num_hosts} node{'s' if num_hosts > 1 else ''}"
    placed = [gpu.host for gpu in system.gpus] or [rank.host for rank in system.ranks]
    if not placed:
        return f"{nodes} without a GPU"
    counts = [placed.count(host) for host in range(num_hosts)]
    what = "GPU" if system.gpus else f"rank{'s' if max(counts) > 1 else ''} on CPUs"
    each = " + ".join(map(str, counts[:8])) + (" + …" if num_hosts > 8 else "")
    size = f"{nodes} x {counts[0]}" if len(set(counts)) == 1 else f"{nodes}: {each}"
    return f"{size} {what}{_model(system)}"


def _model(system: System) -> str:
    titles = sorted({gpu.title for gpu in system.gpus if gpu.title})
    kinds = sorted({f"sm{gpu.sm}" for gpu in system.gpus if gpu.sm is not None})
    known = [*titles, *kinds]
    return f" ({', '.join(known)})" if known else ""


def links_in_words(system: System) -> str:
    """Say how the GPUs are linked."""
    if all(gpu.nvlinks is None for gpu in system.gpus) and not any(system.nvlink.values()):
        return "NVLink unknown"
    sizes = [len(island) for island in system.islands]
    if max(sizes) == 1:
        if any(gpu.nvlinks for gpu in system.gpus) and len(sizes) > 1:
            return "NVLink joins no GPUs"
        return "no NVLink" if len(sizes) > 1 else "one GPU"
    switched = any(gpu.switched for gpu in system.gpus)
    links = sorted({gpu.nvlinks for gpu in system.gpus if gpu.nvlinks})
    what = "NVSwitch" if switched else "direct links"
    if links:
        what += f", {'-'.join(map(str, (links[0], links[-1])[: len(links)]))} links a GPU"
    per_node = _nodes_of(system, system.islands)
    if per_node == "nodes":
        return f"NVLink all-to-all in a node ({what})"
    if per_node == "across":
        return f"NVLink domains across nodes ({what})"
    shape = " + ".join(map(str, sizes[:8])) + (" + …" if len(sizes) > 8 else "")
    return f"NVLink islands of {shape} ({what})"


def _nodes_of(system: System, islands: Sequence[Sequence[int]]) -> str:
    hosts = [{system.gpus[gpu].host for gpu in island} for island in islands]
    if any(len(one) > 1 for one in hosts):
        return "across"
    num_hosts = len({gpu.host for gpu in system.gpus})
    return "nodes" if len(islands) == num_hosts else "islands"


def matrix(system: System) -> str:
    """Return the matrix of each host in nvidia-smi's letters, with the nearest NICs and CPUs.

    Hosts whose matrices are equal are shown once. Without devices the ranks are shown: NODE within
    a NUMA node, SYS between them, NET between hosts.
    """
    if not system.gpus and system.ranks:
        return _rank_matrix(system)
    shown: dict[str, list[int]] = {}
    for host in range(len(system.hosts)):
        shown.setdefault(_host_matrix(system, host), []).append(host)
    blocks = []
    for text, hosts in shown.items():
        title = ", ".join(host_name(system, host) for host in hosts[:8])
        more = f" … ({len(hosts)} hosts)" if len(hosts) > 8 else ""
        blocks.append(f"{title}{more}\n{text}" if len(system.hosts) > 1 else text)
    return "\n\n".join([block for block in blocks if block] + [LEGEND])


def host_name(system: System, host: int) -> str:
    """Return the name of a host, or its number."""
    return system.hosts[host] or f"host {host}"


def _host_matrix(system: System, host: int) -> str:
    numbers = [number for number, one in enumerate(system.devices) if one.host == host]
    if not numbers:
        return ""
    names = _local_names(system, numbers)
    rows = [["", *names, "nearest NIC", "NUMA", "CPUs"]]
    for position, number in enumerate(numbers):
        row = [names[position], *(system.letters(number, other) for other in numbers)]
        one = system.devices[number]
        if isinstance(one, Gpu):
            nearest = [names[numbers.index(nic)] for nic in system.nearest_nics(number)]
            numa = "?" if one.numa is None else str(one.numa)
            row += [",".join(nearest) or "-", numa, _cpus(system, one)]
        rows.append(row)
    return _aligned(rows)


def _local_names(system: System, numbers: Sequence[int]) -> list[str]:
    """Return names; of several hosts numbered within each, so that equal hosts look equal."""
    if len(system.hosts) == 1:
        return [system.devices[number].name for number in numbers]
    num_gpus = sum(1 for number in numbers if number < len(system.gpus))
    return [f"GPU{n}" if n < num_gpus else f"NIC{n - num_gpus}" for n in range(len(numbers))]


def _cpus(system: System, gpu: Gpu) -> str:
    """Return the CPUs near a GPU: its own, or those of its NUMA node."""
    near = (cpu.cpus for cpu in system.cpus if (cpu.host, cpu.numa) == (gpu.host, gpu.numa))
    return gpu.cpus or next(near, None) or "?"


def _rank_matrix(system: System) -> str:
    if not system.ranks or len(system.ranks) > 32:
        return ""
    names = [f"rank{rank.rank}" for rank in system.ranks]
    rows = [["", *names]]
    for a in system.ranks:
        cells = []
        for b in system.ranks:
            near = a.numa is not None and a.numa == b.numa
            cell = "?" if a.numa is None or b.numa is None else "NODE" if near else "SYS"
            cells.append("X" if a == b else "NET" if a.host != b.host else cell)
        rows.append([f"rank{a.rank}", *cells])
    return f"{_aligned(rows)}\n\n{LEGEND}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    num_columns = max(len(row) for row in rows)
    full = [[*row, *[""] * (num_columns - len(row))] for row in rows]
    widths = [max(len(row[column]) for row in full) for column in range(num_columns)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in full
    )


def tree(system: System) -> str:
    """Return hosts, NUMA nodes, devices and their links, with bandwidths and sources."""
    lines = []
    for host in range(min(len(system.hosts), MAX_HOSTS_IN_TREE)):
        lines.append(f"{host_name(system, host)} [{system.source}]")
        numas = [cpu.numa for cpu in system.cpus if cpu.host == host]
        for cpu in (cpu for cpu in system.cpus if cpu.host == host):
            lines.append(
                f"+ NUMA {cpu.numa}{f', CPUs {cpu.cpus}' if cpu.cpus else ''} [{cpu.source}]"
            )
            lines += [f"  {line}" for line in _devices(system, host, {cpu.numa})]
        rest = _devices(system, host, None, numas)
        lines += rest
    if len(system.hosts) > MAX_HOSTS_IN_TREE:
        lines.append(f"… {len(system.hosts) - MAX_HOSTS_IN_TREE} more hosts")
    return "\n".join([*lines, *_levels(system)])


def _devices(
    system: System, host: int, numas: set[int] | None, others: Sequence[int] = ()
) -> list[str]:
    """Return the lines of the devices and ranks of some NUMA nodes; None: of no known one."""

    def here(numa: int | None) -> bool:
        return numa in numas if numas is not None else numa is None or numa not in others

    lines = []
    for number, one in enumerate(system.devices):
        if one.host == host and here(one.numa):
            lines.append(f"+ {_device(system, number)}")
            if isinstance(one, Gpu):
                lines += [f"  {line}" for line in _links(system, number)]
    bound: dict[str, list[int]] = {}
    for rank in system.ranks:
        if rank.host == host and rank.gpu is None and rank.cpus and here(rank.numa):
            bound.setdefault(rank.cpus, []).append(rank.rank)
    for cpus, ranks in bound.items():
        name = "rank" if len(ranks) == 1 else "ranks"
        lines.append(f"+ {name} {cpu_list(ranks)}, may run on CPUs {cpus} [{system.source}]")
    return lines


def _device(system: System, number: int) -> str:
    one = system.devices[number]
    facts: list[str | None]
    if isinstance(one, Nic):
        label = one.label if one.label != one.name else None
        facts = [label, one.bus, f"{one.gbit:g} Gbit/s" if one.gbit else None]
    else:
        ranks = [rank.rank for rank in system.ranks if rank.gpu == number]
        pcie = next((p.gbytes for p in system.pci if (p.host, p.bus) == (one.host, one.bus)), None)
        facts = [
            one.title,
            f"sm{one.sm}" if one.sm is not None else None,
            one.bus,
            f"PCIe {pcie:g} GB/s" if pcie else None,
            _nvlinks(one),
            f"NVLink domain {one.domain}" if one.domain else None,
            "MIG" if one.mig else None,
            f"rank {', '.join(map(str, ranks))}" if ranks else None,
        ]
    return ", ".join([one.name, *(fact for fact in facts if fact)]) + f" [{one.source}]"


def _nvlinks(gpu: Gpu) -> str | None:
    if not gpu.nvlinks:
        return None
    each = f" of {gpu.link_gbytes:g} GB/s" if gpu.link_gbytes else ""
    return f"{gpu.nvlinks} NVLinks{each}{' to NVSwitch' if gpu.switched else ''}"


def _links(system: System, gpu: int) -> list[str]:
    """Return the edges of a GPU: direct NVLinks, and its rail."""
    lines = []
    if not system.gpus[gpu].switched:
        for peer in sorted(system.nvlink[gpu]):
            path = system.path(gpu, peer)
            if path is not None and path.kind in FAST:
                lines.append(
                    f"+ {_edge(path.letters, path.gbytes)} - {_name(system, peer)} [{path.source}]"
                )
    rail = system.rails[gpu]
    if rail is not None and (path := system.path(gpu, rail)):
        lines.append(
            f"+ {_edge(path.letters, path.gbytes)} - {_name(system, rail)} (rail) [{path.source}]"
        )
    return lines


def _name(system: System, number: int) -> str:
    one = system.devices[number]
    label = one.label if isinstance(one, Nic) else None
    return f"{one.name} ({label})" if label and label != one.name else one.name


def _edge(letters: str, gbytes: float | None) -> str:
    return f"{letters}[{gbytes:g} GB/s]" if gbytes else letters


def _levels(system: System) -> list[str]:
    """Return the levels of the ranks, innermost first."""
    if not (system.ranks or system.gpus or system.given):
        return []
    origin = " (as given)" if system.given else ""
    return [f"levels, innermost first{origin}:", *(f"  {line}" for line in levels(system.topology))]


def levels(topology: Topology) -> list[str]:
    """Return a line for each level: its groups, the first of many."""
    lines = []
    for level in topology.levels:
        shown = [" ".join(map(str, group[:16])) for group in level.groups[:8]]
        more = " …" if len(level.groups) > 8 or len(level.groups[0]) > 16 else ""
        lines.append(f"{level.name}: {' | '.join(shown)}{more}")
    return lines
