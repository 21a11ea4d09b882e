"""The matrix that ``nvidia-smi topo -m`` prints, read from a text as people paste it.

Tabs or blanks, colours, a prompt before it and a legend after it are all the same. A row is its
label and exactly as many cells as the header has devices: a row that lost a tab is an error that
names it, never a guess. ``SOC`` of old drivers is ``SYS``.

The text says nothing about models, so bandwidths are unknown, and nothing about bus ids.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from topology.errors import TopologyError
from topology.system import CPU_LIST, KINDS, Cpu, Gpu, Nic, Path, System

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GPU = re.compile(r"GPU(0|[1-9][0-9]{0,4})")
_CELL = re.compile(r"X|NV([1-9][0-9]?)|PIX|PXB|PHB|NODE|SYS|SOC")
_P2P = re.compile(r"OK|CNS|GNS|TNS|NS|DR|U")
_LEGEND = re.compile(r"(\S+): +(\S+)")
_AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID", "NIC Affinity")
_COLUMN = re.compile("|".join(_AFFINITIES))
_POSSIBLE = "possible: X, NV#, PIX, PXB, PHB, NODE, SYS"
MAX_LINKS_OF_A_GPU = 18
"""No GPU until today has more: where the cells of a row add up to more, a switch shares them."""


@dataclass(frozen=True)
class _Row:
    label: str
    cells: tuple[str, ...]
    affinities: tuple[str, ...]


def looks_like_matrix(text: str) -> bool:
    """Say whether a text has a header of GPUs."""
    return any(_header(line) for line in _lines(text))


def parse_matrix(text: str, host: str = "") -> System:
    """Read one matrix: GPUs and NICs of one host.

    Raises:
        TopologyError: no header, two of them, a row that is missing, damaged, or not of a device.
            The message names the row.
    """
    lines = _lines(text)
    start = next((number for number, line in enumerate(lines) if _header(line)), None)
    if start is None:
        raise TopologyError("no header of GPUs as `nvidia-smi topo -m` prints it")
    names = _header(lines[start])
    _check_names(names)
    columns = _COLUMN.findall(lines[start])
    rows, end = _rows(lines, start + 1, names, len(columns))
    if any(_header(line) for line in lines[end:]):
        raise TopologyError("the text holds two matrices; one host is expected")
    missing = [name for name in names if name not in rows]
    if missing:
        raise TopologyError(f"row {missing[0]!r} is missing; the header has {', '.join(names)}")
    return _system(names, rows, columns, _labels(lines[end:]), host)


def _lines(text: str) -> list[str]:
    return [_ESCAPE.sub("", line).rstrip() for line in text.lstrip("\ufeff").splitlines()]


def _header(line: str) -> list[str]:
    """Return the devices of a header, nothing where the line is none."""
    words = _COLUMN.split(line, maxsplit=1)[0].split()
    if not words or not _GPU.fullmatch(words[0]):
        return []
    has_cells = len(words) > 1 and (_CELL.fullmatch(words[1]) or _P2P.fullmatch(words[1]))
    alone = len(words) == 1 and not _COLUMN.search(line)
    return [] if has_cells or alone else words


def _check_names(names: Sequence[str]) -> None:
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise TopologyError(f"the header names {repeated!r} twice")
    odd = next((name for name in names if not re.fullmatch(r"[A-Za-z][\w.:-]*", name)), None)
    # What stands behind the devices is an affinity whose name was damaged, or a cell.
    if odd or "Affinity" in names or any(_CELL.fullmatch(name) for name in names):
        raise TopologyError(f"the header is not one of devices: {' '.join(names)}")


def _rows(
    lines: Sequence[str], start: int, names: Sequence[str], num_affinities: int
) -> tuple[dict[str, _Row], int]:
    """Return the rows and the line after the last."""
    rows: dict[str, _Row] = {}
    number = start
    while number < len(lines) and len(rows) < len(names):
        words = lines[number].split()
        number += 1
        if not words:
            if rows:
                break
            continue
        label = words[0]
        if label not in names:
            _explain(lines[number - 1], number, names, rows)
            break
        if label in rows:
            raise TopologyError(f"row {label!r} is there twice (line {number})")
        rows[label] = _row(words, names, num_affinities, number)
    return rows, number


def _explain(line: str, number: int, names: Sequence[str], rows: dict[str, _Row]) -> None:
    """Raise for the line that ended the rows too early, if it is to blame."""
    expected = next(name for name in names if name not in rows)
    if not line.strip().startswith("Legend"):
        raise TopologyError(
            f"row {expected!r} is expected in line {number}, got {line.strip()[:60]!r}"
        )


def _row(words: Sequence[str], names: Sequence[str], num_affinities: int, line: int) -> _Row:
    label, cells, rest = words[0], words[1 : len(names) + 1], words[len(names) + 1 :]
    where = f"row {label!r} (line {line})"
    for name, cell in zip(names, cells, strict=False):
        if not _CELL.fullmatch(cell):
            hint = "; this is a matrix of `topo -p2p`" if _P2P.fullmatch(cell) else ""
            hint = "; `rocm-smi` writes numbers, XML of RCCL is read" if cell == "0" else hint
            raise TopologyError(f"{where}: {cell!r} under {name}; {_POSSIBLE}{hint}")
        if (cell == "X") != (name == label):
            raise TopologyError(f"{where}: {cell!r} under {name}; X belongs under {label} only")
    if len(cells) < len(names):
        raise TopologyError(f"{where}: {len(cells)} cells, the header has {len(names)} devices")
    if len(rest) > num_affinities:
        raise TopologyError(
            f"{where}: {' '.join(rest)!r} after the cells, the header has {num_affinities} columns"
        )
    for word in rest:
        if word != "N/A" and not CPU_LIST.fullmatch(word):
            raise TopologyError(f"{where}: {word!r} is no affinity; possible: N/A, 0-31,64-95")
    return _Row(label, tuple("SYS" if cell == "SOC" else cell for cell in cells), tuple(rest))


def _labels(lines: Sequence[str]) -> dict[str, str]:
    """Return what the NIC legend says."""
    matches = [_LEGEND.fullmatch(line.strip()) for line in lines]
    return {match[1]: match[2] for match in matches if match}


def _system(
    names: Sequence[str],
    rows: dict[str, _Row],
    columns: Sequence[str],
    labels: dict[str, str],
    host: str,
) -> System:
    order = sorted(names, key=lambda name: not _GPU.fullmatch(name))
    num_gpus = sum(1 for name in names if _GPU.fullmatch(name))
    column = {name: number for number, name in enumerate(names)}
    warnings: list[str] = []
    paths = []
    for b, second in enumerate(order):
        for a, first in enumerate(order[:b]):
            cell = _agreed(rows, column, first, second, warnings)
            paths.append(Path(a, b, _kind(cell), _links(cell), source="file topo -m"))
    gpus = tuple(_gpu(rows[name], order[:num_gpus], column, columns) for name in order[:num_gpus])
    for gpu in gpus:
        short = len(columns) - len(rows[gpu.name].affinities)
        if short:
            warnings.append(f"row {gpu.name!r} lacks {short} of its {len(columns)} affinities")
    nics = tuple(
        Nic(name, 0, label=labels.get(name, name), source="file topo -m")
        for name in order[num_gpus:]
    )
    return System(
        (host,), _cpus(gpus), gpus, nics, tuple(paths), warnings=tuple(warnings), source="file"
    )


def _agreed(
    rows: dict[str, _Row], column: dict[str, int], first: str, second: str, warnings: list[str]
) -> str:
    """Return the cell of a pair; of two that differ the worse, and a warning."""
    there = rows[first].cells[column[second]]
    back = rows[second].cells[column[first]]
    if there == back:
        return there
    worse = max(there, back, key=lambda cell: (KINDS.index(_kind(cell)), -_links(cell)))
    warnings.append(
        f"row {first!r} says {there} for {second}, row {second!r} {back} for {first}: "
        f"{worse} is taken"
    )
    return worse


def _kind(cell: str) -> str:
    return "NV" if cell.startswith("NV") else cell


def _links(cell: str) -> int:
    return int(cell[2:]) if cell.startswith("NV") else 0


def _gpu(row: _Row, gpus: Sequence[str], column: dict[str, int], columns: Sequence[str]) -> Gpu:
    links = [_links(row.cells[column[name]]) for name in gpus]
    switched = sum(links) > MAX_LINKS_OF_A_GPU
    said = dict(zip(columns, row.affinities, strict=False))
    cpus = said.get("CPU Affinity", "N/A")
    numa = said.get("NUMA Affinity", "")
    return Gpu(
        row.label,
        0,
        numa=int(numa) if numa.isdigit() else None,
        cpus=None if cpus == "N/A" else cpus,
        nvlinks=max(links) if switched else sum(links),
        switched=switched,
        source="file topo -m",
    )


def _cpus(gpus: Sequence[Gpu]) -> tuple[Cpu, ...]:
    """Return the NUMA nodes that GPUs name, with the CPUs that these say are near."""
    lists = {gpu.numa: gpu.cpus for gpu in reversed(gpus) if gpu.numa is not None}
    return tuple(Cpu(0, numa, lists[numa], source="file topo -m") for numa in sorted(lists))
