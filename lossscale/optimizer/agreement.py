"""Whether a step may be applied on every replica: one scalar crosses them for it."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional

import tensorflow as tf

from lossscale.gradients import faults
from lossscale.gradients.faults import Check
from lossscale.gradients.finite import (
    Finiteness,
    each_is_finite,
    floating_values,
    sum_is_finite,
    sum_stays_finite,
)
from lossscale.optimizer.unscaling import Prepared
from lossscale.runtime import replicas


class Agreed(NamedTuple):
    """What the replicas know together of a step.

    Attributes:
      finiteness: Whether the step may be applied, equal on all replicas.
      codes_of_sum: The fault codes that only the sum of all replicas' gradients has.
        None: it cannot have any.
    """

    finiteness: Finiteness
    codes_of_sum: Any


class Agreement:
    """Whether a step may be applied. Each replica's vote is one scalar.

    A replica whose gradients are not finite votes `replicas + 1`. One whose gradients
    are so large that their sum with the others' might not be finite votes 1. If the
    votes add up to 0, the step may be applied, and to `replicas + 1` or more, it may
    not. Only between them, which almost never happens, must the gradients be added up
    to see.

    One replica has nobody to tell: its vote is a sum that proves its gradients finite,
    and the rest can wait for the branch that needs it.

    Attributes:
      vote: This replica's vote, a `float32` tensor of shape `[]`. Of one replica alone
        a `bool` tensor: the cheap proof.
    """

    def __init__(self, prepared: Prepared, sums: bool) -> None:
        grads, self._groups = prepared.grads, prepared.groups
        self._is_checked = prepared.is_checked
        self._replicas = replicas.count()
        self._sums = sums and self._replicas > 1
        # Sparse gradients are concatenated, not added.
        self._added = [i for i, grad in enumerate(grads) if _is_added(grad)]
        is_small: Any = True
        if self._sums:
            is_small = sum_stays_finite(grads, self._replicas)
        earlier = prepared.earlier
        if earlier is not None and self._is_checked:
            proof = earlier.is_finite
        else:
            now = is_small if self._sums else sum_is_finite(floating_values(grads))
            proof = _and_earlier(earlier, now)
        if self._replicas == 1:
            self.vote = proof
            return
        look = None if self._is_checked else lambda: self._look(grads, earlier)
        doubt = tf.where(is_small, 0.0, 1.0)
        is_finite = Finiteness(proof, look).exact()
        self.vote = tf.where(is_finite, doubt, self._replicas + 1.0)

    def _look(self, grads: List[Any], earlier: Optional[Check]) -> Any:
        return _and_earlier(earlier, each_is_finite(floating_values(grads)))

    def agree(self, vote: Any, grads: Any, earlier: Any) -> Agreed:
        """Returns what the replicas know together of a step.

        Args:
          vote: `self.vote` as it came through `replicas.merge_call`.
          grads: The gradients that were prepared, as they came through it.
          earlier: Their earlier check, as it came through it.
        """
        if self._replicas == 1:

            def look() -> Any:
                found = replicas.call_for_each_replica(self._look, grads, earlier)
                return replicas.local_result(found)

            proof = replicas.local_result(vote)
            return Agreed(Finiteness(proof, None if self._is_checked else look), None)
        votes = replicas.all_reduce_sum(vote)
        is_clear = tf.equal(votes, 0.0)
        if not self._sums:
            return Agreed(Finiteness(is_clear), None)
        in_doubt = tf.logical_and(votes > 0.0, votes < self._replicas + 1.0)
        clean = faults.clean(sum(map(len, self._groups)))
        is_finite, codes_of_sum = tf.cond(
            in_doubt,
            lambda: tuple(self._check_sum(grads)),
            lambda: (is_clear, clean.codes),
        )
        return Agreed(Finiteness(is_finite), codes_of_sum)

    def codes(self, grads: List[Any], earlier: Optional[Check]) -> Any:
        """Returns the fault codes of one replica's gradients, in the branch that skips.

        Args:
          grads: This replica's gradients, as they were prepared.
          earlier: Their earlier check.

        Returns:
          A `float32` tensor of shape `[gradients]`.
        """
        now = None if self._is_checked else faults.check_each(grads, self._groups)
        return faults.combine(earlier, now).codes

    def _check_sum(self, grads: List[Any]) -> Check:
        terms = replicas.call_for_each_replica(self._terms, grads)
        sums = [None] * len(self._groups)
        for position, term in zip(self._added, terms):
            sums[position] = replicas.all_reduce_sum(term)
        return faults.check(sums, self._groups)

    def _terms(self, grads: List[Any]) -> List[Any]:
        # Of three or more terms the order decides whether they overflow, and it is the
        # strategy's: if the sum of their magnitudes is finite, every order is.
        as_added = tf.identity if self._replicas == 2 else tf.abs
        return [as_added(_real(grads[position])) for position in self._added]


def _and_earlier(earlier: Optional[Check], is_finite: Any) -> Any:
    return (
        is_finite if earlier is None else tf.logical_and(earlier.is_finite, is_finite)
    )


def _is_added(grad: Any) -> bool:
    return not isinstance(grad, tf.IndexedSlices) and bool(floating_values([grad]))


def _real(grad: Any) -> Any:
    """Returns a gradient as one tensor of real numbers."""
    values = floating_values([grad])
    return values[0] if len(values) == 1 else tf.stack(values)
