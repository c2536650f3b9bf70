"""Lists of gradients that were unscaled and returned to the user."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional, Tuple

from lossscale.gradients.check import CLEAN, Check
from lossscale.gradients.faults import clean
from lossscale.runtime import mode
from lossscale.runtime.aliases import Grads
from lossscale.runtime.graphs import (
    Place,
    is_building,
    is_in_sight,
    is_nested,
    this_place,
)


class Unscaling:
    """A list of gradients that was unscaled. They may be dropped or changed later.

    Attributes:
      number: When that was.
      check: What is known of them as they were returned.
      shows: Whether one that was not finite is seen in what was returned, whatever
        happens to it, since all were made NaN then.
    """

    def __init__(
        self,
        number: int,
        grads: Grads,
        check: Check,
        pairs: List[Tuple[Any, Any]],
        optimizers: Any = (),
    ) -> None:
        """Remembers gradients.

        Args:
          number: When they were unscaled.
          grads: What is returned; some may be None.
          check: Their check.
          pairs: What each was before it was divided, and by what. Kept in graphs only:
            it is divided anew where it is used. Eagerly it would take memory.
          optimizers: Those that share the loss scale.
        """
        self.number, self.check = number, check
        self._optimizers = optimizers
        self._decided: Dict[int, Tuple[int, Place]] = {}
        # XLA may make a number of a NaN where it clips (seen on 2.21).
        self.shows = is_nested() and not mode.current().cond_runs_both
        self._place = this_place()
        self._count = len(grads)
        kept = zip(grads, pairs) if is_building() else []
        self._before = {id(g): pair for g, pair in kept if g is not None}

    def __len__(self) -> int:
        return self._count

    def note_decided(self, optimizer: int, number: int) -> None:
        """Remembers that an optimizer applies or skips a step that comes from it."""
        outlives = is_building() and self._place[0] is None  # it is of eager mode
        # A session may run the one step and not the other.
        if not (outlives or mode.current().runs_parts):
            self._decided.setdefault(optimizer, (number, this_place()))

    def is_settled_for(self, optimizer: int, last: int) -> bool:
        """Tells whether an optimizer had decided with it when others were unscaled.

        What is made of both is looked at as it is: an overflow costs one step.

        Args:
          optimizer: The optimizer's key.
          last: When the last ones were unscaled that a value comes from.
        """
        number, place = self._decided.get(optimizer, (last, self._place))
        return number < last and is_in_sight(place)

    def is_settled_at(self, last: int) -> bool:
        """Tells whether each optimizer had."""
        return bool(self._decided) and all(
            self.is_settled_for(each.key, last) for each in list(self._optimizers)
        )

    @property
    def was_checked(self) -> bool:
        """Whether anybody looked at the gradients when they were unscaled."""
        return not self.check.is_clean

    def is_visible(self) -> bool:
        """Tells whether its tensors can be used where a graph is built now."""
        return is_in_sight(self._place)

    def before_division(self) -> Dict[int, Tuple[Any, Any]]:
        """Returns what gradients were, and their divisors, by the gradients' `id`s."""
        return self._before if self.is_visible() else {}

    def are_all_in(self, grads: Grads) -> bool:
        """Tells whether none of these is left out of `grads`."""
        return set(self._before) <= {id(grad) for grad in grads}


def not_settled(unscalings: Iterable[Unscaling], optimizer: int) -> List[Unscaling]:
    """Returns those that no step of an optimizer was decided with, in their order.

    That is, before the last of them: see `Unscaling.is_settled_for`.
    """
    every = sorted({*unscalings}, key=lambda each: each.number)
    return [
        each for each in every if not each.is_settled_for(optimizer, every[-1].number)
    ]


def earlier_check(unscalings: List[Unscaling], grads: Grads) -> Check:
    """Returns what was known of gradients when they were unscaled.

    It tells of all lists, but its worst numbers are of `grads` alone.
    """
    check = CLEAN
    for each in unscalings:
        check &= each.check
    # Not of `grads` themselves, which eagerly would be kept.
    is_of_grads = len(unscalings) == 1 and len(unscalings[0]) == len(grads)
    if is_of_grads or check.is_clean:
        return check
    count = len(grads)
    return check._replace(worst=lambda: clean(count))


def before_division(
    unscalings: Iterable[Unscaling], grads: Grads
) -> Optional[Tuple[List[Any], List[Any]]]:
    """Returns what returned gradients were before, and what they were divided by."""
    found: Dict[int, Tuple[Any, Any]] = {}
    for each in unscalings:
        found.update(each.before_division())
    if any(grad is not None and id(grad) not in found for grad in grads):
        return None
    pairs = [(None, None) if grad is None else found[id(grad)] for grad in grads]
    return [scaled for scaled, _ in pairs], [divisor for _, divisor in pairs]
