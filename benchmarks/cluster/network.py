"""Building the nodes and their links; runs inside the machine room, as root.

Everything lives as long as process 1 of the machine room, so nothing here is undone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.options import Link
from benchmarks.launch import UsageError

NAMESPACES = ("--net", "--ipc", "--uts", "--mount", "--pid")
ALONE = ("unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc")
"""Starts a command as process 1 of new namespaces, which end with it, and it with its parent."""

INTERFACE = "eth0"
"""Of every node, towards the switch."""

SHARED_MEMORY = Path("/dev/shm")
_NETWORK = "10.77.0"
_SWITCH_HOST = 254
# The queue of a token bucket: no drop while a few senders fill their windows towards one node.
_QUEUE_NBYTES = 4 * 2**20

# Own views of the network devices and of shared memory; then wait for the end of the machine room.
_HOLD = """
hostname "$1"
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo ready
exec sleep infinity
"""


@dataclass(frozen=True)
class Node:
    """One node; ``holder`` is the process whose namespaces it is."""

    name: str
    address: str
    link: str
    holder: int

    def enter(self, *command: str) -> list[str]:
        """Return the command that runs a command on this node, in the current directory."""
        spaces = [name for name in NAMESPACES if name != "--pid"]
        # The holder has made the process namespace for its child and is not in it.
        spaces.append(f"--pid=/proc/{self.holder}/ns/pid_for_children")
        where = ["env", f"--chdir={os.getcwd()}"]
        return ["nsenter", f"--target={self.holder}", *spaces, *where, *command]


@dataclass(frozen=True)
class Counters:
    """Bytes that have left a node and entered it, headers included."""

    sent_nbytes: int
    received_nbytes: int

    def since(self, before: Counters) -> Counters:
        """Return what has crossed the link after ``before``."""
        return Counters(
            self.sent_nbytes - before.sent_nbytes, self.received_nbytes - before.received_nbytes
        )


def tool(*command: str) -> str:
    """Run ``ip``, ``tc`` or ``mount`` and return what it prints.

    Raises:
        UsageError: it failed; in one line, the command and why.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


def build(num_nodes: int, link: Link) -> tuple[Node, ...]:
    """Make the switch and the nodes, and return the nodes.

    Raises:
        UsageError: what this machine's kernel or rights do not allow.
    """
    _make_switch(num_nodes)
    return tuple(_make_node(number, link) for number in range(num_nodes))


def counters(node: Node) -> Counters:
    """Read the interface counters of a node's link, at the switch."""
    (shown,) = json.loads(tool("ip", "-json", "-stats", "link", "show", "dev", node.link))
    both = shown["stats64"]
    return Counters(both["rx"]["bytes"], both["tx"]["bytes"])


def _address(host: int) -> str:
    return f"{_NETWORK}.{host}"


def _make_switch(num_nodes: int) -> None:
    tool("mount", "-t", "tmpfs", "tmpfs", str(SHARED_MEMORY))
    names = {"127.0.0.1": "localhost", _address(_SWITCH_HOST): "switch"}
    names |= {_address(number + 1): f"node{number}" for number in range(num_nodes)}
    hosts = SHARED_MEMORY / "hosts"
    hosts.write_text("".join(f"{address} {name}\n" for address, name in names.items()))
    tool("mount", "--bind", str(hosts), "/etc/hosts")
    socket.sethostname("switch")
    tool("ip", "link", "set", "lo", "up")
    tool("ip", "link", "add", "switch", "type", "bridge")
    tool("ip", "address", "add", f"{_address(_SWITCH_HOST)}/24", "dev", "switch")
    tool("ip", "link", "set", "switch", "addrgenmode", "none", "up")


def _make_node(number: int, link: Link) -> Node:
    name = f"node{number}"
    holder = subprocess.Popen(
        [*ALONE, "sh", "-e", "-c", _HOLD, "sh", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    if holder.stdout.readline() != "ready\n":
        raise UsageError(f"{name} does not start: {' '.join(holder.communicate()[1].split())}")
    node = Node(name, _address(number + 1), f"link{number}", holder.pid)
    peer = ("peer", "name", INTERFACE, "netns", str(node.holder))
    tool("ip", "link", "add", node.link, "type", "veth", *peer)
    _set_up(node.link, link, (), "master", "switch")
    inside = tuple(node.enter())
    _set_up(INTERFACE, link, inside)
    tool(*inside, "ip", "address", "add", f"{node.address}/24", "dev", INTERFACE)
    for route in _routes(node.address):
        tool(*inside, "ip", "route", "replace", *route.split(), "congctl", "cubic")
    return node


def _routes(address: str) -> list[str]:
    """Return the ways to other nodes and to the node itself, which say how TCP controls congestion.

    The machine's default, which new namespaces inherit, may be BBR: it stops for 100 ms every 10 s.
    """
    return [
        f"{_NETWORK}.0/24 dev {INTERFACE} src {address}",
        f"local {address} dev {INTERFACE} src {address} table local",
        "local 127.0.0.1 dev lo src 127.0.0.1 table local",
    ]


def _set_up(interface: str, link: Link, inside: tuple[str, ...], *more: str) -> None:
    """Give one end of a link its packet size and rate. No IPv6 address: IPv4 is all there is."""
    gso = ("gso_max_size", str(link.gso_nbytes), "addrgenmode", "none")
    tool(*inside, "ip", "link", "set", interface, *gso, *more, "up")
    if link.rate is not None:
        bucket = ("rate", f"{link.rate}bit", "burst", f"{link.burst_nbytes}b")
        limit = ("limit", str(_QUEUE_NBYTES))
        tool(*inside, "tc", "qdisc", "add", "dev", interface, "root", "tbf", *bucket, *limit)
