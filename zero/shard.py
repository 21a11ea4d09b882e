"""``zero.shard``: the one entry point. It turns a model and its optimizer into sharded ones."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zcomm import Communicator
from zero.checkpoint.providers import register_providers
from zero.config import Config
from zero.edits import note_versions
from zero.elementwise import check_elementwise, prefer_fused
from zero.engine import Engine, is_sharded, remember
from zero.gather import Gathering
from zero.layout import BufferLayout, UnitModules, find_units, lay_out
from zero.meta import Init, is_meta, materialise
from zero.offload.drive import Faults
from zero.offload.engine import Offload
from zero.offload.told import agreed, told
from zero.offload.trial import check_blocks, check_states_on_disk
from zero.optimizer import Stepper
from zero.places import HOST, device_of, is_away
from zero.publish import Publisher
from zero.reduce import Reducer
from zero.saved import SavedWeights
from zero.schedule import Schedule
from zero.secondary import Secondary, groups_of
from zero.states import replace_parameters, trained_parameters
from zero.tensor_parallel import use_local_parts
from zero.unit import Buffer, Master, State, Unit, pack, split

logger = logging.getLogger("zcomm")

_PROCESS = os.urandom(8).hex()
"""What no other process has; one that was forked cannot communicate."""


def shard(
    model: nn.Module,
    optimizer: Optimizer,
    config: Config | None = None,
    *,
    comm: Communicator,
    init: Init = None,
) -> tuple[nn.Module, Optimizer]:
    """Shard a model's states over the ranks of a communicator (ZeRO, arXiv 1910.02054).

    A collective. Parameters and buffers are those of rank 0. Both objects are changed in place and
    returned; the training loop and schedulers made before stay as they are::

        model, optimizer = zero.shard(model, optimizer, zero.Config(stage=3), comm=comm)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    After backward ``p.grad`` is None; the reduced gradient is the ``.grad`` of the optimizer's
    tensors, one 1-D tensor per run of a parameter.

    Args:
        model: on the CPU or on a CUDA device, all of it, with parameters of float32, bfloat16 or
            float16; or built under ``torch.device("meta")``: then it is initialised and sharded
            unit by unit, on all ranks from the generator's state of rank 0's draws, on torch's
            default device.
        optimizer: a torch optimizer that treats elements alone, over the model's parameters; it may
            have states.
        config: stage, codecs, secondary; ``Config()`` is stage 3.
        comm: all ranks of the job.
        init: for a meta model: None runs every module's ``reset_parameters``, in the order of
            construction; a function is called with every module after that, as
            ``model.apply(init)``; ``"empty"`` leaves the values to ``zero.load_pretrained`` or
            ``zero.load``.

    Raises:
        ValueError: a model, optimizer or configuration that cannot be sharded, or that is not the
            same on all ranks.
        OffloadError: on all ranks, when the disk of one cannot hold what it is to.
    """
    config = config or Config()
    if is_sharded(model) or is_sharded(optimizer):
        raise ValueError("this model or optimizer is already sharded")
    device = device_of(model.named_parameters())
    check_elementwise(optimizer, HOST if config.offload_optimizer else device)
    if config.offload_optimizer is not None:
        check_blocks(optimizer)
    if config.offload_optimizer == "nvme":
        check_states_on_disk(optimizer)
    if is_away(device):
        check_device(comm, device, optimizer, config)
    config = without_differences(config, comm)
    tensor_parallel = use_local_parts(model, optimizer)
    trained = trained_parameters(optimizer, model)
    _say_untrained(model, trained)
    found = find_units(model, config.units)
    owners = comm.topology.ownership()
    layouts = [lay_out(u.parameters, owners, config.piece_numel, trained) for u in found]
    _check_alike(comm, layouts, (model, optimizer, config))
    with told(comm):
        offload = open_offload(config, comm)
        units = _make_units(model, found, layouts, comm, config, init, offload)
    for tensor in model.buffers():
        _broadcast(comm, tensor)
    engine = assemble(comm, config, units, offload)
    prefer_fused(optimizer)
    replace_parameters(optimizer, units)
    if offload is not None:
        with told(comm):
            for unit in units:
                offload.take_states(optimizer, unit.trainable)
            offload.reserve_states(optimizer, units)
            agreed(comm)
    for unit in units:
        engine.publisher.publish_first(unit)
        if unit.state is State.SHARDED:  # a meta model's
            continue
        for buffer in unit.buffers:
            note_versions(buffer)
        if config.stage == 3:
            engine.gathering.begin(unit)
    engine.stepper.tensor_parallel = tensor_parallel
    engine.stepper.attach(optimizer)
    _drop_with_zero_grad(model, optimizer, engine.reducer)
    optimizer.__dict__["add_param_group"] = _refuse_group
    register_providers(engine)
    remember(engine, model, optimizer)
    _say_exact(config, units)
    return model, optimizer


def without_differences(config: Config, comm: Communicator) -> Config:
    """Where all ranks are one node there is nobody to send differences to."""
    if config.secondary != "persistent" or len(groups_of(comm.topology, "node")) > 1:
        return config
    logger.info("one node: parameters travel exactly, secondary='persistent' has nothing to do")
    return replace(config, secondary=None, weights=None)


def _make_units(
    model: nn.Module,
    found: tuple[UnitModules, ...],
    layouts: list[tuple[BufferLayout, ...]],
    comm: Communicator,
    config: Config,
    init: Init,
    offload: Offload | None,
) -> tuple[Unit, ...]:
    """Make all units; those of a meta model one after the other, and let go of each."""
    units: dict[int, Unit] = {}

    def make(unit: UnitModules) -> Unit:
        number = found.index(unit)
        units[number] = make_unit(number, unit, layouts[number], comm, config, offload)
        return units[number]

    def make_and_hide(unit: UnitModules) -> None:
        made = make(unit)
        if config.stage == 3:
            for buffer in made.buffers:
                note_versions(buffer)
                buffer.hide()
            made.state = State.SHARDED

    if is_meta(model):
        materialise(model, found, init, make_and_hide)
    elif init is not None:
        raise ValueError("init is for models built under torch.device('meta'); this one has memory")
    else:
        for unit in found:
            make(unit)
    return tuple(units[number] for number in range(len(found)))


def make_unit(
    number: int,
    found: UnitModules,
    layouts: tuple[BufferLayout, ...],
    comm: Communicator,
    config: Config,
    offload: Offload | None = None,
) -> Unit:
    """Return a unit that is whole, with masters; parameters are those of rank 0. A collective."""
    parameters = dict(found.parameters)
    buffers = []
    for layout in layouts:
        mine = tuple(parameters[slot.name] for slot in layout.slots)
        buffer = Buffer(layout, comm.rank, mine, full=None)
        memory = torch.zeros(layout.numel, dtype=layout.dtype, device=buffer.device)
        for index, parameter in enumerate(mine):
            buffer.slot_view(memory, index).copy_(parameter.detach())
        comm.broadcast(memory)
        buffer.show(memory)
        _make_masters(buffer, comm, config)
        if offload is not None:
            offload.adopt(buffer, found.name)
        buffers.append(buffer)
    numel = sum(parameter.numel() for parameter in parameters.values())
    return Unit(number, found.name, found.module, tuple(buffers), numel >= config.min_numel)


def _make_masters(buffer: Buffer, comm: Communicator, config: Config) -> None:
    """Give the optimizer its tensors: this rank's runs; in stage 0 the runs of all ranks."""
    assert buffer.full is not None
    layout, full = buffer.layout, buffer.full
    coded = config.weights is not None
    decoded = coded and (config.stage in (1, 2) or config.secondary == "persistent")
    away = is_away(buffer.device)
    buffer.offloaded = away and config.offload_optimizer is not None
    of_masters = HOST if buffer.offloaded else buffer.device
    of_shard = HOST if away and config.offload_params is not None else buffer.device
    apart = of_masters != (of_shard if config.stage == 3 else buffer.device)
    buffer.separate = layout.dtype != torch.float32 or decoded or config.on_disk or apart
    if config.stage == 3:
        mine = [buffer.run_view(full, run) for run in buffer.runs]
        pinned = away and config.offload_params == "cpu"
        buffer.shard = pack(mine, layout.dtype, of_shard, pinned=pinned)
        views = dict(zip(buffer.runs, split(buffer.shard, buffer.runs), strict=True))
    owners = range(comm.size) if config.stage == 0 else (comm.rank,)
    runs = [(owner, run) for owner in owners for run in layout.trainable_runs(owner)]
    held = [buffer.run_view(full, run) if config.stage < 3 else views[run] for _, run in runs]
    tensors = held
    if buffer.separate:
        pinned = away and config.offload_optimizer == "cpu"
        values = pack(held, torch.float32, of_masters, pinned=pinned)
        tensors = split(values, [run for _, run in runs])
    for (owner, run), tensor, value in zip(runs, tensors, held, strict=True):
        tensor = tensor.detach()
        tensor.grad_dtype = None
        buffer.masters.append(Master(run, owner, tensor, value))


