"""An all_reduce of torch.distributed over gloo; and how TCP controls congestion to every rank."""

import os
import socket
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.full((2**20,), float(dist.get_rank() + 1))
dist.all_reduce(total)
place = f"{socket.gethostname()} {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}"
congestion = set()
for name in os.listdir("/proc/self/fd"):
    try:
        with socket.socket(fileno=os.dup(int(name))) as opened:
            if opened.family == socket.AF_INET and opened.type == socket.SOCK_STREAM:
                opened.getpeername()
                congestion.add(opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16))
    except OSError:
        continue
names = ",".join(sorted(name.rstrip(b"\0").decode() for name in congestion))
sys.stdout.write(f"{dist.get_rank()} {total.unique().tolist()} {place} {names}\n")
dist.destroy_process_group()
