"""What the offload tests compare: the same program, with offload and without, bit by bit."""

import dataclasses
from functools import partial

import torch

from tests.zero.models import Tower, make
from tests.zero.runs import assert_same_bits, on, train

PLACES = {
    "cpu": ("cpu", None),
    "cpu both": ("cpu", "cpu"),
    "nvme": ("nvme", None),
    "nvme both": ("nvme", "nvme"),
    "nvme params": (None, "nvme"),
    "cpu nvme": ("cpu", "nvme"),
}
# Small, so that the larger masters of the models are split, and the smaller ones packed.
BLOCK_NUMEL = 700

OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "adamw for each": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
    "radam": partial(torch.optim.RAdam, lr=1e-2),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "adamax": partial(torch.optim.Adamax, lr=1e-3),
    "rprop": partial(torch.optim.Rprop, lr=1e-3),
    "asgd": partial(torch.optim.ASGD, lr=1e-2, t0=1),
}


def offloaded(config, place, path):
    """Return a configuration with offload, as far as its stage has it."""
    optimizer, params = PLACES[place]
    if config.stage < 3:
        params = None
    disk = "nvme" in (optimizer, params)
    return dataclasses.replace(
        config,
        offload_optimizer=optimizer,
        offload_params=params,
        nvme_path=path if disk else None,
        # Blocks in memory are four times as large.
        offload_numel=BLOCK_NUMEL // (4 if optimizer == "cpu" else 1),
    )


def compare(topology, program, config, place, path, **options):
    """Run ``program(comm, config)`` both ways; its results, nested, have the same bits."""
    expected = on(topology, program, config, **options)
    found = on(topology, program, offloaded(config, place, path), **options)
    for a, b in zip(found, expected, strict=True):
        assert_alike(a, b)
    return found


def assert_alike(a, b):
    if dataclasses.is_dataclass(b):
        a, b = vars(a), vars(b)
    if isinstance(b, dict):
        assert a.keys() == b.keys()
        tensors = {k: v for k, v in b.items() if isinstance(v, torch.Tensor)}
        assert_same_bits({k: a[k] for k in tensors}, tensors)
        for key in b.keys() - tensors.keys():
            assert_alike(a[key], b[key])
    elif isinstance(b, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_alike(one, other)
    elif isinstance(b, torch.Tensor):
        assert_same_bits({"": a}, {"": b})
    else:
        assert a == b


def compare_training(topology, config, place, path, *, dtype=torch.bfloat16, **options):
    """Train the small tower both ways."""
    model = make(Tower, dtype=dtype)

    def program(comm, config):
        return train(comm, model, config, **{"steps": 3, **options})

    return compare(topology, program, config, place, path)
