"""A ``System`` as JSON, schema ``zcomm.system/1``, and back.

The text has a field for every field of the dataclasses of ``topology.system``, None ones left out,
and besides, for readers of other programs, the levels that follow. They are not read again, unless
they were ``given``.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from topology.errors import TopologyError
from topology.model import Topology
from topology.system import Cpu, Gpu, Nic, Path, Pci, Rank, System

SCHEMA = "zcomm.system/1"
PARTS: Mapping[str, type] = {
    "cpus": Cpu,
    "gpus": Gpu,
    "nics": Nic,
    "paths": Path,
    "pci": Pci,
    "ranks": Rank,
}
_TYPES: Mapping[Any, Any] = {int: int, str: str, bool: bool, float: (int, float)}
T = TypeVar("T")

LARGEST = 2**63
AMOUNTS = ("nvlinks", "link_gbytes", "gbytes", "gbit", "links", "width")
"""Numbers that are never below 0; others are -1 where somebody did not know."""


def to_json(system: System, *, indent: int | None = 1) -> str:
    """Return the document."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "source": system.source,
        "hosts": list(system.hosts),
        "warnings": list(system.warnings),
    }
    for name in PARTS:
        document[name] = [_plain(item) for item in getattr(system, name)]
    if system.given is not None:
        document["given"] = json.loads(system.given.to_json())
    if system.ranks or system.gpus or system.given is not None:
        document["levels"] = json.loads(system.topology.to_json())["levels"]
    return json.dumps(document, indent=indent)


def from_json(text: str) -> System:
    """Read what ``to_json`` wrote, or the same by hand.

    Raises:
        TopologyError: not JSON, another schema, or an entry that cannot be; it is named.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise TopologyError(f"an object with the schema {SCHEMA!r} is expected")
    known = {*PARTS, "schema", "source", "hosts", "warnings", "given", "levels"}
    if document.keys() - known:
        raise TopologyError(
            f"unknown keys {', '.join(sorted(document.keys() - known))}; possible: "
            f"{', '.join(sorted(known))}"
        )
    parts: dict[str, Any] = {
        name: tuple(
            _read(one, item, f"{name}[{number}]")
            for number, item in enumerate(_list(document, name))
        )
        for name, one in PARTS.items()
    }
    given = document.get("given")
    return System(
        hosts=tuple(_texts(document, "hosts")),
        warnings=tuple(_texts(document, "warnings")),
        given=None if given is None else Topology.from_json(json.dumps(given)),
        source=str(document.get("source", "file")),
        **parts,
    )


def _plain(item: Any) -> dict[str, Any]:
    values = {one.name: getattr(item, one.name) for one in fields(item)}
    return {name: value for name, value in values.items() if value is not None}


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    value = document.get(name, [])
    if not isinstance(value, list):
        raise TopologyError(f"{name} must be a list, got {value!r}")
    return value


def _texts(document: Mapping[str, Any], name: str) -> list[str]:
    values = _list(document, name)
    odd = [value for value in values if not isinstance(value, str)]
    if odd:
        raise TopologyError(f"{name} must hold texts, got {odd[0]!r}")
    return values


def _read(one: type[T], item: object, where: str) -> T:
    """Read an entry: an object with the fields of a dataclass.

    Raises:
        TopologyError: unknown, missing or ill-typed fields.
    """
    if not isinstance(item, dict):
        raise TopologyError(f"{where} must be an object, got {item!r}")
    hints = get_type_hints(one)
    for name, value in item.items():
        if name not in hints:
            raise TopologyError(f"{where}: unknown field {name!r}; possible: {', '.join(hints)}")
        if not _fits(value, hints[name]):
            raise TopologyError(f"{where}: {name}={value!r} is not of type {hints[name]}")
        lowest = 0 if name in AMOUNTS else -1
        if isinstance(value, (int, float)) and not lowest <= value < LARGEST:
            shown = str(value)[:20]
            raise TopologyError(f"{where}: {name}={shown}: {lowest} to 2^63 is expected")
    try:
        return one(**item)
    except TypeError as error:
        lacking = str(error).partition("argument")[2].lstrip("s: ")
        raise TopologyError(f"{where}: lacks {lacking}") from None


def _fits(value: object, hint: Any) -> bool:
    kinds = getattr(hint, "__args__", (hint,))
    if value is None:
        return type(None) in kinds
    return any(
        isinstance(value, _TYPES[kind]) and (kind is bool or not isinstance(value, bool))
        for kind in kinds
        if kind in _TYPES
    )
