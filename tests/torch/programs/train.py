"""Train a small model one way on one backend, 20 steps; rank 0 prints the losses as JSON.

Usage: train.py WAY BACKEND FOLDER
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import zcomm.torch  # noqa: F401

STEPS = 20
WIDTH, VOCABULARY, CONTEXT, BATCH = 16, 23, 12, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(CONTEXT, CONTEXT)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def tokens(step: int, replica: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randint(0, VOCABULARY, (BATCH, CONTEXT), generator=draws)


def step_of(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    logits = net(x[:, :]).reshape(-1, VOCABULARY)
    loss = nn.functional.cross_entropy(logits, x.roll(1, 1).reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, last: int = STEPS):
    losses = []
    for step in range(first, last):
        loss = step_of(net, optimizer, tokens(step, dist.get_rank()))
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        losses.append(loss.item())
    return losses


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def sharded(mesh) -> nn.Module:
    net = model()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def ddp(folder: Path) -> list[float]:
    net = DistributedDataParallel(model())
    return train(net, adamw(net))


def ddp_sparse(folder: Path) -> list[float]:
    net = model()
    net.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
    net = DistributedDataParallel(net)
    return train(net, torch.optim.SGD(net.parameters(), lr=1e-2))


def ddp_compiled(folder: Path) -> list[float]:
    net = torch.compile(DistributedDataParallel(model()), backend="aot_eager")
    return train(net, adamw(net))


def fsdp2(folder: Path) -> list[float]:
    net = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = adamw(net)
    losses = train(net, optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    return [*losses, float(norm)]


def hsdp(folder: Path) -> list[float]:
    shape = (2, dist.get_world_size() // 2)
    net = sharded(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    return train(net, adamw(net))


def tensor_parallel(folder: Path) -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = model()
    for block in net.blocks:
        plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    losses = [step_of(net, optimizer, tokens(step, 0)).item() for step in range(STEPS)]
    # Redistribution: rows, columns, everything.
    whole = torch.arange(8.0 * dist.get_world_size() ** 2).reshape(-1, 2 * dist.get_world_size())
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    again = columns.redistribute(placements=[Replicate()])
    assert isinstance(again, DTensor)
    assert torch.equal(again.to_local(), whole)
    return losses


def zero_redundancy(folder: Path) -> list[float]:
    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
    losses = train(net, optimizer)
    optimizer.consolidate_state_dict(0)
    return losses


def checkpoint(folder: Path) -> list[float]:
    """Train, save at step 10, synchronously and not, load twice into new models, go on."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = sharded(mesh)
    optimizer = adamw(net)
    losses = train(net, optimizer, 0, 10)
    dcp.save(_state(net, optimizer), checkpoint_id=folder / "sync")
    # It communicates in a thread of its own, and so needs a group of its own.
    beside = dist.new_group()
    saving = dcp.async_save(
        _state(net, optimizer), checkpoint_id=folder / "async", process_group=beside
    )
    losses += train(net, optimizer, 10, STEPS)
    saving.result()
    dist.barrier()
    for name in ("sync", "async"):
        net = sharded(mesh)
        optimizer = adamw(net)
        state = _state(net, optimizer)
        dcp.load(state, checkpoint_id=folder / name)
        set_state_dict(
            net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert train(net, optimizer, 10, STEPS) == losses[10:STEPS]
    return losses


def _state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    model_state, optimizer_state = get_state_dict(net, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def trainer(folder: Path) -> list[float]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=WIDTH, n_layer=2, n_head=2
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    rows = [{"input_ids": row, "labels": row} for k in range(80) for row in tokens(k, 0)]
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    work = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=rows)
    work.train()
    return [entry["loss"] for entry in work.state.log_history if "loss" in entry]


def deepspeed_stage(stage: int, folder: Path) -> list[float]:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    net = model()
    engine, *_ = deepspeed.initialize(model=net, optimizer=adamw(net), config=settings)
    losses = []
    for step in range(STEPS):
        x = tokens(step, dist.get_rank())
        logits = engine(x).reshape(-1, VOCABULARY)
        loss = nn.functional.cross_entropy(logits, x.roll(1, 1).reshape(-1))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


WAYS = {
    each.__name__: each
    for each in (
        ddp,
        ddp_sparse,
        ddp_compiled,
        fsdp2,
        hsdp,
        tensor_parallel,
        zero_redundancy,
        checkpoint,
        trainer,
    )
}
WAYS |= {f"deepspeed{n}": lambda folder, n=n: deepspeed_stage(n, folder) for n in (1, 2, 3)}


def join(way: str, backend: str) -> None:
    """Make the default group, as the users of ``way`` do."""
    if not way.startswith("deepspeed"):
        dist.init_process_group(backend)
        return
    import deepspeed

    # An operator for inference, compiled when the process group is made, which takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Its own discovery of MPI works too, and has one port for all jobs of a machine.
    os.environ.setdefault("LOCAL_RANK", os.environ.get("MPI_LOCALRANKID", "0"))
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)


def main(way: str, backend: str, folder: str) -> None:
    join(way, backend)
    losses = WAYS[way](Path(folder))
    if backend == "zcomm":
        sent = dist.group.WORLD.communicator.traffic
        assert sent.wire_nbytes() > 0, "nothing went through the backend"
    if dist.get_rank() == 0:
        print("LOSSES", json.dumps(losses), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
