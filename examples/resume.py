"""Train, save behind the training, and resume where the last run stopped, whatever stopped it.

mpirun -n 4 python examples/resume.py checkpoint 60     # stops after 60 steps; any number of ranks
mpirun -n 2 python examples/resume.py checkpoint 100    # goes on from there
"""

import sys
from pathlib import Path

import torch
from torch import nn

import zcomm
import zero

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])

with zcomm.init() as comm:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    model, optimizer = zero.shard(model, optimizer, zero.Config(stage=3), comm=comm)
    begin = 0
    if (FOLDER / "index.json").exists():
        begin = zero.load(FOLDER, model, optimizer, scheduler=scheduler).step or 0
    for step in range(begin, STEPS):
        generator = torch.Generator().manual_seed(step)  # one batch for all, whatever their number
        x = torch.randn(32, 64, generator=generator)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if comm.rank == 0:
            print(f"step {step} loss {loss.item():.5f}", flush=True)
        if (step + 1) % 20 == 0:
            zero.save(FOLDER, model, optimizer, scheduler=scheduler, step=step + 1, async_op=True)
