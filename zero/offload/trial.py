"""Whether an optimizer's step can be several calls, each with tensors that it never saw before.

That is what a step in blocks is. An optimizer that remembers something of its tensors outside their
state, or looks at all of them at once, cannot be stepped so. torch's own can.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero.elementwise import is_known, trial
from zero.offload.stepping import States, Stepping


def check_blocks(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step in two calls has other bits than in one.

    Raises:
        ValueError: naming the optimizer.
    """
    if is_known(optimizer):
        return
    group = optimizer.param_groups[0]
    generator = torch.Generator("cpu").manual_seed(0)
    start, *grads = (torch.randn(512, generator=generator, device="cpu") for _ in range(4))
    grads = [grad * (step + 1) for step, grad in enumerate(grads)]
    whole, halves = start.clone(), [half.clone() for half in start.chunk(2)]
    try:
        _step_whole(trial(optimizer, group, [whole]), whole, grads)
        _step_parts(trial(optimizer, group, halves), halves, grads)
        same = torch.equal(whole, torch.cat(halves))
    except Exception as error:
        raise _refusal(optimizer, f"a trial step failed: {error}") from error
    if not same:
        raise _refusal(optimizer, "a trial step in two calls differed from that in one")


def check_states_on_disk(optimizer: Optimizer) -> None:
    """Refuse an optimizer that asks for its states outside a step: they are not there.

    Raises:
        ValueError: it has a mode for evaluation, as schedule-free ones, which would change nothing.
    """
    for name in ("train", "eval"):
        if callable(getattr(optimizer, name, None)):
            raise ValueError(
                f"optimizer {type(optimizer).__name__} has {name}(), which reads states that"
                " offload_optimizer='nvme' keeps on disk; offload_optimizer='cpu' is possible"
            )


def _refusal(optimizer: Optimizer, reason: str) -> ValueError:
    return ValueError(
        f"optimizer {type(optimizer).__name__} cannot be stepped block by block, as"
        f" offload_optimizer does: {reason}"
    )


def _step_whole(probe: Optimizer, whole: Tensor, grads: Sequence[Tensor]) -> None:
    for grad in grads:
        whole.grad = grad.clone()
        type(probe).step(probe)


def _step_parts(probe: Optimizer, parts: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Step each part in a call of its own, and as another tensor in every step."""
    states: list[States] = [{} for _ in parts]
    for grad in grads:
        stepping = Stepping(probe, lambda: type(probe).step(probe))
        for index, (part, given) in enumerate(zip(parts, grad.chunk(len(parts)), strict=True)):
            piece = part.view(-1)
            piece.grad = given.clone()
            (states[index],) = stepping.step([part], [(piece, states[index])])
