"""``zcomm topo``: show the machine that a file describes."""

from __future__ import annotations

import argparse
from pathlib import Path

from topology import documents
from topology.files import read_system
from topology.report import report


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


def run(arguments: argparse.Namespace) -> int:
    """Show the system.

    Raises:
        TopologyError: a file that cannot be read.
    """
    system = read_system(arguments.file)
    print(documents.to_json(system) if arguments.json else report(system))
    return 0
