"""A bundle: one replica's gradients on their way to the inner optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Optional

from lossscale.gradients.check import CLEAN, Check
from lossscale.gradients.packing import groups_of_one, in_this_graph, pack, unpack
from lossscale.runtime.aliases import Divisors, Grads, Scalar, Tensor
from lossscale.scales.base import LossScale


@dataclass(eq=False)
class Bundle:
    """Gradients, their divisors, and their check.

    A bundle is no tensor and no list, so `tf.distribute` takes it across replicas as a
    whole. No method changes a bundle: each returns a new one, or gradients.

    Attributes:
      loss_scale: The loss scale that multiplied the gradients' loss.
      grads: The gradients; some may be None. Small ones may be packed into one.
      divisors: What each gradient must still be divided by, a `float32` tensor of shape
        `[]`. None: the gradient is unscaled.
      check: What is known of the gradients: first the check of when they were unscaled,
        at the end the check of the whole step.
      is_checked: Whether `check` covers all gradients as they are now.
      losses: The last losses of these gradients, before they were scaled.
      groups: For each of `grads`, the positions of the gradients that are packed in it.
    """

    loss_scale: LossScale
    grads: Grads
    divisors: Divisors
    check: Check = CLEAN
    is_checked: bool = False
    losses: List[Optional[Tensor]] = field(default_factory=list)
    groups: List[List[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = self.groups or groups_of_one(len(self.grads))

    @property
    def count(self) -> int:
        """How many gradients there are, before any were packed."""
        return sum(map(len, self.groups))

    def but(self, **changes: Any) -> Bundle:
        """Returns a copy of the bundle in which these attributes are changed."""
        return replace(self, **changes)

    def distinct_divisors(self) -> Divisors:
        """Returns the different divisors of the gradients that are not None."""
        pairs = zip(self.grads, self.divisors)
        found: Dict[int, Optional[Scalar]] = {
            id(by): by for grad, by in pairs if grad is not None
        }
        return list(found.values())

    def packed(self) -> Bundle:
        """Returns the bundle with small gradients packed, if it has one divisor."""
        if len(self.distinct_divisors()) > 1:
            return self
        grads, groups = pack(self.grads)
        divisors = [self.divisors[group[0]] for group in groups]
        return self.but(grads=grads, groups=groups, divisors=divisors)

    def quotients(self) -> Grads:
        """Returns the gradients divided by their divisors. Packed ones stay packed."""
        distinct = self.distinct_divisors()
        if len(distinct) == 1:
            (divisor,) = distinct
            if divisor is None:
                return self.grads
            return list(self.loss_scale.unscale_by(self.grads, divisor))
        # Keras 3 wants all gradients from one graph, but a division in a branch makes
        # tensors of the branch's graph.
        return [
            in_this_graph(g) if by is None else self.loss_scale.unscale_by(g, by)
            for g, by in zip(self.grads, self.divisors)
        ]

    def divided(self) -> Bundle:
        """Returns the bundle after the division, so that nothing is left to divide."""
        return self.but(grads=self.quotients(), divisors=[None] * len(self.grads))

    def unscaled(self) -> Grads:
        """Returns the gradients divided by their divisors, and unpacked."""
        return unpack(self.quotients(), self.groups)
