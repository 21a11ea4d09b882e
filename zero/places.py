"""Where a model's tensors are: on its device, or offloaded to the host's memory.

The *host* is the memory that the CPU reads. A model on the CPU is there already, and offload to
``"cpu"`` moves nothing of it; the meta device, on which steps are rehearsed, has nothing to move.

A reader must not assume that a copy to the host has ended when it was begun: :class:`Arrivals` says
when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

HOST = torch.device("cpu")


def device_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.device:
    """Return the one device of the parameters that have memory; torch's default where none has.

    Raises:
        ValueError: they are on several, naming one parameter of each.
    """
    found: dict[torch.device, str] = {}
    for name, parameter in parameters:
        if not parameter.is_meta:
            found.setdefault(parameter.device, name)
    if len(found) > 1:
        places = " and ".join(f"{name} on {device}" for device, name in found.items())
        raise ValueError(f"the model has {places}: possible is one device for all parameters")
    return next(iter(found), torch.get_default_device())


def is_away(device: torch.device) -> bool:
    """Tell whether the memory of a device is not the host's."""
    return device.type not in ("cpu", "meta")


def on_host(numel: int, dtype: torch.dtype) -> Tensor:
    """Return host memory, not initialised: pinned where CUDA can copy from and to it."""
    return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=torch.cuda.is_available())


class Arrivals:
    """Copies from a device to the host that were begun, and that nobody has waited for."""

    def __init__(self) -> None:
        self._events: list[torch.Event] = []

    def bring(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to the host; it may be read when :meth:`wait` has returned."""
        brought = on_host(tensor.numel(), tensor.dtype)
        brought.copy_(tensor, non_blocking=True)
        self._events.append(torch.accelerator.current_stream(tensor.device).record_event())
        return brought

    def wait(self) -> None:
        """Wait until everything is there."""
        for event in self._events:
            event.synchronize()
        self._events.clear()


def values_of(scalars: Sequence[Tensor]) -> list[Any]:
    """Return the values of scalars of one device, for which the host waits once."""
    return torch.stack(tuple(scalars)).tolist() if scalars else []
