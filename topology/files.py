"""Files that describe a machine or a job, of any kind: which one is recognised from the text.

- ``{`` begins JSON: schema ``zcomm.topology/1`` (levels) or ``zcomm.system/1`` (a machine);
- ``<`` begins the XML of NCCL and RCCL;
- a header of GPUs is the matrix of ``nvidia-smi topo -m``.
"""

import json
from pathlib import Path

from topology import documents
from topology.errors import TopologyError
from topology.model import SCHEMA, Level, Topology
from topology.nccl import parse_nccl
from topology.smi import looks_like_matrix, parse_matrix
from topology.system import Rank, System

POSSIBLE = (
    f"possible: JSON ({SCHEMA} or {documents.SCHEMA}), XML of NCCL (NCCL_TOPO_DUMP_FILE), "
    "the matrix of `nvidia-smi topo -m`"
)


def read_system(path: str | Path) -> System:
    """Read a file of any kind.

    Raises:
        TopologyError: a file that cannot be read, or is of no kind; the message names file and row.
    """
    try:
        return parse_named(read_text(path), path)
    except OSError as error:
        reason = error.strerror or error
        raise TopologyError(f"topology file {str(path)!r} cannot be read ({reason})") from None


def parse_named(text: str, path: str | Path) -> System:
    """Read a text; errors name the file that it comes from.

    Raises:
        TopologyError: as ``parse_text``.
    """
    try:
        return parse_text(text)
    except TopologyError as error:
        raise TopologyError(f"topology file {str(path)!r}: {error}") from None


def read_text(path: str | Path) -> str:
    """Return the text of a file.

    Raises:
        OSError: it cannot be read.
        TopologyError: it is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TopologyError(f"topology file {str(path)!r} is not UTF-8 text") from None
    except ValueError as error:
        raise TopologyError(f"topology file {str(path)!r}: {error}") from None


def parse_text(text: str) -> System:
    """Read the text of a file of any kind.

    Raises:
        TopologyError: it is of no kind, or damaged.
    """
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith("{"):
        return _from_json(start)
    if start.startswith("<"):
        # An XML declaration must come first, where a copy may have a blank line.
        return parse_nccl(start)
    if looks_like_matrix(text):
        return parse_matrix(text)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    begins = f"it begins with {first[:40]!r}" if first else "it is empty"
    raise TopologyError(f"{begins}; {POSSIBLE}")


def _from_json(text: str) -> System:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"not JSON: {error}") from None
    if isinstance(document, dict) and document.get("schema") == documents.SCHEMA:
        return documents.from_json(text)
    return of_levels(Topology.from_json(text))


def of_levels(levels: Topology, source: str = "file zcomm.topology/1") -> System:
    """Return the system of ranks of which only levels are known: hosts are groups of ``node``."""
    node = next((level for level in levels.levels if level.name == "node"), levels.levels[0])
    host_of = {rank: host for host, group in enumerate(node.groups) for rank in group}
    ranks = tuple(Rank(rank, host_of[rank]) for rank in range(levels.size))
    hosts = ("",) * len(node.groups)
    return System(hosts, ranks=ranks, given=levels, source=source)


def repeat(levels: Topology, size: int) -> Topology | None:
    """Return the levels of several machines like one, a block of ranks each; None if none fit.

    Args:
        levels: of one host.
        size: ranks of the job.
    """
    num_hosts, rest = divmod(size, levels.size)
    if rest or num_hosts < 1 or len(levels.levels[-2].groups) > 1:
        return None
    shifted = [
        Level(
            level.name,
            tuple(
                tuple(rank + host * levels.size for rank in group)
                for host in range(num_hosts)
                for group in level.groups
            ),
        )
        for level in levels.levels[:-1]
    ]
    return Topology((*shifted, Level(levels.levels[-1].name, (tuple(range(size)),))))
