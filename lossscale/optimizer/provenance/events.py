"""What can happen to a loss scale. Each event has a time and a replica."""

from __future__ import annotations

from typing import Dict, FrozenSet, Iterable, List, Optional, Protocol, Tuple, cast

from lossscale.gradients.check import CLEAN, Check, clean
from lossscale.runtime import mode, replicas
from lossscale.runtime.aliases import Divisors, Grads, Pair, Scalar, Tensor
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
from lossscale.units.unit import Unit


class Optimizer(Protocol):
    """One of the optimizers that share a loss scale: its `Provenance`.

    Attributes:
      key: Its number among them.
      is_keras: Whether it is an optimizer of Keras.
    """

    key: int
    is_keras: bool


class Event:
    """Something that happened to a loss scale.

    Attributes:
      time: When it happened, on the clock of the history.
      replica: The replica on which it happened.
    """

    is_read = False

    def __init__(self, time: int) -> None:
        self.time, self.replica = time, replicas.this_one()


class Read(Event):
    """The loss scale was read as a tensor, which may scale a loss or divide gradients.

    Attributes:
      tensor: The tensor.
      is_from_then_on: Whether the loss scale may have multiplied a loss at any time
        after this read: a dataset's function runs when it likes.
    """

    is_read = True

    def __init__(
        self, time: int, tensor: Scalar, is_from_then_on: bool = False
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
    """A loss was multiplied with the loss scale.

    Attributes:
      tensor: The tensor of the loss scale that multiplied the loss.
      loss: The loss before it was scaled. None: too old, so no longer kept.
    """

    def __init__(self, time: int, tensor: Scalar, loss: Tensor) -> None:
        super().__init__(time)
        self.tensor = tensor
        self.loss: Optional[Tensor] = loss


class Apply(Event):
    """A step was applied or skipped, which may have moved the loss scale.

    Attributes:
      tensor: A tensor of the loss scale's value before the step. None: there is none.
      graph: The graph of the step, perhaps a branch. None in eager mode.
    """

    def __init__(self, time: int, tensor: Optional[Scalar]) -> None:
        super().__init__(time)
        self.tensor, self.graph = tensor, current_graph()


class Unscale(Event):
    """A list of gradients was divided by the loss scale.

    The user may change or drop the returned gradients later.

    Attributes:
      check: The check of the gradients as they were returned.
      count: The length of the list, with the gradients that are None.
      place: The graph in which they were unscaled, and the loop or branch in it.
      poisons: Whether a non-finite gradient made all returned ones NaN, so that the
        overflow survives later changes.
    """

    def __init__(
        self,
        time: int,
        grads: Grads,
        check: Check,
        pairs: List[Pair],
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        """Remembers gradients.

        Args:
          time: When they were unscaled.
          grads: The gradients that are returned; some may be None.
          check: Their check.
          pairs: Each gradient before its division, and its divisor. Kept in graphs
            only, which divide again where a gradient is used. Eager mode would need
            memory for them.
          optimizers: The optimizers that share the loss scale.
        """
        super().__init__(time)
        self.check, self.place = check, this_place()
        # Where XLA clips, it may turn a NaN into a number (seen on 2.21).
        self.poisons = is_nested() and not mode.current().cond_runs_both
        self._optimizers = optimizers
        self._decided: Dict[int, Tuple[int, Place]] = {}
        keys = [None if each is None else _key_of(each) for each in values_of(grads)]
        self._returned, self.count = frozenset(keys) - {None}, len(grads)
        kept = zip(grads, pairs) if is_building() else []
        self._before = {id(g): pair for g, pair in kept if g is not None}

    def has_returned(self, value: Tensor) -> bool:
        """Tells whether exactly this tensor was returned."""
        return _key_of(value) in self._returned

    def note_decided(self, optimizer: int, time: int) -> None:
        """Notes that an optimizer now decides on a step that uses these gradients."""
        # An unscaling of eager mode outlives the graph that is being built.
        outlives = is_building() and self.place[0] is None
        # A session may run one of two steps and not the other.
        if not (outlives or mode.current().runs_parts):
            self._decided.setdefault(optimizer, (time, this_place()))

    def is_settled_at(self, time: int, optimizer: Optional[int] = None) -> bool:
        """Tells whether an optimizer decided on a step with it before: see `Source`."""
        if optimizer is None:
            keys = [each.key for each in list(self._optimizers)]
            have_decided = [self.is_settled_at(time, key) for key in keys]
            return bool(self._decided) and all(have_decided)
        decided, place = self._decided.get(optimizer, (time, self.place))
        return decided < time and is_in_sight(place)

    @property
    def was_checked(self) -> bool:
        """Whether the gradients were checked when they were unscaled."""
        return not self.check.is_clean

    def is_visible(self) -> bool:
        """Tells whether its tensors can be used where a graph is built now."""
        return is_in_sight(self.place)

    def before_division(self) -> Dict[int, Pair]:
        """Returns gradients before their division, with divisors, by their `id`s."""
        return self._before if self.is_visible() else {}

    def are_all_in(self, grads: Grads) -> bool:
        """Tells whether `grads` holds all gradients that were returned."""
        return set(self._before) <= {id(grad) for grad in grads}


def reads_of(unit: Unit) -> FrozenSet[Read]:
    """Returns the reads of the loss scale that a value comes from."""
    return cast("FrozenSet[Read]", unit.reads)


def unscalings_of(unit: Unit) -> FrozenSet[Unscale]:
    """Returns the unscalings that a value comes from."""
    return cast("FrozenSet[Unscale]", unit.unscalings)


def _key_of(tensor: Tensor) -> int:
    return key_of(tensor) if is_eager(tensor) else id(tensor)


def earlier_check(unscalings: List[Unscale], grads: Grads) -> Check:
    """Returns the check of gradients when they were unscaled.

    Args:
      unscalings: The unscalings that the gradients come from. All their flags count.
      grads: The gradients. Their worst numbers are known only if they are the one list
        that was unscaled.
    """
    check = CLEAN
    for each in unscalings:
        check &= each.check
    # Lengths are compared, since keeping eager gradients would keep their memory.
    is_of_grads = len(unscalings) == 1 and unscalings[0].count == len(grads)
    if is_of_grads or check.is_clean:
        return check
    count = len(grads)
    return check._replace(worst=lambda: clean(count))


def before_division(
    unscalings: Iterable[Unscale], grads: Grads
) -> Optional[Tuple[Grads, Divisors]]:
    """Returns gradients before they were unscaled, and their divisors.

    None if one of the gradients was not returned by these unscalings.
    """
    found: Dict[int, Pair] = {}
    for each in unscalings:
        found.update(each.before_division())
    if any(grad is not None and id(grad) not in found for grad in grads):
        return None
    pairs = [(None, None) if grad is None else found[id(grad)] for grad in grads]
    return [scaled for scaled, _ in pairs], [divisor for _, divisor in pairs]
