"""Models whose parameters are split over other ranks too, as DTensor: tensor parallelism × ZeRO.

The communicator given to ``zero.shard`` holds the ranks of one position in the tensor-parallel
mesh; they share the same local parts. zero shards those parts: each DTensor parameter is replaced
by a plain one, its local part, and while its module runs the module sees a DTensor made of it. The
gradient of the local part is what DTensor's backward gives, reduced where the mesh says so.

A reader must not assume that these parameters keep their identity or shape: ``parameters()``,
``full_params``, checkpoints and state dicts show local parts. Everything else keeps both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """The mesh over which parameters are split, and how each lies on it.

    A part that several ranks of the mesh hold counts on the first of them, whose coordinates are 0
    wherever the parameter is not split.

    Attributes:
        mesh: of any number of dimensions.
        split: by the id of a parameter, the dimensions over which it is split.
    """

    mesh: DeviceMesh
    split: Mapping[int, frozenset[int]]

    def is_split(self, parameter: nn.Parameter) -> bool:
        """Tell whether ranks of the mesh hold different parts of a parameter."""
        return bool(self.split.get(id(parameter)))

    def counts(self, parameter: nn.Parameter) -> bool:
        """Tell whether this rank's part of a parameter counts in sums over the mesh."""
        where: Sequence[int] = self.mesh.get_coordinate() or ()
        over = self.split.get(id(parameter), frozenset())
        return all(place == 0 for dim, place in enumerate(where) if dim not in over)

    def total(self, of_split: float, of_whole: float) -> float:
        """Return the sum over the mesh; the same bits on all its ranks."""
        import torch.distributed as dist

        kind = self.mesh.device_type
        mine = torch.tensor([of_split, of_whole], dtype=torch.float64, device=kind)
        for dim in reversed(range(self.mesh.ndim)):
            rows = [torch.empty_like(mine) for _ in range(self.mesh.size(dim))]
            dist.all_gather(rows, mine, group=self.mesh.get_group(dim))
            # Ascending, which torch's sum does not promise.
            for row in rows[1:]:
                rows[0] += row
            mine = rows[0]
        return float(mine[0]) + float(mine[1])


def is_distributed(tensor: Tensor) -> bool:
    """Tell whether a tensor is a DTensor; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def use_local_parts(model: nn.Module, optimizer: Optimizer) -> TensorParallel | None:
    """Replace the DTensor parameters of a model and its optimizer by their local parts.

    Returns:
        The mesh; None where no parameter is a DTensor.

    Raises:
        ValueError: several meshes, or partial sums as parameters.
    """
    local: dict[int, nn.Parameter] = {}
    found: list[DTensor] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and is_distributed(parameter):
                if id(parameter) not in local:
                    found.append(parameter)  # type: ignore[arg-type]
                    part = parameter.to_local().detach()  # type: ignore[attr-defined]
                    local[id(parameter)] = nn.Parameter(part, parameter.requires_grad)
                module._parameters[name] = local[id(parameter)]
                _show_distributed(module, name, parameter)  # type: ignore[arg-type]
    if not found:
        return None
    _check(found)
    for group in optimizer.param_groups:
        group["params"] = [_replaced(optimizer, p, local) for p in group["params"]]
    split = {
        id(local[id(p)]): frozenset(d for d, place in enumerate(p.placements) if place.is_shard())
        for p in found
    }
    return TensorParallel(found[0].device_mesh, split)


def _check(found: list[DTensor]) -> None:
    mesh = found[0].device_mesh
    for parameter in found:
        if parameter.device_mesh != mesh:
            raise ValueError(
                f"parameters are DTensors over {mesh} and over {parameter.device_mesh}: zero works"
                " beside one mesh; where a parameter has fewer dimensions, replicate it over the"
                " others"
            )
        if any(place.is_partial() for place in parameter.placements):
            raise ValueError(f"a parameter has the placements {parameter.placements}: partial sums")


def _replaced(
    optimizer: Optimizer, parameter: nn.Parameter, local: dict[int, nn.Parameter]
) -> nn.Parameter:
    if id(parameter) not in local:
        return parameter
    state = optimizer.state.pop(parameter, None)
    if state:
        optimizer.state[local[id(parameter)]] = {
            key: value.to_local() if is_distributed(value) else value
            for key, value in state.items()
        }
    return local[id(parameter)]


def _show_distributed(module: nn.Module, name: str, parameter: DTensor) -> None:
    """Let a module find, while it runs, a DTensor under the name of its parameter."""
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()

    def show(module: nn.Module, args: Any) -> None:
        part = module._parameters[name]
        assert part is not None
        # An attribute of the instance is found before an entry of _parameters.
        module.__dict__[name] = DTensor.from_local(
            part, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def hide(module: nn.Module, args: Any, output: Any) -> None:
        module.__dict__.pop(name, None)

    module.register_forward_pre_hook(show)
    module.register_forward_hook(hide, always_call=True)


def pack_distributed(tensor: Tensor, pack: Callable[[Tensor], Any]) -> tuple[Any, Any]:
    """Return what ``pack`` makes of a DTensor's local part, and how to make a DTensor again."""
    return pack(tensor._local_tensor), tensor._spec  # type: ignore[attr-defined]


def unpack_distributed(local: Tensor, spec: Any) -> Tensor:
    """Undo :func:`pack_distributed`."""
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made
