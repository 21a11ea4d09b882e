"""``zcomm topo``: show the machine of this job, this host, or the one that a file describes.

Under a launcher all ranks look, and rank 0 shows. Without one MPI is not started.
"""

from __future__ import annotations

import argparse
import socket
import sys
from dataclasses import replace
from pathlib import Path

from topology import documents, live, nvml, parse, picture
from topology.files import read_system
from topology.nccl_writer import write_nccl
from topology.report import report, verdict
from topology.system import System
from zcomm import environment, launcher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add(
        "--file",
        type=Path,
        help="show this file, not what is here: `nvidia-smi topo -m`, XML of NCCL, our JSON",
    )
    add("--json", action="store_true", help="print JSON (schema zcomm.system/1)")
    add("--svg", type=Path, metavar="FILE", help="draw a picture")
    add("--png", type=Path, metavar="FILE", help="draw a picture; needs matplotlib")
    add("--xml", type=Path, metavar="FILE", help="write XML that NCCL_TOPO_FILE takes")


def run(arguments: argparse.Namespace) -> int:
    """Show the system; all ranks of a job call this.

    Raises:
        TopologyError: a file that cannot be read, or no matplotlib for ``--png``.
        ZcommError: a launcher whose ranks MPI does not see.
        OSError: a file cannot be written.
    """
    system = read_system(arguments.file) if arguments.file else look()
    if launcher.started_rank() == 0:
        show(system, arguments)
    return 0


def look() -> System:
    """Return this host, or in a job all hosts; ``ZCOMM_TOPOLOGY`` replaces the levels of a job."""
    if launcher.started_size()[0]:
        from zcomm import exits, worlds

        world = worlds.find(None, "auto")
        if world.size > 1:
            exits.install(world)
        found = world.survey()
        spec = environment.text("ZCOMM_TOPOLOGY")
        return replace(found, given=parse(spec, world.size)) if spec else found
    if spec := environment.text("ZCOMM_TOPOLOGY"):
        print(
            f"zcomm topo: this is one process, ZCOMM_TOPOLOGY={spec} is of a job: start it under"
            " mpirun, or show a file with --file",
            file=sys.stderr,
        )
    return live.machine(socket.gethostname(), nvml.load())


def show(system: System, arguments: argparse.Namespace) -> None:
    """Write the files that were asked for, and print the system."""
    if arguments.svg:
        arguments.svg.write_text(picture.svg(system, verdict(system)), encoding="utf-8")
    if arguments.png:
        picture.png(system, verdict(system), arguments.png)
    if arguments.xml:
        arguments.xml.write_text(write_nccl(system), encoding="utf-8")
    print(documents.to_json(system) if arguments.json else report(system))
