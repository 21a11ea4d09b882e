"""Saves without end until it is killed, many times over; a child process per life.

    python -m tests.zero.saver FOLDER LIVES SEED

Every life resumes from the checkpoint that the last one left, checks it, and saves: in step k all
parameters and states are k. It is killed with SIGKILL at a random moment. The parent has no torch
threads, so that its children can be forked. The last line says how many saves were hit.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import zcomm
import zero

NUM_RANKS = 2
NUMEL = 300_000


def build(comm):
    model = nn.Sequential(nn.Linear(NUMEL, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return zero.shard(model, optimizer, zero.Config(), comm=comm)


def fill(model, optimizer, step):
    """Give everything that is saved the value of the step."""
    with zero.full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            optimizer.state[tensor]["momentum_buffer"] = torch.full_like(tensor, step)


def check(model, optimizer, step):
    with zero.full_params(model):
        assert all(bool((p == step).all()) for p in model.parameters()), step
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            assert bool((optimizer.state[tensor]["momentum_buffer"] == step).all()), step


def live(comm, folder, acknowledged, pipe):
    """Resume, and save until killed; write the number of each step that is saved to the pipe."""
    model, optimizer = build(comm)
    step = 0
    if acknowledged:
        step = zero.load(folder, model, optimizer).step
        # One more than what was told can be complete, none less.
        assert acknowledged <= step <= acknowledged + 1, (acknowledged, step)
        check(model, optimizer, step)
    if comm.rank == 0:
        os.write(pipe, (-step - 1).to_bytes(8, "little", signed=True))
    for number in range(step + 1, step + 1000):
        fill(model, optimizer, number)
        saving = zero.save(folder, model, optimizer, step=number, async_op=bool(number % 2))
        saving.wait()
        if comm.rank == 0:
            os.write(pipe, number.to_bytes(8, "little", signed=True))


def life(folder, acknowledged, pipe):
    torch.set_num_threads(1)
    try:
        zcomm.run_local(lambda comm: live(comm, folder, acknowledged, pipe), NUM_RANKS)
    except BaseException as error:  # a child must not come back into its parent's program
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(3)


def main():
    folder, lives, draws = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    acknowledged = hit = lived = 0
    while lived < lives or (not acknowledged and lived < 20 * lives):  # on a busy machine, more
        lived += 1
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            life(folder, acknowledged, write)
        os.close(write)
        # The first word says that it has resumed, and checked what it found.
        word = os.read(read, 8)
        acknowledged_before = acknowledged
        if word:
            time.sleep(draws.uniform(0, 0.15))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"a life ended by itself after step {acknowledged}")
        resumed = -int.from_bytes(word, "little", signed=True) - 1
        acknowledged = max(acknowledged, resumed)
        while word := os.read(read, 8):
            acknowledged = int.from_bytes(word, "little", signed=True)
        os.close(read)
        hit += any(folder.glob(".tmp-*"))
        print(f"{acknowledged_before} -> {acknowledged}", flush=True)
    print(f"steps {acknowledged} hit {hit}")


if __name__ == "__main__":
    main()
