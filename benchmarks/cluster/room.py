"""Process 1 of the machine room: builds the cluster, runs the program, reports. Started by main.

It ends with the exit code of the program, or 2 and one line where the cluster cannot be built.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Sequence

from benchmarks.cluster import link, network, start
from benchmarks.cluster.network import Counters, Node
from benchmarks.cluster.options import Options, parse
from benchmarks.launch import UsageError


def main(arguments: list[str]) -> int:
    """Run the cluster that the command line describes; return the exit code."""
    _end_with_the_driver()
    options = parse(arguments)
    try:
        nodes = network.build(options.num_nodes, options.link)
        for line in _preamble(options, nodes):
            _say(line)
        if options.measure:
            _say(f"link measured: {link.measure(nodes[0], nodes[1]).describe()}")
    except UsageError as error:
        print(f"benchmarks.cluster: {error}", file=sys.stderr, flush=True)
        return 2
    os.environ[start.LINK] = start.describe_link(options)
    before = [network.counters(node) for node in nodes]
    run = start.run_torch if options.torch else start.run_mpich
    code = run(nodes, options.ranks_per_node, options.program)
    if options.counters:
        _report_counters(nodes, before)
    return code


def _end_with_the_driver() -> None:
    """Exit when the standard input ends, as it does however the driver ends; the kernel then ends
    every other process here. What is started from here has no standard input.
    """
    leash = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def hold() -> None:
        os.read(leash, 1)
        os._exit(1)

    threading.Thread(target=hold, daemon=True).start()


def _say(line: str) -> None:
    sys.stdout.write(f"# {line}\n")
    sys.stdout.flush()


def _preamble(options: Options, nodes: Sequence[Node]) -> list[str]:
    shape = f"{options.num_nodes} nodes x {options.ranks_per_node} ranks"
    places = ", ".join(f"{node.name} {node.address}" for node in nodes)
    lines = [
        f"cluster of {shape} on one machine of {os.cpu_count()} cores: {places}",
        f"links: {options.link.describe()}",
        f"versions: {', '.join(_versions(options))}",
    ]
    if options.link.cuts_packets():
        lines.append("note: packets are larger than the burst, and cutting them costs up to half")
    return lines


def _versions(options: Options) -> list[str]:
    iproute2 = network.tool("ip", "-V").split(", ")[1].strip()
    found = [f"Linux {platform.release()}", iproute2.replace("-", " ")]
    found.append(f"Python {platform.python_version()}")
    if options.torch:
        return [*found, f"torch {importlib.metadata.version('torch')}"]
    shown = subprocess.run(
        [start.find_hydra() or "", "--version"], capture_output=True, text=True
    ).stdout
    lines = [line.split()[-1] for line in shown.splitlines() if "Version:" in line]
    return [*found, f"MPICH {lines[0] if lines else 'of unknown version'}"]


def _report_counters(nodes: Sequence[Node], before: Sequence[Counters]) -> None:
    for node, start_values in zip(nodes, before, strict=True):
        passed = network.counters(node).since(start_values)
        _say(
            f"link of {node.name}: {passed.sent_nbytes} bytes left,"
            f" {passed.received_nbytes} bytes entered"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
