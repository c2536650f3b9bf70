"""The step that the wrappers of all Kerases share: check, agree, adjust, apply or skip.

Nothing here knows a rule of a loss scale, or a Keras.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, List, Optional, Tuple

import tensorflow as tf

from lossscale import compiled, replicas
from lossscale.base import LossScale, grouped
from lossscale.finite import (
    all_finite,
    each_is_finite,
    floating_values,
    split_by_size,
    sum_is_finite,
    sum_stays_finite,
)
from lossscale.optimizer import sharing
from lossscale.packing import pack


def apply_or_skip(
    optimizer: Any,
    loss_scale: LossScale,
    grads: List[Any],
    variables: Any,
    apply: Callable[..., Any],
    *,
    divisor: Optional[Any],
    is_finite: Optional[Any],
    is_checked: bool,
    aggregates: bool,
) -> Any:
    """Unscales gradients and applies them, or skips them on every replica.

    They are applied only if they were finite on every replica when they were unscaled
    (`is_finite`), are so now, and stay so when they are added up across replicas: two
    float16 gradients of 4e4 are finite, their sum is not. A skipped step changes
    nothing but the loss scale's own state.

    Args:
      optimizer: The wrapper, one of those that share `loss_scale`.
      loss_scale: What is adjusted to the step.
      grads: This replica's gradients; some may be None.
      variables: What the gradients are applied to.
      apply: Called as `apply(grads, variables)` on each replica unless the step is
        skipped. It must hold nothing that differs between replicas.
      divisor: What they are still to be divided by, a `float32` tensor of shape `[]`.
        None: they are unscaled.
      is_finite: A `bool` tensor of shape `[]`, whether they were finite on this replica
        when they were unscaled. None if that is not known.
      is_checked: Whether they have not been changed since, so that `is_finite` holds.
      aggregates: Whether `apply` adds the gradients up across replicas.

    Returns:
      In a graph, an op that does it all. None in eager mode.
    """
    if not loss_scale.checks_gradients:
        return grouped([apply(_unscaled(loss_scale, grads, divisor), variables)])
    prepared = _prepared(loss_scale, grads, divisor, is_finite, is_checked)
    grads, change, is_finite, is_checked = prepared
    unchecked = [] if is_checked else grads
    verdict = _Verdict(grads, unchecked, is_finite, aggregates)

    def settle(code: Any, grads: Any) -> Tuple[Any, Any]:
        return _update(optimizer, loss_scale, verdict.read(code, grads), grads)

    def branch(code: Any, grads: Any, held: Any) -> Any:
        update_op, should_apply = settle(code, grads)

        def apply_everywhere() -> Any:
            return _done(replicas.for_each(_apply_held, apply, change, grads, held))

        if should_apply is True:  # a rule that applies every step needs no branch
            done = apply_everywhere()
        else:
            done = compiled.run_if(should_apply, apply_everywhere)
        return grouped([done, update_op])

    if not tf.executing_eagerly():
        return replicas.once(branch, verdict.code, grads, _Held(variables))
    # Python's own branch may stand in replica context: no thread needs to start anew.
    _, should_apply = replicas.once(settle, verdict.code, grads)
    if bool(should_apply):
        apply(change(grads), variables)
    return None


def _prepared(
    loss_scale: LossScale, grads: List[Any], divisor: Any, is_finite: Any, checked: bool
) -> Tuple[List[Any], Callable[[List[Any]], List[Any]], Any, bool]:
    """Returns what the branch takes, what it does to them first, and what is known."""
    if divisor is not None and _unscales_in_branch(loss_scale):
        now_finite = _quotients_are_finite(loss_scale, grads, divisor)
        unscale = functools.partial(_unscaled, loss_scale, divisor=divisor)
        return grads, unscale, _both(is_finite, now_finite), True
    if checked or not _is_plain(loss_scale):
        return _unscaled(loss_scale, grads, divisor), list, is_finite, checked
    packed, unpack = pack(grads)
    return _unscaled(loss_scale, packed, divisor), unpack, is_finite, False


def unscale_and_check(
    loss_scale: LossScale, grads: List[Any], divisor: Any
) -> Tuple[List[Any], Any]:
    """Returns unscaled gradients, and whether they are finite on this replica.

    The flag is None if `loss_scale` does not want to know.
    """
    if not loss_scale.checks_gradients:
        return _unscaled(loss_scale, grads, divisor), None
    if compiled.in_xla():
        is_finite = _quotients_are_finite(loss_scale, grads, divisor)
        return _unscaled(loss_scale, grads, divisor), is_finite
    packed, unpack = pack(grads)
    packed = _unscaled(loss_scale, packed, divisor)
    return unpack(packed), all_finite(packed)


def _unscaled(loss_scale: LossScale, grads: List[Any], divisor: Any) -> List[Any]:
    if divisor is None:
        return grads
    return list(loss_scale.unscale_by(grads, divisor))


def _unscales_in_branch(loss_scale: LossScale) -> bool:
    """Tells whether to unscale within the branch, where XLA fuses it into the update.

    Elsewhere gradients are divided first: that runs in place, and the sum that checks
    them finds the smaller ones in the processor's cache.
    """
    return compiled.in_xla() and replicas.count() == 1 and _is_plain(loss_scale)


def _is_plain(loss_scale: LossScale) -> bool:
    """Tells whether `loss_scale` never looks at the gradients itself."""
    return type(loss_scale).update is LossScale.update


def _quotients_are_finite(loss_scale: LossScale, grads: List[Any], divisor: Any) -> Any:
    """Tells whether gradients are finite once unscaled, from the scaled ones.

    XLA would otherwise keep the unscaled ones in memory for the exact check. Divided by
    1 or more, what is finite stays so, and what is not does. Below 1 it may overflow,
    and only the exact check of the quotients can tell.

    Small gradients are checked exactly at once: it takes no longer to run, and XLA
    compiles 1,000 of them in 14 s instead of 59 (TensorFlow 2.21, two CPU cores).
    """
    small, large = split_by_size(floating_values(grads))

    def exactly(values: List[Any]) -> Any:
        return each_is_finite(_unscaled(loss_scale, values, divisor))

    if not large:
        return exactly(small)
    large_are_finite = tf.cond(
        tf.logical_and(divisor >= 1.0, sum_is_finite(large)),
        lambda: tf.constant(True),
        lambda: exactly(large),
    )
    return tf.logical_and(exactly(small), large_are_finite)


def _both(one: Optional[Any], other: Any) -> Any:
    return other if one is None else tf.logical_and(one, other)


class _Held:
    """Hides variables from tf.distribute, which would hand on one replica's copy.

    Optimizers expect the mirrored variable, in replica context too.
    """

    def __init__(self, variables: Any) -> None:
        self.variables = variables


def _apply_held(
    apply: Callable[..., Any], change: Callable[..., Any], grads: Any, held: _Held
) -> Any:
    return apply(change(grads), held.variables)


class _Verdict:
    """Whether a step may be applied, sent across replicas as one scalar.

    A replica whose gradients are not finite adds `replicas + 1` to the scalar. One
    whose gradients are so large that their sum with the others' might not be finite
    adds 1. Then 0 proves that the step may be applied, and `replicas + 1` or more that
    it may not. Only between them, which almost never happens, must the gradients be
    added up to see.

    Attributes:
      code: This replica's term of the sum, a `float32` tensor of shape `[]`.
    """

    def __init__(
        self, grads: List[Any], unchecked: List[Any], is_finite: Any, sums: bool
    ) -> None:
        self._terms = replicas.count()
        self._sums = sums and self._terms > 1
        if self._sums:
            is_small = sum_stays_finite(grads, self._terms)
            now_finite = tf.cond(is_small, lambda: True, lambda: all_finite(unchecked))
        else:
            is_small = True
            now_finite = all_finite(unchecked)
        now_finite = _both(is_finite, now_finite)
        doubt = tf.where(is_small, 0.0, 1.0)
        self.code = tf.where(now_finite, doubt, self._terms + 1.0)

    def read(self, code: Any, grads: Any) -> Any:
        """Returns the agreed flag: `code` and `grads` as they came through `once`."""
        code = replicas.total(code)
        if not self._sums:
            return tf.equal(code, 0.0)
        in_doubt = tf.logical_and(code > 0.0, code < self._terms + 1.0)
        return tf.cond(
            in_doubt,
            lambda: self._sum_is_finite(grads),
            lambda: tf.equal(code, 0.0),
        )

    def _sum_is_finite(self, grads: List[Any]) -> Any:
        terms = replicas.for_each(self._terms_added, grads)
        return all_finite([replicas.total(term) for term in terms])

    def _terms_added(self, grads: List[Any]) -> List[Any]:
        # Sparse gradients are concatenated, not added. Of three or more terms the order
        # decides whether they overflow, and it is the strategy's: if the sum of their
        # magnitudes is finite, every order is.
        dense = [grad for grad in grads if not isinstance(grad, tf.IndexedSlices)]
        as_added = tf.identity if self._terms == 2 else tf.abs
        return [as_added(value) for value in floating_values(dense)]


def _update(
    optimizer: Any, loss_scale: LossScale, is_finite: Any, grads: List[Any]
) -> Tuple[Any, Any]:
    if _is_plain(loss_scale):
        return sharing.adjust(loss_scale, optimizer, is_finite), is_finite
    # A subclass that overrides update whole sees the gradients, and with them a scalar
    # that is finite only if the step was: the gradients may have been clipped since.
    flag = tf.where(is_finite, 0.0, float("nan"))
    return loss_scale.update([*grads, flag])


def _done(result: Any) -> Any:
    """Returns a tensor of shape `[]` that depends on `result`, for tf.cond."""
    op = grouped([result])
    with tf.control_dependencies([] if op is None else [op]):
        return tf.constant(True)
