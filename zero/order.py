"""In which order units are gathered: learned in one step, a hint in the next.

An **event** is a unit and whether a backward needs it. A reader must not assume that a hint comes
true. It depends on nothing but the events themselves, which are the same on all ranks, as gathers
are collectives: so all ranks have the same hints.
"""

from __future__ import annotations

from zero.unit import Unit

Event = tuple[Unit, bool]

MOST_EVENTS = 1 << 16
"""After so many without a step (an evaluation) they count as one."""


class Order:
    """The events of the last step, and the place in them where this step has come to."""

    def __init__(self) -> None:
        self._last: list[Event] = []
        self._now: list[Event] = []
        self._place = 0

    def note(self, unit: Unit, *, backward: bool) -> None:
        """Note an event, and find the place behind it in the last step."""
        event = unit, backward
        if not self._last and event in self._now[:1]:
            # A second micro-batch, or evaluation, before the first step.
            self._last = list(self._now)
        self._place = self._behind(event)
        self._now.append(event)
        if len(self._now) == MOST_EVENTS:
            self.stepped()

    def next(self, count: int) -> list[Unit]:
        """Return the units of the ``count`` events that came next; fewer, or none, at an end."""
        return [unit for unit, _ in self._last[self._place : self._place + count]]

    def stepped(self) -> None:
        """Begin a new step."""
        if self._now:
            self._last, self._now = self._now, []
        self._place = 0

    def _behind(self, event: Event) -> int:
        for start in (self._place, 0):
            try:
                return self._last.index(event, start) + 1
            except ValueError:
                continue
        return len(self._last)
