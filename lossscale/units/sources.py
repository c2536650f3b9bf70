"""Where a value comes from: events of a loss scale, each of which is a *source*.

A source either read the loss scale, or unscaled gradients. Whoever notes events says
more of them (`optimizer/provenance/events.py`); here they only go from value to value.
"""

from __future__ import annotations

from typing import FrozenSet, Iterable, List, NamedTuple, Optional, Protocol

#: How many unscalings are kept of what a variable sums up, the last ones.
_MOST = 64


class Source(Protocol):
    """An event that values come from.

    Attributes:
      is_read: Whether it read the loss scale. If not, it unscaled gradients.
      time: When it happened, on a clock that never stands.
    """

    @property
    def is_read(self) -> bool: ...

    @property
    def time(self) -> int: ...

    def is_settled_at(self, time: int, optimizer: Optional[int] = None) -> bool:
        """Tells whether an optimizer had decided on a step with it before a time.

        Args:
          time: The time.
          optimizer: The optimizer's key. None: each that shares the loss scale.
        """


Sources = FrozenSet[Source]
NONE: Sources = frozenset()


class Input(NamedTuple):
    """Within a function: the sources of one kind that one of its inputs has.

    Attributes:
      position: Which of the different units that the function is called with.
      is_read: The kind.
    """

    position: int
    is_read: bool
    time: int = 0

    def is_settled_at(self, time: int, optimizer: Optional[int] = None) -> bool:
        del time, optimizer  # it stands for several, of which nothing is known here
        return False


def reads(sources: Sources) -> Sources:
    """Returns those that read the loss scale."""
    return frozenset(each for each in sources if each.is_read)


def unscalings(sources: Sources) -> Sources:
    """Returns those that unscaled gradients."""
    return frozenset(each for each in sources if not each.is_read)


def not_settled(
    among: Iterable[Source], optimizer: Optional[int] = None
) -> List[Source]:
    """Returns the sources on which no step was decided before the newest of them.

    In the order of their times. Once a step was decided with an old unscaling, only
    newer ones count: an overflow costs one step.

    Args:
      among: Sources.
      optimizer: The key of the optimizer that must have decided. None: each one.
    """
    ordered = sorted({*among}, key=lambda each: each.time)
    if len(ordered) < 2:
        return ordered
    last = ordered[-1].time
    return [each for each in ordered if not each.is_settled_at(last, optimizer)]


def carried_on(sources: Sources) -> Sources:
    """Returns the sources without unscalings that are settled."""
    if len(sources) < 2:
        return sources
    return reads(sources) | frozenset(not_settled(unscalings(sources)))


def in_variable(sources: Sources) -> Sources:
    """Returns the sources of what a variable holds: the last, if they are many."""
    return reads(sources) | frozenset(not_settled(unscalings(sources))[-_MOST:])
