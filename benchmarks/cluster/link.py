"""How fast a link really is: payload bits per second of TCP, received by plain sockets.

``python -m benchmarks.cluster.link`` is one end of a measurement; :func:`measure` runs two of them
on two nodes. What a floor is computed with is this rate, not the one given to the token bucket.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from benchmarks.cluster.network import Node
from benchmarks.launch import UsageError

_PORT = 29400
_PIECE_NBYTES = 2**20
_PATIENCE_SECONDS = 10
# The burst and the slow start of TCP are over by then.
_SETTLED = 0.3


@dataclass(frozen=True)
class Rates:
    """Bits per second from the first node to the second; then each way while both send."""

    one_way: float
    both_ways: tuple[float, float]

    def describe(self) -> str:
        """Return one line for a report."""
        one, (there, back) = self.one_way / 1e9, (rate / 1e9 for rate in self.both_ways)
        return f"{one:.4g} Gbit/s one way, {there:.4g} and {back:.4g} Gbit/s both ways at once"


def measure(first: Node, second: Node, seconds: float = 0.5) -> Rates:
    """Send between two nodes for about ``2 * seconds``.

    Raises:
        UsageError: nothing arrives.
    """
    _, one_way = _exchange(first, second, "send", "receive", seconds)
    back, there = _exchange(first, second, "both", "both", seconds)
    return Rates(one_way, (there, back))


def _exchange(
    first: Node, second: Node, what: str, other: str, seconds: float
) -> tuple[float, float]:
    """Return what the first and the second node received, in bits per second."""
    ends = []
    for node, side, does in ((second, "listen", other), (first, "connect", what)):
        words = (sys.executable, "-m", __spec__.name, side, second.address, does, str(seconds))
        ends.append(subprocess.Popen(node.enter(*words), stdout=subprocess.PIPE, text=True))
    at_second, at_first = (end.communicate()[0] for end in ends)
    if any(end.returncode for end in ends):
        raise UsageError("the link carries nothing: is IPv4 traffic between namespaces filtered?")
    return float(at_first), float(at_second)


def run_end(side: str, address: str, does: str, seconds: float) -> float:
    """Be one end: ``send``, ``receive`` or do ``both``; return the bits received per second."""
    rate = 0.0
    with _listen(address) if side == "listen" else _connect(address) as peer:
        sender = threading.Thread(target=_send, args=(peer, seconds if does != "receive" else 0))
        sender.start()
        if does != "send":
            rate = _receive(peer, seconds)
        sender.join()
    return rate


def _listen(address: str) -> socket.socket:
    with socket.create_server((address, _PORT)) as server:
        server.settimeout(_PATIENCE_SECONDS)
        peer, _ = server.accept()
    peer.settimeout(_PATIENCE_SECONDS)
    return peer


def _connect(address: str) -> socket.socket:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection((address, _PORT), _PATIENCE_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _send(peer: socket.socket, seconds: float) -> None:
    piece = bytes(_PIECE_NBYTES)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        peer.sendall(piece)
    peer.shutdown(socket.SHUT_WR)


def _receive(peer: socket.socket, seconds: float) -> float:
    buffer = bytearray(_PIECE_NBYTES)
    settled = time.monotonic() + _SETTLED * seconds
    num_received, start = 0, 0.0
    while nbytes := peer.recv_into(buffer):
        now = time.monotonic()
        if start:
            num_received += nbytes
        elif now > settled:
            start = now
    return num_received * 8 / (now - start)


if __name__ == "__main__":
    print(run_end(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