def open_offload(config: Config, comm: Communicator) -> Offload | None:
    """Return what holds offloaded states; None where nothing is offloaded."""
    if config.offload_optimizer is None and config.offload_params is None:
        return None
    return Offload(config, comm.rank)


def assemble(
    comm: Communicator, config: Config, units: tuple[Unit, ...], offload: Offload | None = None
) -> Engine:
    """Return what gathers, reduces, steps and publishes units. A collective."""
    faults = Faults() if offload is None else offload.faults
    secondary = None
    if config.secondary is not None:
        codes = config.secondary_codec is not None
        secondary = Secondary(
            comm, config.secondary, config.weights_codec, codes=codes, seed=config.seed
        )
        if secondary.group.size == comm.size:
            # One group of all ranks holds what the shards are: there is nothing second.
            secondary = None
    reducer = Reducer(comm, config, units)
    publisher = Publisher(comm, config)
    saved = SavedWeights(lambda unit: schedule.enter_backward(unit))
    gathering = Gathering(comm, config, saved, secondary, faults)
    schedule = Schedule(units, gathering, reducer, faults)
    blocks = None if offload is None else offload.block_step(comm, units, publisher)
    stepper = Stepper(comm, config, units, reducer, publisher, gathering, faults, blocks)
    return Engine(comm, config, units, gathering, reducer, publisher, stepper, schedule, offload)


