"""Lists of gradients that were unscaled and handed out to the user."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Dict, Iterable, List, Optional, Tuple

from lossscale.gradients.faults import Check, clean
from lossscale.gradients.finite import together
from lossscale.gradients.largest import greater
from lossscale.runtime import mode
from lossscale.runtime.graphs import current_graph, visible_graphs


class Unscaled:
    """A list of gradients that were handed out, who may be dropped or changed.

    Attributes:
      check: What is known of them as they were handed out. None: nothing.
      awaited: How many of each shape have not been applied yet.
    """

    def __init__(
        self,
        grads: List[Any],
        check: Optional[Check],
        given: List[Any],
        pairs: List[Tuple[Any, Any]],
    ) -> None:
        """Remembers gradients.

        Args:
          grads: What is handed out; some may be None.
          check: Their check.
          given: What the user gave to have it unscaled.
          pairs: What each was before it was divided, and by what. Kept under XLA only,
            where dividing it where it is used is faster.
        """
        self.check = check
        self._graph = current_graph()
        self._references = [None if g is None else weakref.ref(g) for g in grads]
        kept = zip(grads, pairs) if mode.current().fuses else []
        self._before = {id(g): pair for g, pair in kept if g is not None}
        self._given = [weakref.ref(each) for each in given if each is not None]
        self.awaited = shapes(grads)

    def __len__(self) -> int:
        return len(self._references)

    def grads(self) -> List[Any]:
        """Returns those gradients that are still alive, and None for the others."""
        return [None if each is None else each() for each in self._references]

    def is_here(self) -> bool:
        """Tells whether its tensors can be used in the graph that is built now."""
        return any(self._graph is graph for graph in visible_graphs())

    def before_division(self) -> Dict[int, Tuple[Any, Any]]:
        """Returns what gradients were, and their divisors, by the gradients' `id`s."""
        return self._before if self.is_here() else {}

    def were(self, grads: List[Any]) -> bool:
        """Tells whether all of `grads` are what these were before the division."""
        given = {id(each()) for each in self._given}
        return all(id(grad) in given for grad in grads)

    def applied(self, grads: List[Any]) -> None:
        """Remembers that gradients of these shapes have been applied."""
        self.awaited = self.awaited - shapes(grads)


def shapes(grads: List[Any]) -> Any:
    """Returns how many gradients there are of each shape."""
    distinct = {id(grad): grad for grad in grads if grad is not None}
    return Counter(str(grad.shape) for grad in distinct.values())


def covering(lists: Iterable[Unscaled], grads: List[Any]) -> List[Unscaled]:
    """Returns the latest lists that together await all gradients, by their shapes."""
    rest, chosen = shapes(grads), []
    for each in reversed(list(lists)):
        common = rest & each.awaited
        if common:
            chosen.append(each)
            rest = rest - common
    return [] if rest else chosen


def earlier_check(lists: List[Unscaled], grads: List[Any]) -> Optional[Check]:
    """Returns what was known of gradients when they were unscaled.

    Its flag tells of all the lists, its codes of `grads` if they are one of the lists.
    """
    checks = [each.check for each in lists if each.check is not None]
    if not checks:
        return None
    finiteness = together([each.finiteness for each in checks])
    largest = checks[0].largest
    for each in checks[1:]:
        largest = greater(largest, each.largest)
    fits = len(lists) == 1 and len(lists[0]) == len(grads)
    count = len(grads)
    # Not of `grads` themselves, which eagerly would be kept.
    codes = checks[0].codes if fits else lambda: clean(count)
    return Check(finiteness, codes, largest)


def before_division(
    lists: List[Unscaled], grads: List[Any]
) -> Optional[Tuple[List[Any], List[Any]]]:
    """Returns what handed out gradients were before, and what they were divided by."""
    found: Dict[int, Tuple[Any, Any]] = {}
    for each in lists:
        found.update(each.before_division())
    if any(grad is not None and id(grad) not in found for grad in grads):
        return None
    pairs = [(None, None) if grad is None else found[id(grad)] for grad in grads]
    return [scaled for scaled, _ in pairs], [divisor for _, divisor in pairs]
