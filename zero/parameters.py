"""A parameter between gathers: it answers for its shape, and refuses to be read.

``zero`` keeps the identity of parameters. While a parameter of stage 3 is sharded, its class is
``ShardedParameter`` and its memory a single NaN, seen in the parameter's shape; whatever would read
or write values raises an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zcomm import ZcommError

_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_leaf",
    "grad",
    "grad_fn",
    "grad_dtype",
    "itemsize",
    "nbytes",
    "is_sparse",
    "is_quantized",
    "is_meta",
    "is_cuda",
    "is_cpu",
    "is_nested",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
_METHODS = (
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_inference",
    "get_device",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "__len__",
    "__hash__",
)
_ALLOWED = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad", "grad_dtype")),
        vars(torch._C.TensorBase)["grad"].__delete__,
        *(getattr(Tensor, name) for name in _METHODS),
    ]
)


class ShardedParameterError(ZcommError):
    """A parameter was read while its values are spread over the ranks."""


class ShardedParameter(nn.Parameter):
    """A parameter of stage 3 while it is sharded; ``zero_name`` is its name in the model."""

    zero_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer questions about shape, dtype and gradient; refuse everything else.

        Raises:
            ShardedParameterError: naming the first sharded parameter among the arguments.
        """
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next(_names((args, kwargs)), "?")
        raise ShardedParameterError(
            f"parameter {name} is sharded (ZeRO stage 3): {getattr(func, '__name__', func)} cannot"
            " read it here; it is whole in the forward and backward of the module that it is"
            " gathered with, and inside `with zero.full_params(model):`"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedParameter({self.zero_name}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        return self.clone()  # type: ignore[return-value]  # raises the error that names it


def _names(value: object) -> Any:
    if isinstance(value, ShardedParameter):
        yield value.zero_name
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _names(entry)
    elif isinstance(value, dict):
        yield from _names(list(value.values()))


def hide(parameter: nn.Parameter, name: str, placeholder: Tensor) -> None:
    """Let go of a parameter's memory and refuse access until :func:`show`.

    Args:
        parameter: keeps its identity, shape and dtype.
        name: of the parameter in the model, for errors.
        placeholder: a scalar, which the parameter shows in its shape should C++ code get to it.
    """
    parameter.data = placeholder.expand(parameter.shape)
    parameter.__class__ = ShardedParameter
    parameter.__dict__["zero_name"] = name


def show(parameter: nn.Parameter, kind: type[nn.Parameter], data: Tensor) -> None:
    """Give a parameter its class and memory."""
    parameter.__class__ = kind
    parameter.data = data
