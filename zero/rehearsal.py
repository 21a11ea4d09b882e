"""A training step on one rank of a job that does not exist: what zero issues, and in which order.

The parts of zero that gather, reduce and publish run as they are, with tensors that have no memory
(torch's meta device) and with a communicator that makes the plan of every operation and executes
none. So a *script* is not a second description of zero's schedule: it is a record of it.

Only what needs values is left out: computing, the codecs, and the residuals of ``grads_feedback``.
A reader must not assume that a script holds seconds; :mod:`zero.simulate` gives it a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from topology import Topology
from zcomm import Communicator
from zcomm.hops import CodecSpec
from zcomm.layout import Layout
from zcomm.plan import Plan
from zcomm.planner import Planner
from zcomm.tuning import Tuning
from zero.algorithms import Algorithms
from zero.config import Config
from zero.engine import Engine
from zero.hops import TwoHops
from zero.layout import BufferLayout, UnitModules, lay_out
from zero.secondary import Secondary, groups_of
from zero.shard import assemble, make_unit, without_differences
from zero.unit import Buffer, Unit


@dataclass(frozen=True, eq=False)
class Operation:
    """One collective: its plan, and this rank's number in the communicator that it runs in."""

    plan: Plan
    rank: int


@dataclass(frozen=True, eq=False)
class Values:
    """Control values that every rank sends to every other: ``nbytes`` to each."""

    topology: Topology
    rank: int
    nbytes: int


@dataclass(frozen=True)
class Issue:
    """An operation begins, behind those that were issued before."""

    operation: Operation | Values


@dataclass(frozen=True)
class Wait:
    """Nothing goes on until an operation has ended."""

    operation: Operation | Values


@dataclass(frozen=True)
class Compute:
    """A unit's forward or backward."""

    unit: int
    backward: bool


Event = Issue | Wait | Compute
Script = list[Event]


class _Rehearsed:
    """The Work of an operation that is not executed."""

    def __init__(self, script: Script, operation: Operation | Values | None) -> None:
        self._script = script
        self._operation = operation

    def wait(self) -> None:
        """Note that somebody waits here."""
        if self._operation is not None:
            self._script.append(Wait(self._operation))


