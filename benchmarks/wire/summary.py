"""JSON lines of any number of runs as tables in Markdown: medians, and the verdicts on targets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Item = dict[str, Any]


def read(path: Path) -> list[Item]:
    """Return the objects of a file of JSON lines, each with the file's name as its ``case``."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [{**json.loads(line), "case": path.stem} for line in lines]


def verdicts(lines: Sequence[Item]) -> list[str]:
    """Return a row for every target that was judged."""
    found = [line for line in lines if line["kind"] == "target"]
    table = _head("where", "what", "against", "measured", "target", "")
    for item in found:
        what = f"{item['operation']} {item['codec'] or 'exact'} {item['dtype']}"
        sign = "≤" if item["aimed_against"] == ["floor"] else "≥"
        reached = "reached" if item["reached"] else "missed"
        aim = f"{sign} {item['aimed']:g}"
        ratio = f"{item['ratio']:.3f}"
        table.append(_cells(place(item), what, item["against"], ratio, aim, reached))
    return table if found else []


def medians(lines: Sequence[Item]) -> list[str]:
    """Return a row for every case: zcomm's variants, then the better call of each peer."""
    cases: dict[tuple[str, str, str, str], list[Item]] = {}
    for item in lines:
        if item["kind"] == "row":
            key = item["case"], place(item), item["operation"], item["dtype"]
            cases.setdefault(key, []).append(item)
    table = _head("where", "operation", "zcomm: ms (x floor)", "gloo ms", "MPI ms", "others' CPU")
    for (_, where, operation, dtype), items in cases.items():
        ours = [_ours(item) for item in items if item["library"] == "zcomm"]
        peers = [_best(items, library) for library in ("gloo", "mpi")]
        taken = items[0]["others"]
        noise = "?" if taken is None else f"{taken:.0%}"
        table.append(_cells(where, f"{operation} {dtype}", "; ".join(ours), *peers, noise))
    return table if cases else []


def place(item: Item) -> str:
    """Return nodes x ranks, the nominal rate of the link and the size of the message."""
    per_node = item["num_ranks"] // item["num_nodes"]
    rate = item["nominal_rate"]
    link = f"{rate / 1e9:g} Gbit/s" if rate else "no link"
    mebi = item["nbytes"] / 2**20
    size = f"{mebi:g} MiB" if mebi >= 1 else f"{item['nbytes'] / 2**10:g} KiB"
    return f"{item['num_nodes']}x{per_node}, {link}, {size}"


def _ours(item: Item) -> str:
    name = item["name"].removeprefix("zcomm ")
    over = f" ({item['median'] / item['floor']:.2f})" if item["floor"] else ""
    return f"{name} {item['median'] * 1e3:.4g}{over}"


def _best(items: Sequence[Item], library: str) -> str:
    found = [item["median"] for item in items if item["library"] == library]
    return f"{min(found) * 1e3:.4g}" if found else "-"


def _head(*titles: str) -> list[str]:
    return ["", _cells(*titles), "|" + "---|" * len(titles)]


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
