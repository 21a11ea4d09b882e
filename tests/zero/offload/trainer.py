"""Trains with everything on disk until it is killed, many times over; a child process per life.

    python -m tests.zero.offload.trainer FOLDER LIVES SEED

Every life resumes from the checkpoint that the last one left, and saves one after each step; it is
killed with SIGKILL at a random moment: in a step, a gather, a save. The last life trains on to the
end, as does one process more, which nobody kills and which has everything in memory. Both give a
digest of losses and parameters; the line that is printed says how many lives were killed, at which
step the last of them resumed, and whether the digests agree.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import zcomm
import zero
from tests.zero.models import Tower, loss_of, make, tokens

NUM_RANKS = 2
STEPS = 40


def train(comm, folder, config, pipe):
    """Train from the last checkpoint to the end; rank 0 tells where it began, then its digest."""
    model = make(Tower, width=64, hidden=200, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zero.shard(model, optimizer, config, comm=comm)
    step, seen = 0, []
    if (folder / "saved" / "index.json").exists():
        loaded = zero.load(folder / "saved", model, optimizer, random_state=False)
        step, seen = loaded.step, loaded.extra
    if comm.rank == 0:
        os.write(pipe, bytes([step]))
    while step < STEPS:
        loss = loss_of(model, tokens(comm.rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        seen = [*seen, loss.item()]
        zero.save(folder / "saved", model, optimizer, step=step, extra=seen)
    state = zero.full_state_dict(model)
    digest = hashlib.blake2b(json.dumps(seen).encode())
    for name in sorted(state):
        digest.update(state[name].contiguous().view(torch.uint8).numpy())
    if comm.rank == 0:
        os.write(pipe, digest.digest())


def life(folder, config, seconds=None):
    """Train in a child, and kill it some seconds after it resumed; None lets it end.

    Returns the step it resumed at, whether it was killed, and its digest.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        torch.set_num_threads(1)
        try:
            zcomm.run_local(lambda comm: train(comm, folder, config, writing), NUM_RANKS)
        except BaseException as error:  # a child must not come back into its parent's program
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(3)
        os._exit(0)
    os.close(writing)
    (resumed,) = os.read(reading, 1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("a life ended with an error")
    digest = os.read(reading, 1 << 10)
    os.close(reading)
    return resumed, os.WIFSIGNALED(status), digest


def main(folder, lives, seed):
    """Kill ``lives`` lives, then let one end; compare it with one that was never killed."""
    draw = random.Random(seed)
    disk = folder / "disk"
    disk.mkdir()
    config = zero.Config(
        offload_optimizer="nvme", offload_params="nvme", nvme_path=disk, offload_numel=3000
    )
    killed = 0
    for _ in range(lives):
        _, hit, _ = life(folder, config, draw.uniform(0, 0.4))
        killed += hit
        assert not list(disk.iterdir()), "a swap file was left behind"
    resumed, _, digest = life(folder, config)
    (folder / "alone").mkdir()
    _, _, alone = life(folder / "alone", zero.Config())
    print(killed, resumed, "same" if digest == alone else "different")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
