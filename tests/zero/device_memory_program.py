"""What a rank has on its device, and what it meets there: meta models, inference, loading, errors.

python -m tests.zero.device_memory_program; prints one line of JSON.
"""

import gc
import json
from tempfile import TemporaryDirectory

import torch
from torch import nn

import zero
from tests.device import accelerator
from tests.zero.models import Tower
from tests.zero.runs import adamw, on

WIDTH, BLOCKS, RANKS = 128, 8, 2
NUMEL = BLOCKS * WIDTH * WIDTH
BOTH = {"offload_optimizer": "cpu", "offload_params": "cpu"}


def model_on(device):
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)]
    return nn.Sequential(*layers).to(device, torch.bfloat16)


def measure(comm, fields):
    """Return bytes per parameter on the device, between steps and at the peak of a step."""
    device = accelerator.use(comm.rank)
    memory = torch.accel
    before = memory.memory_allocated(device)
    model = model_on(device)
    config = zero.Config(**fields)
    model, optimizer = zero.shard(model, adamw(model.parameters()), config, comm=comm)
    found = []
    for _ in range(3):
        found = [(memory.memory_allocated(device) - before) / NUMEL]
        memory.reset_peak_memory_stats(device)
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((memory.max_memory_allocated(device) - before) / NUMEL)
    masters = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    states = {
        value.device.type
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return {"rest": found[0], "peak": found[1], "masters": [*masters], "states": [*states]}


def from_meta(comm, fields):
    """Shard a model of the meta device; return where it is, and whether a step can be made."""
    device = accelerator.use(comm.rank)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(9, 30), nn.LayerNorm(30), nn.Linear(30, 9))
    with torch.device(device):
        config = zero.Config(**fields)
        model, optimizer = zero.shard(model, adamw(model.parameters()), config, comm=comm)
    model(torch.ones(2, 9, device=device)).sum().backward()
    optimizer.step()
    with zero.full_params(model):
        return sorted({f"{p.device.type} {bool(p.isfinite().all())}" for p in model.parameters()})


def drawn(comm):
    """Return whether a meta model on the device has the values of one that was built there."""
    device = accelerator.use(comm.rank)

    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.bias)

    def build():
        return nn.Sequential(nn.Linear(9, 30), nn.LayerNorm(30), nn.Linear(30, 9))

    with torch.device(device):
        torch.manual_seed(3)
        plain = build().apply(init)
        with torch.device("meta"):
            model = build()
        torch.manual_seed(3)
        model, _ = zero.shard(model, adamw(model.parameters()), zero.Config(), comm=comm, init=init)
        found = zero.full_state_dict(model, device="cpu")
    expected = plain.state_dict()
    return all(torch.equal(found[name], value.cpu()) for name, value in expected.items())


def evaluated(comm, fields):
    """Return whether evaluation in inference mode, which gathers ahead, gives what training saw."""
    device = accelerator.use(comm.rank)
    model = model_on(device)
    config = zero.Config(prefetch=2, **fields)
    model, optimizer = zero.shard(model, adamw(model.parameters()), config, comm=comm)
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.inference_mode():
        found = [model(x).cpu() for _ in range(2)]
    seen = model(x)
    seen.sum().backward()
    return all(torch.equal(one, seen.detach().cpu()) for one in found)


def loaded(comm, folder):
    """Return where step counts of a fused step are that another optimizer has loaded."""
    device = accelerator.use(comm.rank)
    for attempt, options in enumerate(({}, {"foreach": True})):
        model = model_on(device)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        model, optimizer = zero.shard(model, optimizer, zero.Config(), comm=comm)
        if attempt:
            zero.load(folder, model, optimizer)
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16, device=device)).sum().backward()
        optimizer.step()
        if not attempt:
            zero.save(folder, model, optimizer)
    return sorted({state["step"].device.type for state in optimizer.state.values()})


def shared(comm):
    """Return what is said of ranks that are threads and share a device."""
    model = Tower().to(accelerator.use(0))
    try:
        zero.shard(model, adamw(model.parameters()), zero.Config(), comm=comm)
    except ValueError as error:
        return str(error)
    return "nothing"


def mixed(comm):
    """Return what is said of a model that is half moved."""
    model = Tower()
    model.blocks[0].up.to(accelerator.use(comm.rank))
    try:
        zero.shard(model, adamw(model.parameters()), zero.Config(), comm=comm)
    except ValueError as error:
        return str(error)
    return "nothing"


def main():
    accelerator.load()
    topology = f"1x{RANKS}"
    found = {}
    for name, stage, fields in (
        ("2", 2, {}),
        ("2 cpu", 2, {"offload_optimizer": "cpu"}),
        ("3", 3, {}),
        ("3 cpu", 3, {"offload_optimizer": "cpu"}),
        ("3 both", 3, BOTH),
    ):
        gc.collect()  # of the models before, while no rank runs
        found[name] = on(topology, measure, {"stage": stage, "prefetch": 0, **fields})[0]
    found["meta"] = [on(topology, from_meta, {"stage": 3, **more})[0] for more in ({}, BOTH)]
    found["mixed"] = on(topology, mixed)[0]
    found["shared"] = on(topology, shared)[0]
    found["drawn"] = on("1", drawn)
    with TemporaryDirectory() as folder:
        found["loaded"] = on(topology, loaded, f"{folder}/saved")[0]
        nvme = {"offload_params": "nvme", "nvme_path": folder}
        more = {"offload_params": "cpu"}, nvme, {"secondary": "node", "offload_params": "cpu"}
        found["evaluated"] = [on(topology, evaluated, fields) for fields in ({}, *more)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
