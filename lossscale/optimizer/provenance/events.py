"""What can happen to a loss scale: each time one event, at a time, on a replica."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional, Tuple

from lossscale.gradients.check import CLEAN, Check
from lossscale.gradients.faults import clean
from lossscale.runtime import mode, replicas
from lossscale.runtime.aliases import Grads, Tensor
from lossscale.runtime.callbacks import key_of
from lossscale.runtime.graphs import (
    Place,
    current_graph,
    is_building,
    is_eager,
    is_in_sight,
    is_nested,
    is_visible,
    this_place,
)
from lossscale.units.sweep import values_of


class Event:
    """Something that happened to a loss scale.

    Attributes:
      time: When, on the clock of the history.
      replica: Where.
    """

    is_read = False

    def __init__(self, time: int) -> None:
        self.time, self.replica = time, replicas.this_one()


class Read(Event):
    """It was read as a tensor, which may multiply a loss or divide gradients.

    Attributes:
      tensor: The tensor.
      is_from_then_on: Whether it is not known when it multiplies: a dataset's function
        may do so at any time after this read.
    """

    is_read = True

    def __init__(
        self, time: int, tensor: Tensor, is_from_then_on: bool = False
    ) -> None:
        super().__init__(time)
        self.tensor, self.is_from_then_on = tensor, is_from_then_on

    def is_visible(self) -> bool:
        """Tells whether the tensor can be used where a graph is built now."""
        return is_visible(self.tensor)

    def is_settled_at(self, time: int, optimizer: Optional[int] = None) -> bool:
        """Returns False: no step settles a read."""
        del time, optimizer
        return False


class Loss(Event):
    """A loss was multiplied with it.

    Attributes:
      tensor: The tensor of the loss scale that multiplied it.
      loss: The loss, before it was scaled. None: it is too old to be asked for.
    """

    def __init__(self, time: int, tensor: Tensor, loss: Tensor) -> None:
        super().__init__(time)
        self.tensor: Any = tensor
        self.loss: Any = loss


class Apply(Event):
    """A step was applied or skipped, which may have moved it.

    Attributes:
      tensor: A tensor of the loss scale as it was before. None: there is none.
      graph: Where it was built, perhaps a branch.
    """

    def __init__(self, time: int, tensor: Any) -> None:
        super().__init__(time)
        self.tensor, self.graph = tensor, current_graph()


class Unscale(Event):
    """A list of gradients was divided by it. They may be dropped or changed later.

    Attributes:
      check: What is known of them as they were returned.
      count: How many gradients there were, with those that are None.
      place: In which graph, and in which loop or branch of it.
      poisons: Whether one that was not finite made all that were returned NaN, so that
        the overflow survives later changes.
    """

    def __init__(
        self,
        time: int,
        grads: Grads,
        check: Check,
        pairs: List[Tuple[Any, Any]],
        optimizers: Any = (),
    ) -> None:
        """Remembers gradients.

        Args:
          time: When they were unscaled.
          grads: What is returned; some may be None.
          check: Their check.
          pairs: What each was before it was divided, and by what. Kept in graphs only:
            it is divided anew where it is used. Eagerly it would take memory.
          optimizers: Those that share the loss scale.
        """
        super().__init__(time)
        self.check, self.place = check, this_place()
        # XLA may make a number of a NaN where it clips (seen on 2.21).
        self.poisons = is_nested() and not mode.current().cond_runs_both
        self._optimizers = optimizers
        self._decided: Dict[int, Tuple[int, Place]] = {}
        keys = [None if each is None else _key_of(each) for each in values_of(grads)]
        self._returned, self.count = frozenset(keys) - {None}, len(grads)
        kept = zip(grads, pairs) if is_building() else []
        self._before = {id(g): pair for g, pair in kept if g is not None}

    def has_returned(self, value: Tensor) -> bool:
        """Tells whether this very tensor was returned."""
        return _key_of(value) in self._returned

    def note_decided(self, optimizer: int, time: int) -> None:
        """Notes that an optimizer now decides on a step that uses these gradients."""
        # An eager unscaling outlives the graph that is built now.
        outlives = is_building() and self.place[0] is None
        # A session may run the one step and not the other.
        if not (outlives or mode.current().runs_parts):
            self._decided.setdefault(optimizer, (time, this_place()))

    def is_settled_at(self, time: int, optimizer: Optional[int] = None) -> bool:
        """Tells whether an optimizer had decided on a step with it: see `Source`."""
        if optimizer is None:
            keys = [each.key for each in list(self._optimizers)]
            have_decided = [self.is_settled_at(time, key) for key in keys]
            return bool(self._decided) and all(have_decided)
        decided, place = self._decided.get(optimizer, (time, self.place))
        return decided < time and is_in_sight(place)

    @property
    def was_checked(self) -> bool:
        """Whether anybody looked at the gradients when they were unscaled."""
        return not self.check.is_clean

    def is_visible(self) -> bool:
        """Tells whether its tensors can be used where a graph is built now."""
        return is_in_sight(self.place)

    def before_division(self) -> Dict[int, Tuple[Any, Any]]:
        """Returns what gradients were, and their divisors, by the gradients' `id`s."""
        return self._before if self.is_visible() else {}

    def are_all_in(self, grads: Grads) -> bool:
        """Tells whether none of these is left out of `grads`."""
        return set(self._before) <= {id(grad) for grad in grads}


def _key_of(tensor: Tensor) -> int:
    return key_of(tensor) if is_eager(tensor) else id(tensor)


def earlier_check(unscalings: List[Unscale], grads: Grads) -> Check:
    """Returns what was known of gradients when they were unscaled.

    The flags of all lists count. Their worst numbers are known if `grads` is the one
    list that was unscaled.
    """
    check = CLEAN
    for each in unscalings:
        check &= each.check
    # In eager mode, to keep `grads` here would keep their memory.
    is_of_grads = len(unscalings) == 1 and unscalings[0].count == len(grads)
    if is_of_grads or check.is_clean:
        return check
    count = len(grads)
    return check._replace(worst=lambda: clean(count))


def before_division(
    unscalings: Iterable[Unscale], grads: Grads
) -> Optional[Tuple[List[Any], List[Any]]]:
    """Returns what returned gradients were before, and what they were divided by."""
    found: Dict[int, Tuple[Any, Any]] = {}
    for each in unscalings:
        found.update(each.before_division())
    if any(grad is not None and id(grad) not in found for grad in grads):
        return None
    pairs = [(None, None) if grad is None else found[id(grad)] for grad in grads]
    return [scaled for scaled, _ in pairs], [divisor for _, divisor in pairs]
