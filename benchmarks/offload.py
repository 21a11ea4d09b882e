"""How long is an optimizer's step whose states are on disk, or that runs block by block?

    python -m benchmarks.offload [--params 32M] [-n 5] [--dtype float32] [--folder PATH]

AdamW, fused, in turns on the same parameters and gradients:

- **torch**: ``torch.optim.AdamW(fused=True)`` on whole float32 tensors: what the processor can do.
  Of a bfloat16 model with conversions of all gradients before, and of all parameters after.
- **cpu**: the step of ``offload_optimizer="cpu"``, in blocks.
- **io**: the same blocks read from the disk and written back, nothing computed: what the disk can
  do.
- **nvme**: the step of ``offload_optimizer="nvme"``.

Seconds are those between torch's hooks before and after the step, on one rank: the norm and the
agreement on finite gradients, which come before, are in none. Medians over the turns. The exit code
is 1 when parameters differ from torch's by more than 1e-6 of their norm.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import zero
from benchmarks import launch
from benchmarks.collectives.options import size_nbytes
from zcomm import Communicator
from zero.config import Place
from zero.engine import is_sharded
from zero.offload import Extent, Pending, Swap

Moving = tuple[Tensor, Pending]

WIDTH = 1024
UNIT_NUMEL = 8 * WIDTH**2
ALLOWED = 1e-6
NUM_COLUMNS = 3
"""Masters and the two states of Adam."""


@dataclass(frozen=True)
class Options:
    """What to measure; see ``--help``."""

    params: int
    turns: int
    dtype: str
    folder: Path
    json: Path | None
    topology: str


@dataclass(frozen=True)
class Turn:
    """Seconds of one turn."""

    torch: float
    cpu: float
    io: float
    nvme: float

    @property
    def bound(self) -> float:
        """The longer one of what overlaps on disk: moving and updating."""
        return max(self.io, self.cpu)


def parse(arguments: list[str]) -> Options:
    """Read the command line."""
    parser = launch.Parser(prog="python -m benchmarks.offload", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--params", type=size_nbytes, default=size_nbytes("32M"), help="of the model (32M)")
    add("-n", dest="turns", type=int, default=5, help="turns (5)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="(float32)")
    add("--folder", type=Path, default=Path("build/offload"), help="(build/offload)")
    add("--json", type=Path, help="file for the turns")
    add("--topology", default="auto")
    given = parser.parse_args(arguments)
    if given.turns < 1:
        raise launch.UsageError(f"-n {given.turns}: at least 1")
    if given.params < UNIT_NUMEL:
        raise launch.UsageError(f"--params {given.params}: at least {UNIT_NUMEL}")
    return Options(**vars(given))


def _unit() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, False) for _ in range(UNIT_NUMEL // WIDTH**2)))


class Stepped:
    """A model and its optimizer, whose steps are timed without what zero's hooks do."""

    def __init__(self, options: Options, comm: Communicator, place: Place | None) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(*(_unit() for _ in range(options.params // UNIT_NUMEL)))
        self.model.to(getattr(torch, options.dtype))
        self.optimizer = self._optimizer(options, comm, place)
        self._seconds = 0.0
        self.optimizer.register_step_pre_hook(self._begin)
        self.optimizer.register_step_post_hook(self._end)
        self._grads = [
            torch.randn(t.numel(), generator=torch.Generator().manual_seed(i)).to(self._dtype)
            for i, t in enumerate(self.stepped)
        ]

    def _optimizer(self, options: Options, comm: Communicator, place: Place | None) -> Optimizer:
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        parameters = list(self.model.parameters())
        self._masters: list[Tensor] = []
        if place is None and self._dtype != torch.float32:
            self._masters = [parameter.detach().float() for parameter in parameters]
        optimizer = AdamW(self._masters or parameters, fused=True)
        if place is not None:
            folder = options.folder if place == "nvme" else None
            config = zero.Config(offload_optimizer=place, nvme_path=folder)
            zero.shard(self.model, optimizer, config, comm=comm)
        return optimizer

    @property
    def stepped(self) -> list[Tensor]:
        """The tensors in the optimizer's group."""
        tensors: list[Tensor] = self.optimizer.param_groups[0]["params"]
        return tensors

    def _begin(self, *_: object) -> None:
        self._seconds -= time.perf_counter()

    def _end(self, *_: object) -> None:
        self._seconds += time.perf_counter()

    def step(self) -> float:
        """Step, and return how long it took."""
        self._seconds = 0.0
        grads = [g.view(t.shape) for t, g in zip(self.stepped, self._grads, strict=True)]
        if self._masters:
            self._begin()
            grads = [grad.float() for grad in grads]
            self._end()
        for tensor, grad in zip(self.stepped, grads, strict=True):
            tensor.grad_dtype = None
            tensor.grad = grad
        self.optimizer.step()
        if self._masters:
            self._begin()
            for parameter, master in zip(self.model.parameters(), self._masters, strict=True):
                parameter.data.copy_(master)
            self._end()
        return self._seconds

    def parameters(self) -> Tensor:
        """Return all parameters, one after the other, float32."""
        sharded = is_sharded(self.model)
        values = zero.full_state_dict(self.model) if sharded else self.model.state_dict()
        return torch.cat([tensor.flatten().float() for tensor in values.values()])


class Moved:
    """The blocks of such a step on disk, and nothing else."""

    def __init__(self, options: Options) -> None:
        self._swap = Swap(options.folder, rank=0)
        nbytes = 4 * zero.Config.offload_numel
        count = max(1, 4 * (options.params // UNIT_NUMEL * UNIT_NUMEL) // nbytes)
        self._blocks = [
            [self._swap.allocate(f"{block}.{column}", nbytes) for column in range(NUM_COLUMNS)]
            for block in range(count)
        ]
        memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        for extents in self._blocks:
            for extent in extents:
                self._swap.write(extent, memory).wait()

    def close(self) -> None:
        """Give the disk space back."""
        self._swap.close()

    def move(self) -> float:
        """Read block k + 1 while block k - 1 is written; return how long all took."""
        start = time.perf_counter()
        reading = deque([self._read(self._blocks[0])])
        writing: deque[list[Moving]] = deque()
        for index, extents in enumerate(self._blocks):
            reading += [self._read(following) for following in self._blocks[index + 1 : index + 2]]
            memories = self._ended(reading.popleft())
            pairs = zip(extents, memories, strict=True)
            writing.append([(m, self._swap.write(extent, m)) for extent, m in pairs])
            if len(writing) > 1:
                self._give_back(self._ended(writing.popleft()))
        self._give_back(self._ended(writing.popleft()))
        return time.perf_counter() - start

    def _read(self, extents: list[Extent]) -> list[Moving]:
        memories = [self._swap.buffer(extent.nbytes) for extent in extents]
        return [(m, self._swap.read(e, m)) for e, m in zip(extents, memories, strict=True)]

    def _ended(self, moving: list[Moving]) -> list[Tensor]:
        for _, pending in moving:
            pending.wait()
        return [memory for memory, _ in moving]

    def _give_back(self, memories: list[Tensor]) -> None:
        for memory in memories:
            self._swap.give_back(memory)


def run(options: Options, comm: Communicator) -> int:
    """Measure and print; return the exit code.

    Raises:
        UsageError: several ranks: they would share the processor.
    """
    if comm.size > 1:
        raise launch.UsageError(f"{comm.size} ranks: run it on one, without mpirun")
    try:
        options.folder.mkdir(parents=True, exist_ok=False)
    except OSError as error:
        raise launch.UsageError(f"--folder {options.folder}: {error.strerror}") from None
    try:
        return _measure(options, comm)
    finally:
        shutil.rmtree(options.folder)


def _measure(options: Options, comm: Communicator) -> int:
    places: dict[str, Place | None] = {"torch": None, "cpu": "cpu", "nvme": "nvme"}
    stepped = {name: Stepped(options, comm, place) for name, place in places.items()}
    moved = Moved(options)
    for model in stepped.values():  # the first step makes the states
        model.step()
    numel = sum(p.numel() for p in stepped["torch"].model.parameters())
    print(
        f"# {numel / 1e6:.1f} M parameters, {options.dtype}, blocks of"
        f" {zero.Config.offload_numel / 1e6:.1f} M, {torch.get_num_threads()} threads; s of a step"
    )
    print("#  torch    cpu     io   nvme  cpu/torch  nvme/max(io,cpu)")
    turns = []
    for _ in range(options.turns):
        seconds = {name: model.step() for name, model in stepped.items()}
        turn = Turn(io=moved.move(), **seconds)
        turns.append(turn)
        print(_row(turn), flush=True)
    moved.close()
    print(f"# medians\n{_row(_median(turns))}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(turn) for turn in turns]) + "\n")
    return _check({name: model.parameters() for name, model in stepped.items()})


def _row(turn: Turn) -> str:
    return (
        f"{turn.torch:8.3f} {turn.cpu:6.3f} {turn.io:6.3f} {turn.nvme:6.3f}"
        f"  {turn.cpu / turn.torch:9.2f}  {turn.nvme / turn.bound:16.2f}"
    )


def _median(turns: list[Turn]) -> Turn:
    names = [field.name for field in fields(Turn)]
    return Turn(**{name: statistics.median(getattr(t, name) for t in turns) for name in names})


def _check(found: dict[str, Tensor]) -> int:
    code = 0
    for name in ("cpu", "nvme"):
        off = float((found[name] - found["torch"]).norm() / found["torch"].norm())
        print(f"# {name}: parameters differ from torch's by {off:.1e} of their norm")
        code |= int(not off <= ALLOWED)
    return code


if __name__ == "__main__":
    sys.exit(launch.main("benchmarks.offload", parse, run))
