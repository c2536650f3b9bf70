"""How far a step has come, and where gradients come from that are handed in.

Loops written for Keras 2 (scale, unscale, clip, apply) and for Keras 3 (scale, apply)
both run, since it is known whether gradients are still scaled. In a graph that is read
off the graph, by `origin`. What comes from nowhere in it, and in eager mode all but the
very objects that were handed out, is told by the order of calls:

```
unscaled     if gradients like these were unscaled since the loss was last scaled,
             and have not been applied
scaled       else, if the loss was scaled
as in Keras  else: Keras 3's `apply` divides, Keras 2's does not
```

Where that leaves two answers, one warning says so. A step belongs to one replica and
one graph: symbolic tensors of one trace must never reach another.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set

from lossscale.gradients.faults import Check
from lossscale.optimizer.advice import AMBIGUOUS, NEVER_SCALED, warn
from lossscale.optimizer.divisors import Divisors
from lossscale.optimizer.origin import Found, Origin, are_arguments
from lossscale.optimizer.sharing import group_of
from lossscale.optimizer.steps import Step, Steps
from lossscale.optimizer.unscaled import (
    Unscaled,
    before_division,
    covering,
    earlier_check,
)
from lossscale.runtime import replicas
from lossscale.runtime.graphs import current_graph
from lossscale.scales.base import LossScale

#: What is assumed where two answers are possible, by whether gradients are divided.
_ASSUMED = {True: "They are divided by it.", False: "They are applied as they came."}


class HandedIn(NamedTuple):
    """Gradients that are to be applied, and all that is known of them.

    Attributes:
      grads: The gradients; some may be None.
      divisors: What each is still to be divided by, a `float32` tensor of shape `[]`.
        None: it is unscaled.
      earlier: The check of when they were unscaled. None: there was none.
      is_checked: Whether nobody has changed them since, so that `earlier` says all.
      losses: The unscaled losses that they are of, the last ones.
    """

    grads: List[Any]
    divisors: List[Any]
    earlier: Optional[Check]
    is_checked: bool
    losses: List[Any]


class Progress:
    """How far one optimizer has come, on each replica."""

    def __init__(self, loss_scale: LossScale) -> None:
        self.loss_scale = loss_scale
        self._steps = Steps()
        self._warned: Set[str] = set()
        self._group = group_of(loss_scale)
        self._group.members.add(self)
        self._divisors = Divisors(loss_scale, self._group, self._warn)

    def __deepcopy__(self, memo: Dict[int, Any]) -> Progress:
        # Copies of optimizers that share a loss scale share its copy.
        return Progress(copy.deepcopy(self.loss_scale, memo))

    def note_scaled(self, loss: Any, loss_scale: Any) -> None:
        """Remembers that a loss is multiplied with the tensor `loss_scale`."""
        self._steps.open(loss_scale).note_scaled(loss)

    def divisors(self, grads: List[Any]) -> List[Any]:
        """Returns what gradients that are to be unscaled are divided by.

        Raises:
          ValueError: One has been unscaled already.
        """
        step = self._steps.current()
        if step is not None and self._only_scaled(step):
            return [step.loss_scale] * len(grads)
        found = self._group.marks.look(grads)
        for each in found:
            if each is not None and each.origin in (Origin.UNTOUCHED, Origin.CHANGED):
                raise ValueError(
                    "`grads` must be gradients of the scaled loss, got one that "
                    "get_unscaled_gradients returned already. Unscale each gradient "
                    "once."
                )
        step = self._step()
        if step is None:
            step = self._follow(None)
        return self._divisors.of(found, step.loss_scale)

    def note_unscaled(self, unscaled: Unscaled) -> None:
        """Remembers gradients that are handed out to the user."""
        step = self._step() or self._follow(None)
        step.pending.append(unscaled)
        self._group.marks.mark_unscaled(unscaled.grads(), unscaled)

    def hand_in(self, grads: List[Any], is_divided_in_apply: bool) -> HandedIn:
        """Returns what is known of gradients that are to be applied.

        Args:
          grads: The gradients; some may be None.
          is_divided_in_apply: Whether this Keras's own wrapper divides in `apply`.
        """
        step = self._steps.current()
        if step is not None and self._only_scaled(step):
            step.applied = True
            self._note_apply()
            return _unchecked(grads, step.loss_scale, step.losses)
        if self._never_scaled(grads):
            self._warn(NEVER_SCALED)
        found = self._group.marks.look(grads)
        step = self._step(grads)
        origins = [each.origin for each in found if each is not None]
        foreign = origins.count(Origin.FOREIGN)
        is_told = foreign < len(origins)
        if foreign and (current_graph() is None or not is_told):
            handed = self._by_order(grads, found, step, is_divided_in_apply)
        else:
            handed = self._by_graph(grads, found, step)
        if step is not None:
            step.applied = True
        self._note_apply(self._divisors.read if is_told else None)
        return handed

    def _note_apply(self, read: Optional[Callable[[], Any]] = None) -> None:
        if current_graph() is not None:
            self._group.readings.note_apply(read)

    def _by_graph(
        self, grads: List[Any], found: List[Optional[Found]], step: Optional[Step]
    ) -> HandedIn:
        """Returns what the graph, or the very objects, tell of gradients."""
        losses = [] if step is None else step.losses
        lists = _lists(found)
        for each in lists:
            each.applied(grads)
        if step is not None:
            step.forget_applied()
        is_untouched = all(f is None or f.origin is Origin.UNTOUCHED for f in found)
        earlier = earlier_check([each for each in lists if each.is_here()], grads)
        if is_untouched and earlier is not None:
            # Across replicas they are divided before anybody knows: once is enough.
            is_alone = replicas.count() == 1
            before = before_division(lists, grads) if is_alone else None
            grads, divisors = before or (grads, [None] * len(grads))
            return HandedIn(grads, divisors, earlier, True, losses)
        last = None if step is None else step.loss_scale
        divisors = self._divisors.of(found, last)
        return HandedIn(grads, divisors, earlier, False, losses)

    def _by_order(
        self,
        grads: List[Any],
        found: List[Optional[Found]],
        step: Optional[Step],
        is_divided_in_apply: bool,
    ) -> HandedIn:
        """Returns what the order of calls tells of gradients."""
        if step is None:
            divisor = self._by_convention(grads, is_divided_in_apply)
            return _unchecked(grads, divisor, [])
        lists = _lists(found)
        rest = [g for g, f in zip(grads, found) if f and f.origin is Origin.FOREIGN]
        if not lists and any(each.were(rest) for each in (*step.pending, *step.older)):
            # Unscaled to be looked at, and applied as they were before.
            return _unchecked(grads, step.loss_scale, step.losses)
        chosen = covering(step.pending, rest)
        is_sure = bool(chosen) or not covering(step.older, rest)
        if not chosen and step.pending:
            chosen, is_sure = list(step.pending), False
        if not chosen:
            chosen = covering(self._pending_of_others(), rest)
            is_sure = is_sure and not chosen
        is_unscaled = bool(lists or chosen)
        if not is_sure:
            self._warn(AMBIGUOUS.format(assumed=_ASSUMED[not is_unscaled]))
        if not is_unscaled:
            return _unchecked(grads, step.loss_scale, step.losses)
        chosen = list({id(each): each for each in (*lists, *chosen)}.values())
        earlier = earlier_check(chosen, grads)
        for each in chosen:
            each.applied(grads)
        step.forget_applied()
        return HandedIn(grads, [None] * len(grads), earlier, False, step.losses)

    def _pending_of_others(self) -> List[Unscaled]:
        """Returns what other optimizers here unscaled, and did not apply."""
        steps = [m._steps.current() for m in self._group.members if m is not self]
        return [each for step in steps if step is not None for each in step.pending]

    def _only_scaled(self, step: Step) -> bool:
        """Tells whether all that ever happened to gradients here is scaling, by `step`.

        That is what `fit` does. The graph need not be asked then, which takes time.
        """
        is_alone = len(self._group.members) == 1
        has_unscaled = self._group.marks.has_unscaled or self.loss_scale.has_been_read
        return step.number > 0 and not step.applied and is_alone and not has_unscaled

    def _by_convention(self, grads: List[Any], is_divided_in_apply: bool) -> Any:
        """Returns what gradients are divided by whose loss was scaled elsewhere."""
        never_scaled = self._never_scaled(grads)
        is_divided = is_divided_in_apply and not never_scaled
        is_sure = is_divided_in_apply != self._group.marks.has_unscaled
        if not never_scaled and not (is_sure and self.loss_scale.has_scaled):
            self._warn(AMBIGUOUS.format(assumed=_ASSUMED[is_divided]))
        return self.loss_scale() if is_divided else None

    def _never_scaled(self, grads: List[Any]) -> bool:
        """Tells whether nobody has scaled the loss, here or where this is called."""
        has_scaled = self.loss_scale.has_scaled or self.loss_scale.has_been_read
        return not has_scaled and not are_arguments(grads)

    def _warn(self, message: str) -> None:
        """Says something once."""
        if message not in self._warned:
            self._warned.add(message)
            warn(message)

    def _step(self, grads: Sequence[Any] = ()) -> Optional[Step]:
        """Returns the step that gradients belong to which are handed over now.

        If the loss scale is shared, another optimizer may have scaled their loss.

        Args:
          grads: What is applied. It may be the rest of what was unscaled.
        """
        own = self._steps.current()
        if own is not None and not own.applied:
            return own
        if own is not None and covering(own.pending, list(grads)):
            return own
        steps = [member._steps.current() for member in self._group.members]
        steps.append(self._group.steps.current())
        scaled = [step for step in steps if step is not None and step.number]
        latest = max(scaled, key=lambda step: step.number, default=None)
        if latest is None or (own is not None and own.number >= latest.number):
            return own
        return self._follow(latest)

    def _follow(self, other: Optional[Step]) -> Step:
        """Begins a step whose loss another optimizer, or the user, has scaled."""
        step = self._steps.open(
            self.loss_scale() if other is None else other.loss_scale
        )
        if other is not None:
            step.losses, step.number = list(other.losses), other.number
            step.pending, step.older = other.pending, other.older
        return step


def _unchecked(grads: List[Any], divisor: Any, losses: List[Any]) -> HandedIn:
    """Returns unchecked gradients, all still to be divided by `divisor` or by None."""
    return HandedIn(grads, [divisor] * len(grads), None, False, losses)


def _lists(found: List[Optional[Found]]) -> List[Unscaled]:
    """Returns the lists of unscaled gradients that gradients come from, each once."""
    every = [each for one in found if one is not None for each in one.checks]
    return list({id(each): each for each in every}.values())
