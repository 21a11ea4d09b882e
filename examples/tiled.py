"""A linear operator too large to be whole: its tiles are gathered one after the other.

mpirun -n 2 python examples/tiled.py 1        # 256 MB of weights, as one
mpirun -n 2 python examples/tiled.py 32       # the same layer in 32 tiles
"""

import resource
import sys

import torch

import zcomm
import zero

SPLITS = int(sys.argv[1]) if len(sys.argv) > 1 else 32
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 3
WIDTH = int(sys.argv[3]) if len(sys.argv) > 3 else 2048

with zcomm.init() as comm:
    torch.manual_seed(0)
    with torch.device("meta"):
        up = zero.TiledLinear(WIDTH, 8 * WIDTH, out_splits=SPLITS)
        down = zero.TiledLinear(8 * WIDTH, WIDTH, in_splits=SPLITS)
        model = torch.nn.Sequential(up, torch.nn.GELU(), down)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = zero.shard(model, optimizer, zero.Config(stage=3), comm=comm)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(comm.rank))
    for step in range(STEPS):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    if comm.rank == 0:
        peak = zero.memory.report(model, optimizer).peak / 1e6
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"{SPLITS} tiles: units, gradients at most {peak:.0f} MB, process {resident:.0f} MB")
