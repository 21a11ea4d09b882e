"""Two ranks of two nodes send to each other at the same time, for about a second at RATE bit/s.

Each prints the bits per second that it received, from the first piece to the last.
"""

import os
import socket
import sys
import threading
import time

nbytes = int(float(sys.argv[1]) / 8)
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
rank = int(os.environ["RANK"])

if rank == 0:
    peer, _ = socket.create_server(address).accept()
else:
    deadline = time.monotonic() + 10
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)

sender = threading.Thread(target=peer.sendall, args=(bytes(nbytes),))
sender.start()
first = len(peer.recv(2**16))
start = time.monotonic()
remaining = nbytes - first
while remaining:
    piece = peer.recv(2**16)
    assert piece, f"{remaining} bytes are missing"
    remaining -= len(piece)
elapsed = time.monotonic() - start
sender.join()
sys.stdout.write(f"{rank} {socket.gethostname()} {(nbytes - first) * 8 / elapsed}\n")
