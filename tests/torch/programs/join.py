"""Join what torchrun started: all ranks, two halves of them, or one that fails meanwhile."""

import sys

import numpy as np
import torch.distributed as dist

import zcomm

how = sys.argv[1]
if how == "halves":
    dist.init_process_group("gloo")
    me = dist.get_rank()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    comm = zcomm.init(comm=halves[me % 2])
else:
    comm = zcomm.init()
    me = comm.rank
if how == "fail" and me == 1:
    raise RuntimeError("of rank 1")
total = comm.all_reduce(np.array([me + 1], np.float32))
shape = "x".join(map(str, comm.topology.shape[::-1]))
print(f"{me}:{shape}:{total[0]} ", flush=True)  # unbuffered, the end of the line is a second write
comm.close()
