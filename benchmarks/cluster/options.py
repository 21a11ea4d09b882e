"""The command line of the emulated cluster, and the link that it describes.

Rates are bits per second, as ``tc`` writes them (``200mbit``); a *burst* is the bytes that a link
passes at once after it was idle, before the rate holds: its *credit*.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from benchmarks.launch import Parser, UsageError

MAX_NODES = 64

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_RATE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_SIZE = re.compile(r"(\d+)(k|m|)b?")
_SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_GIGABIT = 10**9
_MAX_PACKET_NBYTES = 2**16


@dataclass(frozen=True)
class Link:
    """What every node's link is like, each way; a rate of None, without burst, is the machine's.

    Args:
        rate: bits per second on the wire, headers included.
        burst_nbytes: see above.
        gso_nbytes: the largest packet that TCP hands to the link. A packet larger than the burst
            is cut by the token bucket, at a cost in processor time that shows in every figure.
    """

    rate: int | None
    burst_nbytes: int
    gso_nbytes: int

    def describe(self) -> str:
        """Return one line for a report."""
        packets = f"packets of up to {self.gso_nbytes} bytes (gso), cubic"
        if self.rate is None:
            return f"no limit, {packets}"
        credit = f"{self.burst_nbytes} bytes, {self.credit_seconds() * 1e3:.3g} ms"
        return f"{self.rate / 1e6:g} Mbit/s each way, credit {credit} (burst), {packets}"

    def credit_seconds(self) -> float:
        """Return the time at the rate that a burst is passed without: too much in a floor."""
        return self.burst_nbytes * 8 / self.rate if self.rate else 0.0

    def cuts_packets(self) -> bool:
        """Return whether the token bucket has to cut packets, which slows all that is measured."""
        return self.rate is not None and self.gso_nbytes > self.burst_nbytes


@dataclass(frozen=True)
class Options:
    """What the user asked for, checked."""

    num_nodes: int
    ranks_per_node: int
    link: Link
    cpu_bound: bool
    torch: bool
    measure: bool
    counters: bool
    program: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


def rate(text: str) -> int | None:
    """Return the bits per second of ``1gbit``, ``200mbit``, ``64kbit``; None for ``none``."""
    if text == "none":
        return None
    match = _RATE.fullmatch(text.lower())
    if match is None or not (number := int(float(match[1]) * _RATE_UNITS[match[2]])):
        raise argparse.ArgumentTypeError(f"'{text}' is no rate; write 200mbit, 1gbit or none")
    return number


def size_nbytes(text: str) -> int:
    """Return the bytes of ``32kb``, ``1mb`` or ``16384``, in units of 1024 as ``tc`` has them."""
    match = _SIZE.fullmatch(text.lower())
    if match is None or not (number := int(match[1]) * _SIZE_UNITS[match[2]]):
        raise argparse.ArgumentTypeError(f"'{text}' is no size; write 16384 or 32kb")
    return number


def link_for(
    bits: int | None, *, cpu_bound: bool, burst: int | None = None, gso: int | None = None
) -> Link:
    """Return the link of a rate, with what is not given chosen so that figures can be trusted.

    For timing: the smallest burst at which the rate still holds. For what the processor limits: a
    larger one, at the price of its credit. Packets are as large as fit into it twice.
    """
    if bits is None:
        return Link(None, 0, gso or _MAX_PACKET_NBYTES)
    if cpu_bound:
        chosen = (128 if bits <= _GIGABIT else 512) * 2**10
    else:
        chosen = 32 * 2**10 * max(bits, _GIGABIT) // _GIGABIT
    chosen = burst or chosen
    return Link(bits, chosen, gso or min(_MAX_PACKET_NBYTES, chosen // 2))


def _count(maximum: int) -> type:
    def integer(text: str) -> int:
        if not (text.isdigit() and 1 <= int(text) <= maximum):
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number from 1 to {maximum}")
        return int(text)

    return integer  # type: ignore[return-value]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its help is the reference of the flags."""
    parser = Parser(
        prog="python -m benchmarks.cluster",
        description="Run a program on an emulated cluster: one machine plays several nodes.",
        usage="%(prog)s [options] -- PROGRAM [ARGUMENT ...]",
    )
    add = parser.add_argument
    add("--nodes", type=_count(MAX_NODES), default=2, metavar="N", help="number of nodes (2)")
    add(
        "--ranks-per-node",
        type=_count(256),
        default=2,
        metavar="L",
        help="ranks of every node (2); rank r is on node r // L",
    )
    add("--rate", type=rate, default="1gbit", help="of every link, each way (1gbit); or none")
    add("--burst", type=size_nbytes, help="what a link passes at once after idling (32kb)")
    add(
        "--gso",
        type=size_nbytes,
        help="the largest packet handed to a link (half a burst, at most 65536)",
    )
    add(
        "--cpu-bound",
        action="store_true",
        help="larger burst and packets, where the processor limits; the credit is printed",
    )
    add(
        "--torch",
        action="store_true",
        help="start the ranks as torchrun does (RANK, MASTER_ADDR, GLOO_SOCKET_IFNAME), not by MPI",
    )
    add("--measure", action="store_true", help="measure the link first, with plain sockets")
    add("--counters", action="store_true", help="print the bytes that crossed each link at the end")
    add("program", nargs="+", help=argparse.SUPPRESS)
    return parser


def parse(arguments: list[str]) -> Options:
    """Return the options of a command line.

    Raises:
        UsageError: in one line, what is wrong with it.
    """
    given = build_parser().parse_args(arguments)
    if given.measure and given.nodes < 2:
        raise UsageError("--measure needs two nodes: there is nothing to send to")
    if given.rate is None and (given.burst or given.cpu_bound):
        raise UsageError("--rate none has no burst: leave out --burst and --cpu-bound")
    return Options(
        num_nodes=given.nodes,
        ranks_per_node=given.ranks_per_node,
        link=link_for(given.rate, cpu_bound=given.cpu_bound, burst=given.burst, gso=given.gso),
        cpu_bound=given.cpu_bound,
        torch=given.torch,
        measure=given.measure,
        counters=given.counters,
        program=tuple(given.program),
    )
