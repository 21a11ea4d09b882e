"""Which optimizers can step a shard: those that treat every element alone.

Source of the condition: ZeRO (arXiv 1910.02054, section 5.1) cuts optimizer states without regard
to the shapes of parameters.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero.offload.settings import TENSORS, copied

logger = logging.getLogger("zcomm")

ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
)
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


def check_elementwise(optimizer: Optimizer, device: torch.device) -> None:
    """Refuse an optimizer whose step of a tensor is not the steps of its elements.

    Those of torch are known by name; another is probed: two steps of a matrix must have the same
    bits as those of its two halves, on the device where it will step.

    Raises:
        ValueError: naming the optimizer.
    """
    kind = type(optimizer)
    if kind.__name__ in NOT_ELEMENTWISE or any(
        base.__name__ in NOT_ELEMENTWISE for base in kind.__mro__
    ):
        raise _refusal(kind.__name__, "its update of an element depends on other elements")
    if is_known(optimizer):
        return
    try:
        same = _steps_halves_alike(optimizer, device)
    except Exception as error:
        raise _refusal(kind.__name__, f"a trial step failed: {error}") from error
    if not same:
        raise _refusal(kind.__name__, "a trial step of a matrix differed from that of its halves")
    logger.info("optimizer %s passed the trial step: treated as elementwise", kind.__name__)


def is_known(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer is one of torch's that treat elements alone."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE


def _refusal(name: str, reason: str) -> ValueError:
    known = ", ".join(ELEMENTWISE)
    return ValueError(f"optimizer {name} cannot be sharded: {reason}; possible: {known}, and alike")


def _steps_halves_alike(optimizer: Optimizer, device: torch.device) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = [torch.randn(32, 32, generator=generator, device="cpu") for _ in range(3)]
    start, *grads = (values.to(device) for values in drawn)
    grads = [grad * (step + 1) for step, grad in enumerate(grads)]
    whole = start.clone()
    halves = [half.clone() for half in torch.split(start.flatten(), 512)]
    group = optimizer.param_groups[0]
    _step_copy(optimizer, group, [whole], [[grad] for grad in grads])
    _step_copy(optimizer, group, halves, [list(torch.split(grad.flatten(), 512)) for grad in grads])
    return torch.equal(whole.flatten(), torch.cat(halves))


def states_to_come(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, torch.dtype]:
    """Return the states per element that a first step makes for the tensors of a group.

    Found by a trial step. Where that fails nothing is known, and the step itself will say why.
    """
    numel = 2
    tensor = torch.zeros(numel, device="cpu")
    try:
        states = _step_copy(optimizer, group, [tensor], [[torch.ones(numel, device="cpu")]])[tensor]
    except Exception:
        return {}
    return {
        key: value.dtype
        for key, value in states.items()
        if isinstance(value, Tensor) and value.shape == tensor.shape
    }


def trial(optimizer: Optimizer, group: dict[str, Any], tensors: Sequence[Tensor]) -> Optimizer:
    """Return an optimizer of these tensors, with settings of a group and numbers of its own."""
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update({k: copied(v) for k, v in vars(optimizer).items() if k not in TENSORS})
    vars(made).update({name: OrderedDict() for name in HOOKS})
    made.state = defaultdict(dict)
    settings = {k: copied(v) for k, v in group.items() if k != "params"}
    made.param_groups = [{**settings, "params": list(tensors)}]
    return made


def _step_copy(
    optimizer: Optimizer, group: dict[str, Any], tensors: list[Tensor], grads: list[list[Tensor]]
) -> dict[Tensor, dict[str, Any]]:
    """Step ``tensors`` with a copy of the optimizer that shares nothing with it.

    Returns:
        The states of the tensors.
    """
    made = trial(optimizer, group, tensors)
    for step in grads:
        for tensor, grad in zip(tensors, step, strict=True):
            tensor.grad = grad.clone()
        type(optimizer).step(made)
    return made.state


def prefer_fused(optimizer: Optimizer) -> None:
    """Set ``fused=True`` for Adam and AdamW where the user left it open, and say so.

    The fused step has one expression for all elements but the last few of a tensor, fewer than a
    vector register holds: cuts at multiples of 256 elements, as zero's are, change no bit.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    changed = False
    for settings in (optimizer.defaults, *optimizer.param_groups):
        if settings.get("fused") is None and not (
            settings.get("foreach") or settings.get("differentiable")
        ):
            settings["fused"] = True
            changed = True
    if changed:
        logger.info("%s: fused was not set, using fused=True", type(optimizer).__name__)
