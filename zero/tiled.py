"""A linear operator in tiles that are whole one after the other: memory-centric tiling.

ZeRO-Infinity (arXiv 2104.07857, section 5.1.3). The weight (out, in) is cut into ``out_splits`` ×
``in_splits`` tiles, of which each is a unit of its own: it is gathered for its product, let go
of, and its gradient is reduced before the next one's is there. What one operator needs at a time is
a tile, not the weight.

Sizes are even up to one: of 10 outputs in 4 splits, 3, 3, 2 and 2. Tile ``i * in_splits + j`` has
the rows of outputs i and the columns of inputs j.

Which bits are equal:

- weights: the same draws as ``nn.Linear``, in the same order, on the CPU.
- ``in_splits=1``: an output is one dot product, as in ``nn.Linear``. The bits are those of
  ``nn.Linear`` where the BLAS adds in an order that does not depend on the number of outputs.
- otherwise, and for the gradient of the input with ``out_splits > 1``: partial sums are added, in
  ascending order of inputs. Two orders of K products differ by at most 2γ(K) Σ|x||w|, with
  γ(K) = Ku / (1 - Ku). Partial sums of 16 bits are added in float32; each was rounded once.

A reader must not assume that one tile has ``nn.Linear``'s statistics: initialisers that look at a
tile's shape (xavier, kaiming) see that of the tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

_SCRATCH_NUMEL = 1 << 20


class _CastProduct(torch.autograd.Function):
    """x @ weight.T + bias in the dtype of x; saves the weight as it is, and casts it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        cast = None if bias is None else bias.to(x.dtype)
        return functional.linear(x, weight.to(x.dtype), cast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (rows @ weight.to(grad.dtype)).view(x.shape)
        if ctx.needs_input_grad[1]:
            of_weight = (rows.T @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).to(ctx.bias_dtype)
        return of_x, of_weight, of_bias


class Tile(nn.Linear):
    """Some rows and columns of a :class:`TiledLinear`: a linear layer that is a unit of its own.

    Attributes:
        columns: of the whole weight.
        in_total: the columns that the whole weight has.
    """

    zero_unit = True

    def __init__(
        self, rows: int, columns: slice, in_total: int, first: Tile | None, **factory: Any
    ) -> None:
        self.columns = columns
        self.in_total = in_total
        self._first = (first,)  # in a tuple, so that it is no child
        self._drawn_from: Tensor | None = None
        super().__init__(columns.stop - columns.start, rows, bias=False, **factory)

    def reset_parameters(self) -> None:
        """Draw the tile's part of what ``nn.Linear`` draws for the whole weight.

        The rows of tiles beside each other are drawn together; the first notes the state of the
        generator, from which the others draw the same again.
        """
        if self.weight.is_meta:
            return
        (first,) = self._first
        if first is not None:
            assert first._drawn_from is not None
            torch.set_rng_state(first._drawn_from)
        elif self.columns.stop < self.in_total:
            self._drawn_from = torch.get_rng_state()
        for start, band in self._bands():
            nn.init.kaiming_uniform_(band, a=math.sqrt(5))
            with torch.no_grad():
                self.weight[start : start + len(band)] = band[:, self.columns]

    def _bands(self) -> Iterator[tuple[int, Tensor]]:
        """Yield memory for a few whole rows at a time, and the number of the first of them."""
        height = max(1, _SCRATCH_NUMEL // self.in_total)
        for start in range(0, self.out_features, height):
            num_rows = min(height, self.out_features - start)
            yield start, self.weight.new_empty(num_rows, self.in_total, requires_grad=False)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias in the dtype of x; the bias is of the tile's rows."""
        if x.dtype == self.weight.dtype:
            return functional.linear(x, self.weight, bias)
        product: Tensor = _CastProduct.apply(x, self.weight, bias)  # type: ignore[no-untyped-call]
        return product


class TiledLinear(nn.Module):
    """``nn.Linear`` whose weight is whole a tile at a time (ZeRO-Infinity, section 5.1.3).

    Under ``zero.shard`` with stage 3 one tile is whole at a time, forward and backward, and
    ``Config(prefetch=)`` more. Activation checkpointing gathers tiles once more, to recompute.

    Parameters are ``tiles.N.weight``, and ``bias``, which is in the unit around. The state dict of
    an ``nn.Linear`` (``weight``, ``bias``) can be loaded too, also by ``zero.load_pretrained``;
    :func:`merge_tiles` makes one.
    Weights of another dtype than the input are cast for each product, forward and backward: under
    autocast no cast copy of them is kept.

    Args:
        in_features: of the input's last dimension.
        out_features: of the output's.
        bias: whether something is added.
        device: as of ``nn.Linear``; ``"meta"`` for a model that ``zero.shard`` gives memory.
        dtype: of the parameters.
        in_splits: parts of the inputs, whose products are added.
        out_splits: parts of the outputs.

    Raises:
        TypeError: a number of splits that is no integer.
        ValueError: fewer than one split, or more than there are features.

    Example:
        >>> huge = zero.TiledLinear(4096, 65536, out_splits=16)
        >>> model, optimizer = zero.shard(model, optimizer, zero.Config(stage=3), comm=comm)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        in_splits: int = 1,
        out_splits: int = 1,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.in_sizes = _sizes("in", in_features, in_splits)
        self.out_sizes = _sizes("out", out_features, out_splits)
        self.tiles = nn.ModuleList(self._make_tiles(device=device, dtype=dtype))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_split_weight)  # type: ignore[no-untyped-call]

    def _make_tiles(self, **factory: Any) -> Iterator[Tile]:
        for rows in self.out_sizes:
            first: Tile | None = None
            for columns in _slices(self.in_sizes):
                tile = Tile(rows, columns, self.in_features, first, **factory)
                first = first or tile
                yield tile

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, in_splits: int = 1, out_splits: int = 1
    ) -> TiledLinear:
        """Return the tiles of a layer: values are copied, ``requires_grad`` is kept."""
        weight, bias = linear.weight, linear.bias
        made = cls(
            linear.in_features,
            linear.out_features,
            bias is not None,
            "meta",
            weight.dtype,
            in_splits=in_splits,
            out_splits=out_splits,
        )
        for tile, part in zip(made.tiles, made.parts(weight.detach()), strict=True):
            tile.weight = nn.Parameter(part.clone(), weight.requires_grad)
        if bias is not None:
            made.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
        return made.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """Return ``nn.Linear`` with copies of the values; while sharded inside ``full_params``."""
        weight = _merge([tile.weight.detach() for tile in self._tiles()], len(self.in_sizes))
        bias = self.bias
        linear = nn.Linear(self.in_features, self.out_features, bias is not None, "meta")
        linear.weight = nn.Parameter(weight, self._tiles()[0].weight.requires_grad)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
        return linear.train(self.training)

    def _tiles(self) -> list[Tile]:
        return [tile for tile in self.tiles if isinstance(tile, Tile)]

    def parts(self, weight: Tensor) -> Iterator[Tensor]:
        """Yield the views of a whole weight that the tiles hold, in their order."""
        for place in self.places():
            yield weight[place]

    def places(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of the whole weight that the tiles hold, in their order."""
        for rows in _slices(self.out_sizes):
            for columns in _slices(self.in_sizes):
                yield rows, columns

    def reset_parameters(self) -> None:
        """Draw the bias as ``nn.Linear`` does: after the weight, which the tiles draw."""
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, out_features) of (…, in_features)."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            # Autocast would keep a cast copy of every weight until its context ends, and for
            # backward: memory that no sharding could free.
            dtype = torch.get_autocast_dtype(kind)
            with torch.autocast(kind, enabled=False):
                return self._multiply(x.to(dtype))
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        num_in = len(self.in_sizes)
        inputs = torch.split(x, self.in_sizes, -1) if num_in > 1 else (x,)
        nothing: Sequence[Tensor | None] = [None] * len(self.out_sizes)
        biases = nothing if self.bias is None else torch.split(self.bias, self.out_sizes)
        outputs = [
            _add_up(self.tiles[i * num_in : (i + 1) * num_in], inputs, bias)
            for i, bias in enumerate(biases)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def extra_repr(self) -> str:
        """Say the sizes, as ``nn.Linear`` does."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias is not None}, in_splits={len(self.in_sizes)},"
            f" out_splits={len(self.out_sizes)}"
        )


def merge_tiles(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with the names of a model whose tiled layers are ``nn.Linear``.

    Args:
        model: has the TiledLinear modules.
        state: ``model.state_dict()``, or what :func:`zero.full_state_dict` returns; {} stays {}.

    Raises:
        ValueError: the state has a layer in part.
    """
    merged = dict(state)
    for name, module in model.named_modules():
        if not isinstance(module, TiledLinear) or not state:
            continue
        prefix = f"{name}." if name else ""
        keys = [f"{prefix}tiles.{number}.weight" for number in range(len(module.tiles))]
        missing = [key for key in keys if key not in merged]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(keys)} tiles of {name or 'the model'} are missing: "
                + ", ".join(missing[:4])
            )
        parts = [merged.pop(key) for key in keys]
        merged[f"{prefix}weight"] = _merge(parts, len(module.in_sizes))
    return merged


