"""Train on a device that is not the CPU, and compare the bits with those on the CPU.

python -m tests.zero.device_program TOPOLOGY FOLDER CASE...; prints "CASE passed". Ranks are threads
with a device each: "cuda" where there is one, else torch's of tests/device/accelerator.py. There
all values are the CPU's; on CUDA they are near.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import zero
from tests.device import accelerator
from tests.zero.models import Tower, loss_of, make, tokens
from tests.zero.runs import adamw, assert_same_bits, on, outcome, relative_difference, shard

STEPS = 6
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    config: dict
    dtype: torch.dtype = torch.float32
    micro: int = 1
    optimizer: object = adamw
    edits: bool = False
    recompute: str | None = None
    no_sync: bool = False


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def foreach(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def averaged(parameters):
    return torch.optim.ASGD(parameters, lr=1e-2)


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=1e-2, initial_accumulator_value=0.1)


ZEROPP = {"stage": 3, "weights": "int8", "secondary": "node", "grads": ("int8", "int4")}
CPU = {"offload_optimizer": "cpu"}
CASES = {
    "0": Case({"stage": 0, "min_numel": 0}),
    "0 bf16": Case({"stage": 0}, BF16, micro=2),
    "1": Case({"stage": 1}, edits=True),
    "1 bf16": Case({"stage": 1}, BF16, micro=2),
    "2": Case({"stage": 2}),
    "2 int8": Case({"stage": 2, "weights": "int8", "grads": "int8", "min_numel": 0}, edits=True),
    "3": Case({"stage": 3}, edits=True),
    "3 again": Case({"stage": 3, "prefetch": 2}, BF16, recompute="plain"),
    "3 momentum": Case({"stage": 3}, BF16, optimizer=momentum),
    "3 foreach": Case({"stage": 3}, BF16, optimizer=foreach),
    "3 adagrad": Case({"stage": 3}, BF16, optimizer=adagrad),
    "3 averaged": Case({"stage": 3}, BF16, optimizer=averaged),
    "cpu averaged": Case({"stage": 3, **CPU}, BF16, optimizer=averaged),
    "3 no_sync": Case({"stage": 3}, BF16, micro=3, no_sync=True),
    "3 scaled": Case({"stage": 3, "loss_scale": "dynamic"}, torch.float16),
    "zeropp": Case({**ZEROPP, "min_numel": 0, "prefetch": 2}, BF16),
    "codes": Case({**ZEROPP, "secondary_codec": "int8", "min_numel": 0}, BF16),
    "persistent": Case({"stage": 3, "secondary": "persistent", "min_numel": 0}, BF16, edits=True),
    "node": Case({"stage": 3, "accumulate": "node", "min_numel": 0}, micro=2),
    "feedback": Case(
        {"stage": 3, "grads": ("int8", "int4"), "grads_feedback": True, "min_numel": 0}, BF16
    ),
    "cpu 1": Case({"stage": 1, **CPU}, edits=True),
    "cpu 2": Case({"stage": 2, **CPU}, BF16, micro=2),
    "cpu 2 int8": Case({"stage": 2, "weights": "int8", "min_numel": 0, **CPU}, BF16, edits=True),
    "cpu 3": Case({"stage": 3, **CPU}, BF16, edits=True),
    "cpu 3 blocks": Case({"stage": 3, "offload_numel": 256, **CPU}, optimizer=momentum),
    "cpu params": Case({"stage": 3, "offload_params": "cpu"}, edits=True),
    "cpu both": Case({"stage": 3, "offload_params": "cpu", **CPU}, BF16, micro=2),
    "cpu zeropp": Case({**ZEROPP, "min_numel": 0, "offload_params": "cpu", **CPU}, BF16),
    "cpu codes": Case(
        {**ZEROPP, "secondary_codec": "int8", "min_numel": 0, "offload_params": "cpu"}, BF16
    ),
    "cpu persistent": Case(
        {"stage": 3, "secondary": "persistent", "min_numel": 0, "offload_params": "cpu", **CPU},
        BF16,
    ),
    "cpu node": Case({"stage": 3, "accumulate": "node", "min_numel": 0, **CPU}, micro=2),
    "nvme 2": Case({"stage": 2, "offload_optimizer": "nvme"}, BF16, edits=True),
    "nvme": Case(
        {"stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme", "offload_numel": 300},
        BF16,
        edits=True,
    ),
    "nvme params": Case({"stage": 3, "offload_params": "nvme"}, micro=2),
}


def configured(case, folder):
    fields = dict(case.config)
    if "nvme" in (fields.get("offload_optimizer"), fields.get("offload_params")):
        fields["nvme_path"] = str(folder)
    return zero.Config(**fields)


def train(comm, case, device, folder, *, start=None, steps=range(STEPS), save=None):
    """Train on a device, from a checkpoint if one is named, to another if one is."""
    model = make(Tower, dtype=case.dtype).to(device)
    for block in model.blocks:
        block.recompute = case.recompute
    model, optimizer = shard(comm, model, configured(case, folder), case.optimizer)
    if start is not None:
        zero.load(start, model, optimizer)
    losses, norms = [], []
    for step in steps:
        parts = tokens(comm.rank, step, case.micro).to(device).split(1)
        for index, x in enumerate(parts):
            loss = zero.scale_loss(optimizer, loss_of(model, x) / case.micro)
            if case.no_sync and index < case.micro - 1:
                with zero.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
            losses.append(loss.item())
        norms.append(zero.clip_grad_norm_(optimizer, 0.7).item())
        if step == 3:
            with zero.full_grads(model):
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        if case.edits and step == 2:
            with zero.full_params(model), torch.no_grad():
                model.head.bias.add_(0.125)
                model.blocks[0].up.weight[1].zero_()
    if save is not None:
        zero.save(save, model, optimizer)
    whole = zero.full_state_dict(model)
    assert all(t.device.type == torch.device(device).type for t in whole.values())
    return outcome(model, losses, norms), whole


def compare(one, other, exactly):
    (a, whole), (b, expected) = one, other
    found = {name: t.cpu() for name, t in (*a.parameters.items(), *a.buffers.items())}
    wanted = {name: t.cpu() for name, t in (*b.parameters.items(), *b.buffers.items())}
    if exactly:
        assert (a.losses, a.norms) == (b.losses, b.norms), (a, b)
        assert_same_bits(found, wanted)
        assert_same_bits({n: t.cpu() for n, t in whole.items()}, expected)
    else:
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-2, atol=1e-3)


def check(comm, name, folder):
    case, device = CASES[name], own_device(comm.rank)
    exactly = not device.startswith("cuda")
    places = [folder / f"{name}.{place}" for place in ("cpu", "device")]
    expected = train(comm, case, "cpu", folder, save=places[0], steps=range(3))
    compare(train(comm, case, device, folder, save=places[1], steps=range(3)), expected, exactly)
    rest = range(3, STEPS)
    expected = train(comm, case, "cpu", folder, start=places[0], steps=rest)
    for place in places:
        found = train(comm, case, device, folder, start=place, steps=rest)
        compare(found, expected, exactly)


STEP = "a step"
STEP_BOUND = 1e-6
"""Relative, of a float32 step on the host and one on the device: a few roundings of AdamW."""


def check_step(comm, name, folder):
    """Compare one step with offload, to each place, with one without, on the same device."""
    device = own_device(comm.rank)

    def stepped(**fields):
        config = Case({"stage": 3, **fields})
        return train(comm, config, device, folder, steps=range(1))[1]

    without, before = stepped(), {n: p.to(device) for n, p in make(Tower).named_parameters()}
    assert relative_difference({n: without[n] for n in before}, before) > 100 * STEP_BOUND
    for fields in (CPU, {"offload_params": "cpu", **CPU}, CASES["nvme"].config):
        found = stepped(**fields)
        if device.startswith("cuda"):
            assert relative_difference(found, without) <= STEP_BOUND, fields
        else:
            assert_same_bits(found, without)


def own_device(rank):
    """Make a device the current one of this thread: backward hooks of a device share a thread."""
    if not torch.cuda.is_available():
        return accelerator.use(rank)
    torch.cuda.set_device(rank)
    return f"cuda:{rank}"


def main():
    topology, folder, *names = sys.argv[1:]
    if not torch.cuda.is_available():
        accelerator.load()
    for name in names or (*CASES, STEP):
        on(topology, check_step if name == STEP else check, name, Path(folder))
        print(f"{name} passed", flush=True)


if __name__ == "__main__":
    main()
