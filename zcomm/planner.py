"""From the arguments of a call to its plan, made once and said once.

A planner belongs to one communicator. It decides whether a codec applies, keeps the plans that were
made, puts a call into words for the guard, and logs what a user should know: which algorithm runs,
and which setting could not be honoured.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

from zcomm.arrays import FLOATING
from zcomm.codecs import Codec
from zcomm.hops import (
    CodecSpec,
    candidates,
    check_codecs,
    make,
    make_all_reduce,
    parse_codecs,
)
from zcomm.layout import Layout
from zcomm.plan import AllReduce, Plan
from zcomm.tuning import Tuning

logger = logging.getLogger("zcomm")

MOST = 1024
"""Plans that a communicator keeps; all are forgotten when there are more, and made again alike."""

AnyPlan = TypeVar("AnyPlan", Plan, AllReduce)


class Planner:
    """Makes the plans of one communicator."""

    def __init__(self, name: str, rank: int, tuning: Tuning) -> None:
        self.tuning = tuning
        self._name = name
        self._rank = rank
        self._topology = tuning.topology
        self._plans: dict[object, Plan] = {}
        self._all_reduces: dict[object, AllReduce] = {}
        self._said: set[object] = set()

    def codecs(
        self,
        operation: str,
        spec: CodecSpec,
        layouts: Sequence[Layout],
        min_numel: int,
        op: str = "sum",
    ) -> tuple[Codec | None, ...]:
        """Return the codecs to use, one per level; all None where the message is too small.

        Raises:
            ValueError: a codec for layouts none of which is floating point, or too few or many.
        """
        codecs = parse_codecs(spec, len(self._topology.levels))
        if not any(codecs):
            return codecs
        check_codecs(operation, codecs, self._topology, op)
        dtypes = [layout.dtype for layout in layouts]
        if dtypes and not FLOATING.intersection(dtypes):
            raise ValueError(
                f"{operation} of {', '.join(sorted(set(dtypes)))}: a codec needs floating point"
            )
        numel = sum(layout.numel for layout in layouts)
        if numel >= min_numel:
            return codecs
        self._say_once(
            (operation, "small"),
            f"{operation} of {numel} elements travels exactly: min_numel={min_numel}",
        )
        return (None,) * len(codecs)

    def plan(
        self,
        operation: str,
        layouts: Sequence[Layout],
        codecs: tuple[Codec | None, ...],
        algorithm: str,
        op: str = "sum",
        reduce_dtype: str | None = None,
    ) -> Plan:
        """Return the plan of a call, see :func:`zcomm.hops.make`; made at the first such call."""
        key = (operation, tuple(layouts), codecs, algorithm, op, reduce_dtype)
        if key not in self._plans:
            self._forget_many()
            self._warn_of_uneven_groups()
            plans = [
                make(
                    operation,
                    layouts,
                    self._topology,
                    codecs=codecs,
                    algorithm=name,
                    op=op,
                    reduce_dtype=reduce_dtype,
                )
                for name in candidates(algorithm, self._topology, self.tuning.piece_sizes)
            ]
            self._plans[key] = self._fastest([((plan,), plan) for plan in plans])
        return self._plans[key]

    def reduction_algorithm(
        self, layouts: Sequence[Layout], codec: CodecSpec, op: str, reduce_dtype: str | None
    ) -> str:
        """Return which algorithm "auto" is for a reduce_scatter, whatever its size."""
        codecs = parse_codecs(codec, len(self._topology.levels))
        return self.plan("reduce_scatter", layouts, codecs, "auto", op, reduce_dtype).how

    def all_reduce(
        self,
        tensors: tuple[tuple[str, int], ...],
        codecs: tuple[Codec | None, ...],
        algorithm: str,
        op: str = "sum",
        reduce_dtype: str | None = None,
    ) -> AllReduce:
        """Return the plans of an all_reduce, see :func:`zcomm.hops.make_all_reduce`."""
        key = ("all_reduce", tensors, codecs, algorithm, op, reduce_dtype)
        if key not in self._all_reduces:
            self._forget_many()
            self._warn_of_uneven_groups()
            plans = [
                make_all_reduce(
                    tensors,
                    self._topology,
                    codecs=codecs,
                    algorithm=name,
                    op=op,
                    reduce_dtype=reduce_dtype,
                )
                for name in candidates(algorithm, self._topology, self.tuning.piece_sizes)
            ]
            self._all_reduces[key] = self._fastest([(plan.executed, plan) for plan in plans])
        return self._all_reduces[key]

    def executed(
        self, operation: str, tensor: tuple[str, int], codec: CodecSpec, algorithm: str = "auto"
    ) -> tuple[Plan, ...]:
        """Return the plans that run for one contiguous tensor of this (dtype, numel).

        Raises:
            ValueError: an operation without plans, or a codec or algorithm that it cannot have.
        """
        codecs = parse_codecs(codec, len(self._topology.levels))
        if operation == "all_reduce":
            return self.all_reduce((tensor,), codecs, algorithm).executed
        if operation not in ("all_gather", "reduce_scatter"):
            possible = "all_gather, reduce_scatter, all_reduce"
            raise ValueError(f"operation {operation!r}: possible are {possible}")
        layout = Layout.even(*tensor, self._topology.size)
        return (self.plan(operation, [layout], codecs, algorithm),)

    def _fastest(self, made: list[tuple[tuple[Plan, ...], AnyPlan]]) -> AnyPlan:
        """Return the plan to run; it is kept, so that a call of a kind never changes its ways."""
        if len(made) == 1:
            return made[0][1]
        return made[self.tuning.pick([executed for executed, _ in made])][1]

    def describe(self, made: Plan, op: str = "", label: str = "") -> str:
        """Return the call in words, the same on all ranks that mean the same."""

        def put(plan: Plan, _: int) -> str:
            return _in_words(plan, op, label)

        words: str = made.memo(("words", op, label), self._rank, put)
        return words

    def announce(self, made: Plan) -> None:
        """Say once which algorithm and codec an operation runs with."""
        what = f"{made.counted_as} runs {made.how} ({len(made.hops)}-hop)"
        self._say_once(what + _codecs(made), f"{what}, codec {_codecs(made)}")

    def _forget_many(self) -> None:
        """Make room: a plan holds the scripts of its pieces, about 100 KiB."""
        if len(self._plans) + len(self._all_reduces) >= MOST:
            self._plans.clear()
            self._all_reduces.clear()

    def _warn_of_uneven_groups(self) -> None:
        if not self._topology.uniform:
            self._say_once("uneven", self._topology.describe(), logging.WARNING)

    def _say_once(self, key: object, text: str, level: int = logging.INFO) -> None:
        if key not in self._said:
            self._said.add(key)
            if self._rank == 0:
                logger.log(level, "%s: %s", self._name, text)


def _in_words(made: Plan, op: str, label: str) -> str:
    items = ", ".join(f"{layout.dtype}[{layout.numel}]" for layout in made.layouts[:4])
    more = f" and {len(made.layouts) - 4} more" if len(made.layouts) > 4 else ""
    digest = blake2b(b"".join(layout.key for layout in made.layouts), digest_size=4)
    sums = "/".join(dict.fromkeys(wire.dtype for wire in made.partials))
    reduction = f" op={op} sums={sums}" if op else ""
    how = f"codec={_codecs(made)} algorithm={made.how} layout={digest.hexdigest()}"
    name = f" of {label}" if label else ""
    return f"{made.counted_as}{name} {items}{more}{reduction} {how}"


def _codecs(made: Plan) -> str:
    """Return the codecs of a plan's hops, in their order, as text."""
    if not made.quantised:
        return "none"
    return ",".join(
        "+".join(dict.fromkeys(str(wire.codec or "none") for wire in hop.formats))
        for hop in made.hops
    )
