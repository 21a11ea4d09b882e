"""What belongs to one sharded model and its optimizer, and how to find it from either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from zcomm import Communicator
from zero.config import Config
from zero.gather import Gathering
from zero.offload.drive import Faults
from zero.offload.engine import Offload
from zero.optimizer import Stepper
from zero.publish import Publisher
from zero.reduce import Reducer
from zero.schedule import Schedule
from zero.unit import Unit

_ATTRIBUTE = "_zero_engine"


class StateProvider(Protocol):
    """What bits depend on beside parameters and the optimizer's states, of one rank.

    Checkpoints hold it under the name that it has in ``Engine.providers``.
    """

    def save_state(self) -> Mapping[str, Any]:
        """Return tensors and plain values; the tensors are copied by the caller."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what this rank saved, with the same ranks, topology and plan."""

    def load_foreign(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Start from a checkpoint of other ranks or another plan.

        Args:
            states: the plain values of all ranks that saved; no tensors.

        Raises:
            CheckpointError: where what was saved cannot be had here, and bits would be lost.
        """


@dataclass(frozen=True, eq=False)
class Engine:
    """The parts that :func:`zero.shard` put together; ``units`` are in the model's order.

    ``providers`` hold, by name, further states that checkpoints save; ``offload`` what is not in
    memory, None where everything is.
    """

    comm: Communicator
    config: Config
    units: tuple[Unit, ...]
    gathering: Gathering
    reducer: Reducer
    publisher: Publisher
    stepper: Stepper
    schedule: Schedule
    offload: Offload | None = None
    providers: dict[str, StateProvider] = field(default_factory=dict)

    @property
    def faults(self) -> Faults | None:
        """What made it unusable; None where nothing is offloaded."""
        return None if self.offload is None else self.offload.faults

    def __deepcopy__(self, memo: object) -> Engine:
        raise TypeError("a sharded model cannot be copied: copy it before zero.shard")


def remember(engine: Engine, *owners: nn.Module | Optimizer) -> None:
    """Let a model or optimizer be known as sharded by ``engine``."""
    for owner in owners:
        owner.__dict__[_ATTRIBUTE] = engine


def is_sharded(owner: nn.Module | Optimizer) -> bool:
    """Tell whether a model or optimizer was sharded."""
    return _ATTRIBUTE in owner.__dict__


def engine_of(owner: nn.Module | Optimizer) -> Engine:
    """Return the engine of a sharded model or optimizer.

    Raises:
        ValueError: for anything that :func:`zero.shard` did not return.
        OffloadError: states were lost, see :class:`~zero.offload.drive.Faults`.
    """
    engine = getattr(owner, "__dict__", {}).get(_ATTRIBUTE)
    if not isinstance(engine, Engine):
        raise ValueError(f"{type(owner).__name__} was not returned by zero.shard")
    if engine.offload is not None:
        engine.offload.faults.check()
    return engine


def engine_of_both(model: nn.Module, optimizer: Optimizer) -> Engine:
    """Return the engine of a model and the optimizer that was sharded with it.

    Raises:
        ValueError: they were not.
    """
    engine = engine_of(model)
    if engine_of(optimizer) is not engine:
        raise ValueError("the model and the optimizer were not sharded together")
    return engine