def _add_up(tiles: Iterable[nn.Module], inputs: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Return the sum of the tiles' products with their inputs, in ascending order."""
    dtype = inputs[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    total: Tensor | None = None
    for tile, x in zip(tiles, inputs, strict=True):
        if total is None:
            total = tile(x, bias)
        else:
            total = total.to(wide) + tile(x)
    assert total is not None
    return total.to(dtype)


def _merge(parts: Sequence[Tensor], num_in: int) -> Tensor:
    rows = [torch.cat(list(parts[i : i + num_in]), 1) for i in range(0, len(parts), num_in)]
    return torch.cat(rows)


def _sizes(what: str, features: int, splits: int) -> list[int]:
    if type(splits) is not int:
        raise TypeError(f"{what}_splits {splits!r}: an integer is expected")
    if not 1 <= splits <= features:
        raise ValueError(
            f"{what}_splits {splits} of {features} {what}_features: possible are 1 to {features}"
        )
    each, more = divmod(features, splits)
    return [each + (number < more) for number in range(splits)]


def _slices(sizes: Sequence[int]) -> Iterator[slice]:
    for stop, size in zip(accumulate(sizes), sizes, strict=True):
        yield slice(stop - size, stop)


def _split_weight(module: TiledLinear, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
    """Take the weight of an ``nn.Linear`` apart, where a state dict has one."""
    weight = state.pop(f"{prefix}weight", None)
    if weight is None:
        return
    wanted = module.out_features, module.in_features
    if tuple(weight.shape) != wanted:
        *_, errors = arguments
        errors.append(f"{prefix}weight has shape {list(weight.shape)}, expected {list(wanted)}")
        return
    for number, part in enumerate(module.parts(weight)):
        state[f"{prefix}tiles.{number}.weight"] = part
