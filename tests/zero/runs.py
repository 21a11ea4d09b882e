"""How the ZeRO tests train: on the ranks of a played cluster, and on one process as the oracle."""

import copy
from dataclasses import dataclass
from functools import partial

import torch

import zcomm
import zero
from tests.zero.models import differing_copy, loss_of, tokens

SIZES = {"1": 1, "2": 2, "1x2": 2, "2x1": 2, "2x2": 4, "1x4": 4, "4x1": 4, "2x2x2": 8, "2x4": 8}

adamw = partial(torch.optim.AdamW, lr=1e-3)


@dataclass
class Outcome:
    """What one rank saw: losses of its own batches, gradient norms, parameters at the end."""

    losses: list
    norms: list
    parameters: dict
    buffers: dict


def on(topology, program, *arguments, **options):
    """Run ``program(comm, ...)`` on all ranks of a topology (or its text); results by rank."""
    size = SIZES[topology] if isinstance(topology, str) else topology.size
    return zcomm.run_local(lambda comm: program(comm, *arguments, **options), size, topology)


def train(
    comm,
    model,
    config,
    *,
    steps=20,
    optimizer=adamw,
    data=tokens,
    batch=1,
    micro=1,
    no_sync=False,
    clip=None,
):
    """Train a copy of ``model`` in ``steps`` steps of ``micro`` backwards each."""
    sharded, steps_it = shard(comm, model, config, optimizer)
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for part, x in enumerate(data(comm.rank, step, batch * micro).split(batch)):
            loss = loss_of(sharded, x) / micro
            if no_sync and part < micro - 1:
                with zero.no_sync(sharded):
                    loss.backward()
            else:
                loss.backward()
            total += loss.item()
        losses.append(total)
        if clip is not None:
            norms.append(zero.clip_grad_norm_(steps_it, clip).item())
        steps_it.step()
        steps_it.zero_grad()
    return outcome(sharded, losses, norms)


def shard(comm, model, config, optimizer=adamw):
    """Shard a rank's own version of ``model``, whose values only rank 0 has."""
    mine = differing_copy(model, comm.rank)
    return zero.shard(mine, optimizer(mine.parameters()), config, comm=comm)


def outcome(model, losses=(), norms=()):
    parameters = whole(model)
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    return Outcome(list(losses), list(norms), parameters, buffers)


def whole(model):
    """Return copies of all parameters by name. A collective."""
    with zero.full_params(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model):
    """Return copies of the reduced gradients by name, None where there is none. A collective."""
    with zero.full_grads(model):
        return {
            name: None if p.grad is None else p.grad.detach().clone()
            for name, p in model.named_parameters()
        }


def train_alone(model, size, *, steps=20, optimizer=adamw, batch=1, clip=None):
    """Train on the batches of all ``size`` ranks in one process, with plain torch."""
    model = copy.deepcopy(model)
    steps_it = optimizer(model.parameters())
    losses, norms = [], []
    for step in range(steps):
        x = torch.cat([tokens(rank, step, batch) for rank in range(size)])
        loss = loss_of(model, x)
        loss.backward()
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        steps_it.step()
        steps_it.zero_grad()
        losses.append(loss.item())
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Outcome(losses, norms, parameters, dict(model.named_buffers()))


def local_gradients(model, size, *, step=0, batch=1):
    """Return for every rank the gradients of its own batch, by plain torch."""
    found = []
    for rank in range(size):
        alone = copy.deepcopy(model)
        loss_of(alone, tokens(rank, step, batch)).backward()
        found.append({name: p.grad for name, p in alone.named_parameters()})
    return found


def assert_same_bits(a, b):
    """Compare dictionaries of tensors bit by bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        one, other = (
            t.contiguous().view(torch.uint8) for t in (a[name].flatten(), b[name].flatten())
        )
        assert torch.equal(one, other), name


def relative_difference(a, b):
    """Return ‖a - b‖ / ‖b‖ over all tensors, in float64."""
    difference = sum((a[k].double() - b[k].double()).square().sum().item() for k in b)
    return (difference / sum(b[k].double().square().sum().item() for k in b)) ** 0.5
