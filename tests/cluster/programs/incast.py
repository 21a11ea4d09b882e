"""All ranks but the first send to it at once: it prints the bits per second that it received."""

import os
import selectors
import socket
import sys
import time

nbytes = int(float(sys.argv[1]) / 8)
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
num_senders = int(os.environ["WORLD_SIZE"]) - 1


def send() -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            with socket.create_connection(address) as peer:
                peer.sendall(bytes(nbytes))
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def receive() -> float:
    server = socket.create_server(address)
    peers = selectors.DefaultSelector()
    for _ in range(num_senders):
        peers.register(server.accept()[0], selectors.EVENT_READ)
    start, num_received = time.monotonic(), 0
    while peers.get_map():
        for ready, _ in peers.select():
            piece = ready.fileobj.recv(2**16)
            num_received += len(piece)
            if not piece:
                peers.unregister(ready.fileobj)
    return num_received * 8 / (time.monotonic() - start)


if os.environ["RANK"] == "0":
    sys.stdout.write(f"{receive()}\n")
else:
    send()