class _Stage:
    """Stands for a Communicator: plans what it is asked for, and writes it to a script.

    ``divisions`` are, for every communicator that is split off, in the order of the splits, the
    groups of ranks: no other rank is there to say its colour.
    """

    def __init__(
        self,
        script: Script,
        rank: int,
        tuning: Tuning,
        divisions: Sequence[Sequence[tuple[int, ...]]] = (),
    ) -> None:
        self._script = script
        self._planner = Planner("rehearsal", rank, tuning)
        self._divisions = list(divisions)
        self.rank = rank
        self.topology = tuning.topology
        self.size = tuning.topology.size

    def split(self, color: int, key: int) -> _Stage:
        """Return the communicator of this rank's group in the next division."""
        ranks = self._divisions.pop(0)[color]
        assert ranks[key] == self.rank
        within = self._planner.tuning.restrict(self.topology.restrict(ranks))
        return _Stage(self._script, key, within)

    def broadcast(self, x: object) -> None:
        """Do nothing: models are broadcast when they are sharded, in no step."""

    def enqueue(self, function: Callable[[], None], arrays: object = ()) -> _Rehearsed:
        """Do nothing: work between operations, on values that are not there."""
        return _Rehearsed(self._script, None)

    def all_gather_values(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what comes back when all ranks have the same values."""
        self._note(Values(self.topology, self.rank, values.nbytes), async_op=False)
        return np.stack([values] * self.size)

    def gather_layout(
        self,
        shards: Sequence[object],
        fulls: Sequence[object],
        layouts: Sequence[Layout],
        *,
        codec: CodecSpec = None,
        algorithm: str = "auto",
        min_numel: int = 0,
        async_op: bool = False,
        **unused: object,
    ) -> _Rehearsed:
        """Plan what :meth:`zcomm.Communicator.gather_layout` would execute."""
        codecs = self._planner.codecs("all_gather", codec, layouts, min_numel)
        made = self._planner.plan("all_gather", layouts, codecs, algorithm)
        return self._note(Operation(made, self.rank), async_op=async_op)

    def reduce_layout(
        self,
        fulls: Sequence[object],
        shards: Sequence[object],
        layouts: Sequence[Layout],
        *,
        op: str = "avg",
        codec: CodecSpec = None,
        algorithm: str = "auto",
        reduce_dtype: str | None = None,
        min_numel: int = 0,
        async_op: bool = False,
        **unused: object,
    ) -> _Rehearsed:
        """Plan what :meth:`zcomm.Communicator.reduce_layout` would execute."""
        codecs = self._planner.codecs("reduce_scatter", codec, layouts, min_numel, op)
        made = self._planner.plan("reduce_scatter", layouts, codecs, algorithm, op, reduce_dtype)
        return self._note(Operation(made, self.rank), async_op=async_op)

    def reduction_algorithm(
        self,
        layouts: Sequence[Layout],
        *,
        codec: CodecSpec = None,
        reduce_dtype: str | None = None,
        op: str = "avg",
    ) -> str:
        """See :meth:`zcomm.Communicator.reduction_algorithm`."""
        return self._planner.reduction_algorithm(layouts, codec, op, reduce_dtype)

    def _note(self, operation: Operation | Values, *, async_op: bool) -> _Rehearsed:
        self._script.append(Issue(operation))
        work = _Rehearsed(self._script, operation)
        if not async_op:
            work.wait()
        return work


class _WithoutResiduals(TwoHops):
    """Residuals are values, and travel nowhere."""

    def _feed_back(self, *unused: object) -> None:
        pass


class _WithoutCodes(Secondary):
    """Codes are values; their number follows from the layouts."""

    def _decode(self, *unused: object) -> None:
        pass


def rehearse(
    units: Sequence[UnitModules],
    config: Config,
    tuning: Tuning,
    *,
    rank: int = 0,
    micro: int = 1,
) -> Script:
    """Return what one rank does in a training step that is not the first.

    Args:
        units: of any model, see :func:`zero.layout.find_units`; parameters are read for their
            shapes and dtypes only. Units are called in their order, the root around them.
        config: of any stage; offload changes nothing that ranks send, and is not in it.
        tuning: the job's topology, and what ``algorithm="auto"`` follows.
        rank: whose step it is.
        micro: forwards and backwards before the optimizer's step.

    Raises:
        ValueError: a configuration that does not fit the topology.
    """
    script: Script = []
    with torch.device("meta"):
        engine = _engine(script, units, config, tuning, rank)
        for _ in range(2):  # the first step has no gathers ahead, and fills what is persistent
            script.clear()
            for _ in range(micro):
                _forward(engine, script)
                _backward(engine, script)
            _step(engine)
    return script


def _engine(
    script: Script, given: Sequence[UnitModules], config: Config, tuning: Tuning, rank: int
) -> Engine:
    comm = cast(Communicator, _Stage(script, rank, tuning, _divisions(config, tuning.topology)))
    config = without_differences(config, comm)
    found = _on_meta(given)
    layouts = _lay_out_all(found, tuning.topology, config.piece_numel)
    units = tuple(
        make_unit(number, unit, layouts[number], comm, config) for number, unit in enumerate(found)
    )
    engine = assemble(comm, config, units)
    if engine.reducer.hops is not None:
        groups = groups_of(comm.topology, "node")
        engine.reducer.hops = _WithoutResiduals(comm, config, groups, Algorithms())
    if engine.gathering.secondary is not None and config.secondary_codec is not None:
        assert config.secondary is not None
        engine.gathering.secondary = _WithoutCodes(
            comm, config.secondary, config.weights_codec, codes=True, seed=config.seed
        )
    for unit in units if config.stage == 3 else ():
        engine.gathering.begin(unit)
    return engine


def _lay_out_all(
    found: Sequence[UnitModules], topology: Topology, piece: int
) -> list[tuple[BufferLayout, ...]]:
    """Lay out all units; those whose parameters have the same names and shapes share a layout."""
    owners = topology.ownership()
    known: dict[object, tuple[BufferLayout, ...]] = {}
    layouts = []
    for unit in found:
        key = tuple(
            (name, p.shape, p.stride(), p.dtype, p.requires_grad) for name, p in unit.parameters
        )
        if key not in known:
            trained = {p for _, p in unit.parameters if p.requires_grad}
            known[key] = lay_out(unit.parameters, owners, piece, trained)
        layouts.append(known[key])
    return layouts


def _divisions(config: Config, topology: Topology) -> list[Sequence[tuple[int, ...]]]:
    """Return the groups that zero splits ranks into: nodes or secondary groups, then their rails.

    They are listed as often as they may be split off: by the secondary, twice by the reducer, and
    by the secondary without codes.
    """
    found: list[Sequence[tuple[int, ...]]] = []
    if config.secondary is not None:
        persistent = config.secondary == "persistent"
        found += _with_rails(groups_of(topology, "node" if persistent else config.secondary))
        if persistent and len(groups_of(topology, "node")) == 1:
            found.clear()
    if config.accumulate == "node" or config.grads_feedback:
        found += _with_rails(groups_of(topology, "node")) * 2
    if config.secondary is not None and config.secondary_codec is not None:
        found += _with_rails(groups_of(topology, config.secondary))
    return found


def _with_rails(groups: Sequence[tuple[int, ...]]) -> list[Sequence[tuple[int, ...]]]:
    return [groups, list(zip(*groups, strict=True))]


def _on_meta(found: Sequence[UnitModules]) -> tuple[UnitModules, ...]:
    """Return units with parameters of the same shapes and no memory, on modules of their own."""
    copies: dict[nn.Parameter, nn.Parameter] = {}
    made = []
    for unit in found:
        for _, parameter in unit.parameters:
            like = torch.empty_like(parameter, device="meta")
            copies[parameter] = nn.Parameter(like, requires_grad=parameter.requires_grad)
        parameters = tuple((name, copies[p]) for name, p in unit.parameters)
        made.append(UnitModules(unit.name, nn.Module(), parameters))
    return tuple(made)


def _forward(engine: Engine, script: Script) -> None:
    *inner, root = engine.units
    gathering = engine.gathering
    gathering.gather(root)
    for unit in inner:
        gathering.gather(unit)
        script.append(Compute(unit.number, backward=False))
        gathering.reshard(unit)
        gathering.look_ahead()
    script.append(Compute(root.number, backward=False))
    gathering.reshard(root)
    gathering.look_ahead()


def _backward(engine: Engine, script: Script) -> None:
    """Reshard and reduce a unit when the backward of the next begins, the root at the end."""
    *inner, root = engine.units
    engine.gathering.gather(root, backward=True)
    engine.reducer.begin()
    script.append(Compute(root.number, backward=True))
    before: Unit | None = None
    _collect(engine, root)
    for unit in reversed(inner):
        _end(engine, before)
        engine.gathering.gather(unit, backward=True)
        script.append(Compute(unit.number, backward=True))
        _collect(engine, unit)
        before = unit
    _end(engine, before)
    _end(engine, root)
    engine.reducer.settle()


def _collect(engine: Engine, unit: Unit) -> None:
    for buffer in unit.trainable:
        for index, slot in enumerate(buffer.layout.slots):
            if slot.trainable:
                parameter = buffer.parameters[index]
                parameter.grad = torch.empty_like(parameter)
                engine.reducer.collect(buffer, index)


def _end(engine: Engine, unit: Unit | None) -> None:
    if unit is not None:
        engine.gathering.reshard(unit)
        engine.reducer.reduce(unit)


def _step(engine: Engine) -> None:
    """Do what :class:`zero.optimizer.Stepper` does around a step; there are no values."""
    engine.gathering.forget_ahead()
    engine.gathering.stepped()
    engine.reducer.round()
    engine.comm.all_gather_values(np.ones(1, np.float64))
    if engine.config.stage == 0:
        engine.stepper.gather_gradients()
    engine.reducer.stepped()
    for unit in engine.units:
        engine.publisher.publish(unit)
    engine.reducer.clear()
    for unit in engine.units:
        for buffer in unit.buffers:
            _forget_gradients(buffer)


def _forget_gradients(buffer: Buffer) -> None:
    for master in buffer.masters:
        master.tensor.grad = None
