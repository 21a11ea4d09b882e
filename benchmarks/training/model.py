"""A GPT of about three million parameters over bytes: pre-norm blocks, causal attention, tied head.

Parameters may be bfloat16; arithmetic is at least float32 unless the shape says otherwise, because
most CPUs multiply bfloat16 many times slower. Weights are widened where they are used, in forward
and again in backward: a widened copy that lived from one to the other would be a whole model that
no sharding could free.

A model made under ``torch.device("meta")`` gets its values from ``reset_parameters``: of the same
spread, but drawn by the global generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """Extents of the model. ``width`` is a multiple of ``heads``.

    ``widen``: whether arithmetic is at least float32, or in the dtype of the parameters.
    ``recompute``: whether backward computes the inside of a block again, and forward keeps none.
    """

    context: int = 128
    width: int = 256
    depth: int = 4
    heads: int = 4
    widen: bool = True
    recompute: bool = False


class _WidenedProduct(torch.autograd.Function):
    """x @ weight.T in the dtype of x, saving the weight as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return grad @ weight.to(x.dtype), grad_weight.to(weight.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply (…, in) by a weight (out, in) of any floating dtype."""
    product: Tensor = _WidenedProduct.apply(x, weight)  # type: ignore[no-untyped-call]
    return product


def drawn(*shape: int, random: torch.Generator) -> Tensor:
    """Draw a normal matrix; on the meta device there is nothing to draw."""
    on_meta = torch.get_default_device().type == "meta"
    return torch.empty(*shape) if on_meta else torch.randn(*shape, generator=random)


class Linear(nn.Module):
    """A linear layer without bias, whose weight has standard deviation ``std``."""

    def __init__(self, num_in: int, num_out: int, std: float, random: torch.Generator) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(drawn(num_out, num_in, random=random) * std)

    def reset_parameters(self) -> None:
        """Draw the weight of a meta model."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Norm(nn.Module):
    """Layer normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def reset_parameters(self) -> None:
        """Set the values of a meta model."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(
            x, x.shape[-1:], self.weight.to(x.dtype), self.bias.to(x.dtype)
        )


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to its input."""

    def __init__(self, shape: Shape, random: torch.Generator) -> None:
        super().__init__()
        width, std = shape.width, 0.02
        # Residual branches add up: each is made smaller by the root of their number.
        std_branch = std / (2 * shape.depth) ** 0.5
        self.heads = shape.heads
        self.norm_attention = Norm(width)
        self.query_key_value = Linear(width, 3 * width, std, random)
        self.attention_out = Linear(width, width, std_branch, random)
        self.norm_perceptron = Norm(width)
        self.perceptron_in = Linear(width, 4 * width, std, random)
        self.perceptron_out = Linear(4 * width, width, std_branch, random)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm_attention(x))
        hidden = functional.gelu(self.perceptron_in(self.norm_perceptron(x)))
        result: Tensor = x + self.perceptron_out(hidden)
        return result

    def _attend(self, x: Tensor) -> Tensor:
        split = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.movedim(-3, 0).transpose(-3, -2)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.attention_out(attended.transpose(-3, -2).flatten(-2))
        return result


class GPT(nn.Module):
    """The model; called with tokens and those that follow, it returns the mean loss in nats."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator("cpu").manual_seed(seed)
        embeddings = drawn(VOCABULARY + shape.context, shape.width, random=random) * 0.02
        self.token = nn.Parameter(embeddings[:VOCABULARY].clone())
        self.position = nn.Parameter(embeddings[VOCABULARY:].clone())
        self.blocks = nn.ModuleList(Block(shape, random) for _ in range(shape.depth))
        self.norm = Norm(shape.width)
        self.widen = shape.widen
        self.recompute = shape.recompute

    def reset_parameters(self) -> None:
        """Draw the embeddings of a meta model."""
        nn.init.normal_(self.token, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(self.token.dtype, torch.float32)
        dtype = wide if self.widen else self.token.dtype
        positions = self.position.to(dtype)[: inputs.shape[1]]
        x = functional.embedding(inputs, self.token.to(dtype)) + positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = linear(self.norm(x), self.token).to(wide)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
