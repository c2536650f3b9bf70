"""Whether a step may be applied on every replica: one scalar crosses them for it."""

from __future__ import annotations

from typing import Any, List, Tuple

import tensorflow as tf

from lossscale import check, replicas
from lossscale.check import Check
from lossscale.finite import floating_values, sum_stays_finite
from lossscale.optimizer.unscaling import Prepared


class Verdict:
    """Whether a step may be applied, sent across replicas as one scalar.

    A replica whose gradients are not finite adds `replicas + 1` to the scalar. One
    whose gradients are so large that their sum with the others' might not be finite
    adds 1. Then 0 proves that the step may be applied, and `replicas + 1` or more that
    it may not. Only between them, which almost never happens, must the gradients be
    added up to see.

    Attributes:
      code: This replica's term of the sum, a `float32` tensor of shape `[]`.
      faults: The codes of this replica's gradients, a `float32` tensor of shape
        `[gradients]`.
    """

    def __init__(self, prepared: Prepared, sums: bool) -> None:
        grads, self._groups = prepared.grads, prepared.groups
        self._terms = replicas.count()
        self._sums = sums and self._terms > 1
        # Sparse gradients are concatenated, not added.
        self._added = [i for i, grad in enumerate(grads) if _is_added(grad)]
        is_small: Any = True
        if self._sums:
            is_small = sum_stays_finite(grads, self._terms)
        seen = check.both(prepared.known, self._check(prepared, is_small))
        doubt = tf.where(is_small, 0.0, 1.0)
        self.code = tf.where(seen.is_finite, doubt, self._terms + 1.0)
        self.faults = seen.faults

    def _check(self, prepared: Prepared, is_small: Any) -> Any:
        if prepared.is_checked:
            return None
        if is_small is True:
            return check.check(prepared.grads, prepared.groups)
        found = tf.cond(
            is_small,
            lambda: tuple(check.clean(sum(map(len, prepared.groups)))),
            lambda: tuple(check.check(prepared.grads, prepared.groups)),
        )
        return Check(*found)

    def read(self, code: Any, grads: Any) -> Tuple[Any, Any]:
        """Returns what the replicas know together of a step.

        Args:
          code: `self.code` as it came through `replicas.once`.
          grads: The gradients that were prepared, as they came through it.

        Returns:
          is_finite: The agreed flag.
          faults: The faults that only the sum of all replicas' gradients has.
        """
        code = replicas.total(code)
        settled = tf.equal(code, 0.0)
        clean = check.clean(sum(map(len, self._groups)))
        if not self._sums:
            return settled, clean.faults
        in_doubt = tf.logical_and(code > 0.0, code < self._terms + 1.0)
        return tuple(
            tf.cond(
                in_doubt,
                lambda: tuple(self._check_sum(grads)),
                lambda: (settled, clean.faults),
            )
        )

    def _check_sum(self, grads: List[Any]) -> Check:
        terms = replicas.for_each(self._terms_added, grads)
        sums = [None] * len(self._groups)
        for position, term in zip(self._added, terms):
            sums[position] = replicas.total(term)
        return check.check(sums, self._groups)

    def _terms_added(self, grads: List[Any]) -> List[Any]:
        # Of three or more terms the order decides whether they overflow, and it is the
        # strategy's: if the sum of their magnitudes is finite, every order is.
        as_added = tf.identity if self._terms == 2 else tf.abs
        return [as_added(_real(grads[position])) for position in self._added]


def _is_added(grad: Any) -> bool:
    return not isinstance(grad, tf.IndexedSlices) and bool(floating_values([grad]))


def _real(grad: Any) -> Any:
    """Returns a gradient as one tensor of real numbers."""
    values = floating_values([grad])
    return values[0] if len(values) == 1 else tf.stack(values)
