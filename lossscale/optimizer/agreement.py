"""Whether a step may be applied on every replica: one scalar crosses them for it."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional

import tensorflow as tf

from lossscale.gradients import faults
from lossscale.gradients.faults import Check
from lossscale.gradients.finite import (
    each_is_finite,
    exactly,
    floating_values,
    sum_is_finite,
    sum_stays_finite,
)
from lossscale.optimizer.unscaling import Prepared
from lossscale.runtime import replicas


class Finding(NamedTuple):
    """What the replicas know together of a step.

    Attributes:
      surely_finite: A `bool` tensor of shape `[]`. If True, the step may be applied.
      find_out: To be called where that is False, perhaps within a branch. Returns the
        exact flag. None: `surely_finite` is exact.
      faults_of_sum: The faults that only the sum of all replicas' gradients has. None:
        it cannot have any.
    """

    surely_finite: Any
    find_out: Optional[Callable[[], Any]]
    faults_of_sum: Any


class Verdict:
    """Whether a step may be applied, sent across replicas as one scalar.

    A replica whose gradients are not finite adds `replicas + 1` to the scalar. One
    whose gradients are so large that their sum with the others' might not be finite
    adds 1. Then 0 proves that the step may be applied, and `replicas + 1` or more that
    it may not. Only between them, which almost never happens, must the gradients be
    added up to see.

    One replica has nobody to tell: its check goes no further than a sum that proves
    them finite, and the rest can wait for the branch that needs it.

    Attributes:
      code: This replica's term of the sum, a `float32` tensor of shape `[]`. Of one
        replica alone a `bool` tensor: what it knows so far.
    """

    def __init__(self, prepared: Prepared, sums: bool) -> None:
        grads, self._groups = prepared.grads, prepared.groups
        self._is_checked = prepared.is_checked
        self._terms = replicas.count()
        self._sums = sums and self._terms > 1
        # Sparse gradients are concatenated, not added.
        self._added = [i for i, grad in enumerate(grads) if _is_added(grad)]
        is_small: Any = True
        if self._sums:
            is_small = sum_stays_finite(grads, self._terms)
        known = prepared.known
        if known is not None and self._is_checked:
            surely_finite = known.is_finite
        else:
            proof = is_small if self._sums else sum_is_finite(floating_values(grads))
            surely_finite = _and_known(known, proof)
        if self._terms == 1:
            self.code = surely_finite
            return
        rest = None if self._is_checked else lambda: self._exactly(grads, known)
        doubt = tf.where(is_small, 0.0, 1.0)
        is_finite = exactly(surely_finite, rest)
        self.code = tf.where(is_finite, doubt, self._terms + 1.0)

    def _exactly(self, grads: List[Any], known: Optional[Check]) -> Any:
        return _and_known(known, each_is_finite(floating_values(grads)))

    def read(self, code: Any, grads: Any, known: Any) -> Finding:
        """Returns what the replicas know together of a step.

        Args:
          code: `self.code` as it came through `replicas.once`.
          grads: The gradients that were prepared, as they came through it.
          known: What was known of them when they were, as it came through it.
        """
        if self._terms == 1:

            def find_out() -> Any:
                return replicas.first(replicas.for_each(self._exactly, grads, known))

            rest = None if self._is_checked else find_out
            return Finding(replicas.first(code), rest, None)
        code = replicas.total(code)
        settled = tf.equal(code, 0.0)
        if not self._sums:
            return Finding(settled, None, None)
        in_doubt = tf.logical_and(code > 0.0, code < self._terms + 1.0)
        clean = faults.clean(sum(map(len, self._groups)))
        is_finite, faults_of_sum = tf.cond(
            in_doubt,
            lambda: tuple(self._check_sum(grads)),
            lambda: (settled, clean.faults),
        )
        return Finding(is_finite, None, faults_of_sum)

    def faults(self, grads: List[Any], known: Optional[Check]) -> Any:
        """Returns the codes of one replica's gradients. For the branch that skips.

        Args:
          grads: This replica's gradients, as they were prepared.
          known: What was known of them then.

        Returns:
          A `float32` tensor of shape `[gradients]`.
        """
        now = None if self._is_checked else faults.check_each(grads, self._groups)
        return faults.both(known, now).faults

    def _check_sum(self, grads: List[Any]) -> Check:
        terms = replicas.for_each(self._terms_added, grads)
        sums = [None] * len(self._groups)
        for position, term in zip(self._added, terms):
            sums[position] = replicas.total(term)
        return faults.check(sums, self._groups)

    def _terms_added(self, grads: List[Any]) -> List[Any]:
        # Of three or more terms the order decides whether they overflow, and it is the
        # strategy's: if the sum of their magnitudes is finite, every order is.
        as_added = tf.identity if self._terms == 2 else tf.abs
        return [as_added(_real(grads[position])) for position in self._added]


def _and_known(known: Optional[Check], is_finite: Any) -> Any:
    return is_finite if known is None else tf.logical_and(known.is_finite, is_finite)


def _is_added(grad: Any) -> bool:
    return not isinstance(grad, tf.IndexedSlices) and bool(floating_values([grad]))


def _real(grad: Any) -> Any:
    """Returns a gradient as one tensor of real numbers."""
    values = floating_values([grad])
    return values[0] if len(values) == 1 else tf.stack(values)
