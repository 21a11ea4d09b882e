"""Stage 3: make a unit's parameters whole, and let go of them.

``gather`` and ``reshard`` are a pair; both know the unit's state, so that calling one twice does
nothing. Gathering is a collective: all ranks gather the same units in the same order.

Units *ahead* are those whose gather was issued before anybody asked for them: at every gather, and
after every forward, the ``prefetch`` units that came next in the last step, and the root where it
comes before one of them; none behind a unit that is still whole. What is issued depends on the
order of gathers and on nothing else, so all ranks issue alike. A unit ahead that is not one of the
next any more is dropped, as is one whose parameters were changed since: wrong hints cost time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zcomm import Communicator
from zcomm.errors import OffloadError
from zcomm.work import Work
from zero.config import Config
from zero.edits import absorb, was_edited
from zero.lend import lend
from zero.offload.drive import Faults
from zero.order import Order
from zero.pool import Pool
from zero.saved import SavedWeights
from zero.secondary import Secondary
from zero.unit import State, Unit


@dataclass(frozen=True, eq=False)
class Fetch:
    """A unit of some version on its way into ``fulls``; there when all ``works`` have ended."""

    fulls: list[Tensor]
    version: int
    works: tuple[Work[object], ...]

    def wait(self) -> None:
        """Wait until the memory holds the parameters."""
        for work in self.works:
            work.wait()


class Gathering:
    """Owns the whole form of the units' parameters; in stages 0-2 there is nothing to do.

    ``kept`` counts the users that want all units to stay whole; ``pool`` lends their memory.
    """

    def __init__(
        self,
        comm: Communicator,
        config: Config,
        saved: SavedWeights,
        secondary: Secondary | None,
        faults: Faults,
    ) -> None:
        self._comm = comm
        self._codec = config.weights_codec
        self._seed = config.seed
        # One rank alone has nothing to wait for but its disk.
        waits = comm.size > 1 or config.offload_params == "nvme"
        self._prefetch = config.prefetch if waits else 0
        self._ahead: dict[Unit, Fetch] = {}
        self._order = Order()
        self._faults = faults
        self.pool = Pool()
        self.saved = saved
        self.secondary = secondary
        self.sharded = config.stage == 3
        self.kept = 0

    def gather(self, unit: Unit, *, backward: bool = False, hint: bool = True) -> None:
        """Make a unit whole; from the secondary copy where there is one.

        Args:
            unit: sharded; otherwise nothing happens.
            backward: whether it is a backward that needs it.
            hint: whether the order of modules says that it comes here, and what comes next.
        """
        if unit.state is not State.SHARDED:
            return
        if hint and unit.buffers:
            self._order.note(unit, backward=backward)
        coming = self._coming() if hint else []
        expected = _before_a_whole_one(coming, unit)
        fetch = self._ahead.pop(unit, None)
        if fetch is not None and fetch.version != unit.version:
            self._return(fetch)
            fetch = None
        if fetch is None:
            fetch = self._fetch(unit, async_op=bool(expected))
        self._issue(expected)
        self._await(fetch)
        # Whatever is dropped was issued before, and has ended.
        self._drop([other for other in self._ahead if hint and other not in coming])
        for buffer, full in zip(unit.buffers, fetch.fulls, strict=True):
            buffer.show(full)
        self.saved.add(unit)
        unit.state = State.WHOLE

    def begin(self, unit: Unit) -> None:
        """Let go of the memory that a unit had when the model was sharded."""
        for buffer in unit.buffers:
            buffer.hide()
        unit.state = State.SHARDED

    def look_ahead(self) -> None:
        """Issue the gathers of the units that came next in the last step."""
        self._issue(_before_a_whole_one(self._coming()))

    def forget_ahead(self) -> None:
        """Drop what was gathered ahead: the parameters are about to change."""
        self._drop(list(self._ahead))

    def stepped(self) -> None:
        """Begin a new step of the order of gathers."""
        self._order.stepped()

    @property
    def num_ahead(self) -> int:
        """Units whose gather was issued and that nobody has asked for yet."""
        return len(self._ahead)

    def _coming(self) -> list[Unit]:
        """Return the next units, of which those that are sharded may be ahead."""
        found: list[Unit] = []
        left = self._prefetch
        for unit in self._order.next(2 * self._prefetch):
            if left == 0:
                break
            found.append(unit)
            left -= not unit.is_root
        return found

    def _issue(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if unit.state is State.SHARDED and unit not in self._ahead:
                self._ahead[unit] = self._fetch(unit, async_op=True)

    def _drop(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._return(self._ahead.pop(unit))

    def _return(self, fetch: Fetch) -> None:
        self._await(fetch)
        for full in fetch.fulls:
            self.pool.give(full)

    def _await(self, fetch: Fetch) -> None:
        with self._faults.watch(OffloadError):
            fetch.wait()

    def _fetch(self, unit: Unit, *, async_op: bool) -> Fetch:
        """Begin to write the parameters of a sharded unit to memory of the pool."""
        with self._faults.watch(OffloadError):
            return self._begun(unit, async_op=async_op)

    def _begun(self, unit: Unit, *, async_op: bool) -> Fetch:
        fulls = [self.pool.take(b.layout.numel, b.layout.dtype, b.device) for b in unit.buffers]
        works: tuple[Work[object], ...] = ()
        if not fulls:
            pass
        elif self.secondary is not None:
            works = self.secondary.gather(unit, fulls, async_op=async_op)
        else:
            lent = lend(self._comm, unit, async_op=async_op)
            layouts = [buffer.layout.all for buffer in unit.buffers]
            work = self._comm.gather_layout(
                lent.shards,
                fulls,
                layouts,
                codec=self._codec if unit.quantise else None,
                min_numel=0,
                label=unit.label,
                seed=unit.seed(self._seed, self._comm.rank),
                ready=lent.ready,
                async_op=async_op,
            )
            given = lent.give_back()
            works = (work, *given) if async_op else ()
        return Fetch(fulls, unit.version, works)

    def reshard(self, unit: Unit) -> None:
        """Let go of a whole unit; parameters that were changed in place go back to the shard."""
        if unit.state is State.SHARDED:
            return
        if not self.sharded or self.kept:
            unit.state = State.WHOLE
            return
        if any(was_edited(buffer) for buffer in unit.buffers):
            for buffer in unit.buffers:
                absorb(buffer, exact=self._codec is None or not unit.quantise)
            unit.note_edit()
        self.saved.remove(unit)
        fulls = [buffer.full for buffer in unit.buffers]
        for buffer in unit.buffers:
            buffer.hide()
        for full in fulls:
            assert full is not None
            self.pool.give(full)
        unit.state = State.SHARDED

    def forget(self) -> None:
        """Let go of copies of parameters: shards are about to change without a new version."""
        self.forget_ahead()
        if self.secondary is not None:
            self.secondary.forget()


def _before_a_whole_one(coming: Sequence[Unit], current: Unit | None = None) -> list[Unit]:
    """Return the sharded units before the first that is whole, or is about to be, as ``current``.

    The root stops nothing: it stays whole while others compute.
    """
    found: list[Unit] = []
    for unit in coming:
        if unit.state is State.SHARDED and unit is not current:
            found.append(unit)
        elif not unit.is_root:
            break
    return found
