"""Where a value comes from: events of a loss scale, which we call its *sources*.

A source either read the loss scale or unscaled gradients. Here operations only hand
sources on from value to value; `optimizer/provenance/events.py` says what the events
are.
"""

from __future__ import annotations

from typing import FrozenSet, Iterable, List, NamedTuple, Optional, Protocol

#: At most so many unscalings are kept for a variable that sums up gradients: the last.
_MOST = 64


class Source(Protocol):
    """An event that values come from.

    Attributes:
      is_read: Whether it read the loss scale. If not, it unscaled gradients.
      time: When it happened. Each event has a later time than those before it.
    """

    @property
    def is_read(self) -> bool: ...

    @property
    def time(self) -> int: ...

    def is_settled_at(self, time: int, optimizer: Optional[int] = None) -> bool:
        """Tells whether an optimizer decided on a step with it before a given time.

        Args:
          time: The time.
          optimizer: The optimizer's key. None: all optimizers that share the loss scale
            must have decided.
        """


class ReadNow(Protocol):
    """Reads the loss scale as it is now, and returns that read as a source."""

    def __call__(self, is_from_then_on: bool) -> Source: ...


Sources = FrozenSet[Source]
NONE: Sources = frozenset()


class Input(NamedTuple):
    """Stands for sources of a function's caller while the function's body is swept.

    Attributes:
      position: Which unit has these sources, among the different units that the
        function is called with.
      is_read: The kind of these sources.
    """

    position: int
    is_read: bool
    time: int = 0

    def is_settled_at(self, time: int, optimizer: Optional[int] = None) -> bool:
        del time, optimizer  # it stands for several sources that are unknown here
        return False


def reads(sources: Sources) -> Sources:
    """Returns the sources that read the loss scale."""
    return frozenset(each for each in sources if each.is_read)


def unscalings(sources: Sources) -> Sources:
    """Returns the sources that unscaled gradients."""
    return frozenset(each for each in sources if not each.is_read)


def not_settled(
    among: Iterable[Source], optimizer: Optional[int] = None
) -> List[Source]:
    """Returns the sources with which no step was decided before the newest of them.

    They are in the order of their times. An unscaling counts until a step was decided
    with it, so that an overflow costs one step.

    Args:
      among: Sources.
      optimizer: The key of the optimizer that must have decided. None: all optimizers
        that share the loss scale must have decided.
    """
    ordered = sorted({*among}, key=lambda each: each.time)
    if len(ordered) < 2:
        return ordered
    last = ordered[-1].time
    return [each for each in ordered if not each.is_settled_at(last, optimizer)]


def carried_on(sources: Sources) -> Sources:
    """Returns the sources without those unscalings that are settled."""
    if len(sources) < 2:
        return sources
    return reads(sources) | frozenset(not_settled(unscalings(sources)))


def in_variable(sources: Sources) -> Sources:
    """Returns the sources of what a variable holds, only the last if they are many."""
    return reads(sources) | frozenset(not_settled(unscalings(sources))[-_MOST:])
