"""One replica's gradients on their way from the wrapper to the inner optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Optional

from lossscale.gradients.check import CLEAN, Check
from lossscale.gradients.packing import groups_of_one, in_this_graph, pack, unpack
from lossscale.runtime.aliases import Divisors, Grads, Scalar, Tensor
from lossscale.scales.base import LossScale


@dataclass(eq=False)
class Bundle:
    """Gradients, what divides them, and what is known of them.

    No tensor and no list of them: `tf.distribute` takes it across replicas as a whole.
    Nothing in it is changed; each method returns a new one, or gradients.

    Attributes:
      loss_scale: What scaled them.
      grads: The gradients; some may be None. Small ones may be packed into one.
      divisors: What each is still to be divided by, a `float32` tensor of shape `[]`.
        None: it is unscaled.
      check: What is known of them: of when they were unscaled, in the end of the step.
      is_checked: Whether that is a check of them all as they are now.
      losses: The unscaled losses that they are of, the last ones.
      groups: The positions of the gradients that each of `grads` is made of.
    """

    loss_scale: LossScale
    grads: Grads
    divisors: Divisors
    check: Check = CLEAN
    is_checked: bool = False
    losses: List[Tensor] = field(default_factory=list)
    groups: List[List[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = self.groups or groups_of_one(len(self.grads))

    @property
    def count(self) -> int:
        """How many gradients were handed in."""
        return sum(map(len, self.groups))

    def but(self, **changes: Any) -> Bundle:
        """Returns a bundle in which some attributes are others."""
        return replace(self, **changes)

    def distinct_divisors(self) -> Divisors:
        """Returns the different divisors of gradients that are there."""
        pairs = zip(self.grads, self.divisors)
        found: Dict[int, Optional[Scalar]] = {
            id(by): by for grad, by in pairs if grad is not None
        }
        return list(found.values())

    def packed(self) -> Bundle:
        """Returns it with small gradients packed, if all are divided by the same."""
        if len(self.distinct_divisors()) > 1:
            return self
        grads, groups = pack(self.grads)
        divisors = [self.divisors[group[0]] for group in groups]
        return self.but(grads=grads, groups=groups, divisors=divisors)

    def quotients(self) -> Grads:
        """Returns the gradients divided, packed as they are."""
        distinct = self.distinct_divisors()
        if len(distinct) == 1:
            (divisor,) = distinct
            if divisor is None:
                return self.grads
            return list(self.loss_scale.unscale_by(self.grads, divisor))
        # Keras 3 wants all from one graph: those that are divided in a branch, and
        # others.
        return [
            in_this_graph(g) if by is None else self.loss_scale.unscale_by(g, by)
            for g, by in zip(self.grads, self.divisors)
        ]

    def divided(self) -> Bundle:
        """Returns it with nothing left to divide."""
        return self.but(grads=self.quotients(), divisors=[None] * len(self.grads))

    def unscaled(self) -> Grads:
        """Returns the gradients divided, and as many as were handed in."""
        return unpack(self.quotients(), self.groups)
