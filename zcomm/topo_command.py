"""``zcomm topo``: show the machine that a file describes."""

from __future__ import annotations

import argparse
from pathlib import Path

from topology import documents, picture
from topology.files import read_system
from topology.nccl_writer import write_nccl
from topology.report import report, verdict
from topology.system import System


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add(
        "--file",
        type=Path,
        required=True,
        help="show this file: `nvidia-smi topo -m`, XML of NCCL, our JSON",
    )
    add("--json", action="store_true", help="print JSON (schema zcomm.system/1)")
    add("--svg", type=Path, metavar="FILE", help="draw a picture")
    add("--png", type=Path, metavar="FILE", help="draw a picture; needs matplotlib")
    add("--xml", type=Path, metavar="FILE", help="write XML that NCCL_TOPO_FILE takes")


def run(arguments: argparse.Namespace) -> int:
    """Show the system.

    Raises:
        TopologyError: a file that cannot be read, or no matplotlib for ``--png``.
        OSError: a file cannot be written.
    """
    show(read_system(arguments.file), arguments)
    return 0


def show(system: System, arguments: argparse.Namespace) -> None:
    """Print the system and write the files that were asked for."""
    print(documents.to_json(system) if arguments.json else report(system))
    if arguments.svg:
        arguments.svg.write_text(picture.svg(system, verdict(system)), encoding="utf-8")
    if arguments.png:
        picture.png(system, verdict(system), arguments.png)
    if arguments.xml:
        arguments.xml.write_text(write_nccl(system), encoding="utf-8")