def _broadcast(comm: Communicator, tensor: Tensor) -> None:
    """Give a buffer of any dtype and layout the values of rank 0."""
    if not tensor.numel():
        return
    memory = tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()
    comm.broadcast(memory)
    with torch.no_grad():
        tensor.copy_(memory.view(tensor.dtype).view(tensor.shape))


def _check_alike(
    comm: Communicator,
    layouts: list[tuple[BufferLayout, ...]],
    given: tuple[nn.Module, Optimizer, Config],
) -> None:
    model, optimizer, config = given
    buffers = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.named_buffers()]
    groups = [len(group["params"]) for group in optimizer.param_groups]
    facts = {
        "parameters (name, shape, dtype, trained or not)": layouts,
        "buffers": buffers,
        "optimizers or groups": (type(optimizer).__name__, groups),
        # Every rank may have a disk of its own.
        "configurations": {k: v for k, v in vars(config).items() if k != "nvme_path"},
    }
    digests = [hashlib.blake2b(repr(f).encode(), digest_size=8).digest() for f in facts.values()]
    rows = comm.all_gather_values(np.frombuffer(b"".join(digests), np.int64))
    for index, what in enumerate(facts):
        different = [rank for rank in range(comm.size) if rows[rank, index] != rows[0, index]]
        if different:
            raise ValueError(f"ranks {different} differ from rank 0 in their {what}")


def _drop_with_zero_grad(model: nn.Module, optimizer: Optimizer, reducer: Reducer) -> None:
    """Let ``zero_grad`` of either object clear all gradients, local ones of no_sync included."""
    zero_optimizer, zero_model = optimizer.zero_grad, model.zero_grad

    def zero_grad_of_optimizer(set_to_none: bool = True) -> None:
        reducer.clear()
        zero_optimizer(set_to_none)

    def zero_grad_of_model(set_to_none: bool = True) -> None:
        zero_grad_of_optimizer(set_to_none)
        zero_model(set_to_none)

    replaced: list[tuple[nn.Module | Optimizer, Callable[[bool], None]]] = [
        (optimizer, zero_grad_of_optimizer),
        (model, zero_grad_of_model),
    ]
    for owner, method in replaced:
        owner.__dict__["zero_grad"] = method


def _refuse_group(group: dict[str, object]) -> None:
    """Stand in for ``add_param_group``: a tensor that no unit knows would be stepped unreduced.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"the optimizer is sharded: add the group of {sorted(group)} before zero.shard"
    )


def check_device(
    comm: Communicator, device: torch.device, optimizer: Optimizer, config: Config
) -> None:
    """Refuse what cannot work on a device. A collective.

    Raises:
        ValueError: ranks that are threads of one process and share a device; a capturable step of
            masters that are offloaded.
    """
    digest = hashlib.blake2b(f"{_PROCESS} {device}".encode(), digest_size=8).digest()
    places = comm.all_gather_values(np.frombuffer(digest, np.int64))[:, 0].tolist()
    shared = [rank for rank, place in enumerate(places) if places.count(place) > 1]
    if shared:
        # The hooks of a device's backwards run in one thread: one would wait for the other.
        raise ValueError(
            f"ranks {shared} are threads of a process that share a device (rank {comm.rank}:"
            f" {device}): possible is a device for each of them, or ranks that are processes"
        )
    if config.offload_optimizer and any(g.get("capturable") for g in optimizer.param_groups):
        raise ValueError(
            f"offload_optimizer {config.offload_optimizer!r} with a capturable optimizer: its step"
            " is on the host, where nothing is captured; use capturable=False"
        )


def _say_untrained(model: nn.Module, trained: set[nn.Parameter]) -> None:
    names = [n for n, p in model.named_parameters() if p.requires_grad and p not in trained]
    if names:
        logger.warning(
            "parameters that require gradients but are in no group of the optimizer are not"
            " trained, and their gradients not kept: %s",
            ", ".join(names),
        )


def _say_exact(config: Config, units: tuple[Unit, ...]) -> None:
    if config.weights is None and config.grads is None:
        return
    exact = [unit.name or "the root" for unit in units if unit.buffers and not unit.quantise]
    if exact:
        logger.info(
            "units of fewer than %d elements travel without codecs: %s",
            config.min_numel,
            ", ".join(exact),
        )
