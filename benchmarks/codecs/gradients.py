"""Gradients as the reduction of ZeRO sees them: of one rank of four, after some steps of the demo.

The model of the demo is trained on one process like the demo trains it: same text, batches, seed,
optimizer and schedule, bfloat16 parameters with float32 masters. Do not assume the bits of the demo
itself, whose ranks sum in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks.launch import UsageError
from benchmarks.training import data
from benchmarks.training.model import GPT, Shape
from benchmarks.training.train import CLIP_NORM, LEARNING_RATE, NUM_SEQUENCES, NUM_WARMUP_STEPS

NUM_RANKS = 4
BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""How a file holds bfloat16, which NumPy does not have: its bits, by that name."""

Gradients = dict[str, torch.Tensor]


def train(
    steps: int,
    *,
    text: data.Text,
    shape: Shape,
    seed: int = 0,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Gradients:
    """Return the gradients of the first rank's share of the batch that follows ``steps`` steps."""
    model = GPT(shape, seed).to(torch.bfloat16)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    size = {"num_sequences": NUM_SEQUENCES, "num_tokens": shape.context}
    for step in range(steps):
        batch = data.batch(text, seed=seed, step=step, **size)
        loss = model(batch.inputs, batch.targets)
        loss.backward()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / NUM_WARMUP_STEPS)
        _step(model, masters, optimizer)
        on_step(step, loss.item())
    own = data.batch(text, seed=seed, step=steps, **size).part(0, NUM_RANKS)
    model(own.inputs, own.targets).backward()
    return {name: _gradient(parameter) for name, parameter in model.named_parameters()}


def _step(model: GPT, masters: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    parameters = list(model.parameters())
    for master, parameter in zip(masters, parameters, strict=True):
        master.grad = _gradient(parameter).float()
    torch.nn.utils.clip_grad_norm_(masters, CLIP_NORM)
    optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.copy_(master)
    model.zero_grad()


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def save(path: Path, gradients: Mapping[str, torch.Tensor]) -> None:
    """Write gradients to a file that :func:`load` reads.

    Raises:
        UsageError: it cannot be written.
    """
    arrays = {name: _to_numpy(gradient) for name, gradient in gradients.items()}
    try:
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise UsageError(f"--save-gradients {path}: {error.strerror}; give a file") from None


def load(path: Path) -> Gradients:
    """Read gradients: a .npz file of arrays of float32, float16 or :data:`BFLOAT16`.

    Raises:
        UsageError: it cannot be read, or holds something else.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            gradients = {name: _to_torch(arrays[name]) for name in arrays.files}
    except OSError as error:
        raise UsageError(f"--gradients {path}: {error.strerror}; give a file") from None
    except Exception as error:  # what zip, zlib and NumPy say of any bytes is no fixed list
        words = " ".join(str(error).split())
        raise UsageError(f"--gradients {path}: no .npz file of gradients ({words})") from None
    if not any(gradient.numel() for gradient in gradients.values()):
        raise UsageError(f"--gradients {path}: there are no gradients in it")
    if len({gradient.dtype for gradient in gradients.values()}) != 1:
        raise UsageError(f"--gradients {path}: its arrays must be of one dtype")
    values = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
    if not (values.isfinite().all() and values.any()):
        raise UsageError(
            f"--gradients {path}: there is no error of values that are not finite, or 0"
        )
    return gradients


def _to_numpy(gradient: torch.Tensor) -> np.ndarray:
    if gradient.dtype == torch.bfloat16:
        return gradient.contiguous().view(torch.uint16).numpy().view(BFLOAT16)
    return gradient.numpy()


def _to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    if array.dtype not in (np.float32, np.float16):
        raise TypeError(f"dtype {array.dtype}")
    return torch.from_numpy(array)
