"""Starting the program's ranks on the nodes, by MPICH's launcher or one by one.

Rank r is on node r // L, where L is the number of ranks of every node.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster.network import INTERFACE, SHARED_MEMORY, Node
from benchmarks.cluster.options import Options

LINK = "BENCHMARKS_CLUSTER_LINK"
"""The variable that tells programs what their links are; see :func:`describe_link`."""

_MASTER_PORT = 29500
_POLL_SECONDS = 0.02


def describe_link(options: Options) -> str:
    """Return JSON: the rate in bits per second, and the credit that a floor must not count.

    The small burst of links made for timing passes while TCP begins: it is no credit.
    """
    credit = options.link.burst_nbytes if options.cpu_bound else 0
    return json.dumps({"rate": options.link.rate, "credit_nbytes": credit})


def find_hydra() -> str | None:
    """Return MPICH's launcher beside this Python, else the one on the PATH."""
    beside = Path(sys.executable).with_name("mpiexec.hydra")
    return str(beside) if beside.exists() else shutil.which("mpiexec.hydra")


def run_mpich(nodes: Sequence[Node], ranks_per_node: int, program: Sequence[str]) -> int:
    """Run the program under Hydra, which believes to reach the nodes by ssh; return its code."""
    hydra = find_hydra()
    assert hydra is not None
    remote_shell = SHARED_MEMORY / "enter"
    remote_shell.write_text(_remote_shell(nodes))
    remote_shell.chmod(0o755)
    hosts = ",".join(f"{node.address}:{ranks_per_node}" for node in nodes)
    how = ["-launcher", "ssh", "-launcher-exec", str(remote_shell), "-hosts", hosts]
    return exit_code(
        subprocess.call([hydra, *how, "-n", str(len(nodes) * ranks_per_node), *program])
    )


def run_torch(nodes: Sequence[Node], ranks_per_node: int, program: Sequence[str]) -> int:
    """Start every rank as torchrun would; return the code of the first that fails, else 0.

    The others are not waited for then: they end with the machine room.
    """
    ranks = []
    num_ranks = len(nodes) * ranks_per_node
    for rank in range(num_ranks):
        node = nodes[rank // ranks_per_node]
        env = torch_environment(rank, num_ranks, ranks_per_node, nodes[0].address)
        ranks.append(subprocess.Popen(node.enter(*program), env=os.environ | env))
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            return exit_code(failed[0]) if failed else 0
        time.sleep(_POLL_SECONDS)


def torch_environment(
    rank: int, num_ranks: int, ranks_per_node: int, master: str
) -> dict[str, str]:
    """Return what ``torch.distributed.init_process_group("gloo")`` reads."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(_MASTER_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }


def _remote_shell(nodes: Sequence[Node]) -> str:
    """Return a script that is called as ssh is: options, a host, the words of a command."""
    cases = "".join(
        f'  {node.address}) exec {shlex.join(node.enter("sh", "-c"))} "$*" ;;\n' for node in nodes
    )
    return f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
case $host in
{cases}esac
echo "$host is no node of this cluster" >&2
exit 1
"""


def exit_code(returned: int) -> int:
    """Return the exit code of a process, as a shell has it where a signal ended it."""
    return 128 - returned if returned < 0 else returned
