"""Reduction: how the replicas of one step come to one answer."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Callable, Dict, Optional, Tuple, Union

import tensorflow as tf

from lossscale import arguments
from lossscale.gradients import arithmetic
from lossscale.gradients import bundle as bundles
from lossscale.gradients import check as checks
from lossscale.gradients.arithmetic import multiply
from lossscale.gradients.bundle import Bundle
from lossscale.gradients.check import NO_CHECK, Check
from lossscale.optimizer.record import worst_numbers
from lossscale.runtime import op_callbacks, replicas
from lossscale.runtime.aliases import Flag, Grad, Scalar, Tensor
from lossscale.runtime.control import either


class EqualReplicas:
    """One replica, or several that hold equal sums: each finds the flag by itself."""

    def check(self, bundle: Bundle) -> Tuple[Bundle, Flag]:
        """Returns the checked bundle, and what this replica contributes to `reduce`."""
        checked = bundles.check_as_applied(bundle)
        return checked, checked.check.exact()

    def reduce(self, contributions: Flag, bundle: Bundle) -> Check:
        """Returns the check of the whole step, given what all replicas contribute."""
        largest = replicas.local_result(bundle).check.largest
        return Check(replicas.local_result(contributions), largest=largest)

    def loss_is_at_fault(self, bundle: Bundle) -> Flag:
        """Whether an unscaled loss was not finite on any replica. For a bad step.

        A sum of gradients does not show whether those of a good loss overflowed, too.
        """
        bad = replicas.call_for_each_replica(_bad_losses, bundle)
        return replicas.all_reduce_sum(bad) > 0.0


class Workers(EqualReplicas):
    """Workers that `tf.distribute` does not know: each sends a vector to all others.

    It holds whether the worker's gradients are finite, their greatest magnitude, and,
    if they are not finite, the worst number of each and of its losses. If workers
    differ in these numbers, they had not summed their gradients before: then a worker
    with a finite loss overflowed by itself, and no bad loss of another is at fault.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor]) -> None:
        if not callable(gather):
            got = arguments.typed(gather)
            raise TypeError(f"`gather` must be a function, got {got}. Write {_GATHER}.")
        if replicas.count() > 1 or replicas.train_apart():
            raise ValueError(
                "`gather` must be None under a strategy of several replicas, which "
                f"knows them, got {arguments.shown(gather)}. Leave it out."
            )
        self._gather = gather

    def check(self, bundle: Bundle) -> Tuple[Bundle, Flag]:
        checked = bundles.check_as_applied(bundle)
        is_finite, largest = checked.check.exact(), checked.check.largest
        clear = checks.no_faults(checked.count + 1)
        worst = either(is_finite, lambda: clear, partial(worst_numbers, checked))
        number = 0.0 if largest is None else arithmetic.bounded(is_finite, largest)
        sent = tf.concat([[tf.cast(is_finite, tf.float32), number], worst], 0)
        of_all, shape = tf.convert_to_tensor(self._gather(sent)), [None, *sent.shape]
        if of_all.dtype != sent.dtype or not of_all.shape.is_compatible_with(shape):
            raise ValueError(
                f"`gather` must return float32 of shape {shape}, a row of each worker, "
                f"got {of_all.dtype.name} of shape {of_all.shape}. Write {_GATHER}."
            )
        of_all = tf.ensure_shape(of_all, shape)
        are_bad, faults, losses = of_all[:, 0] < 1.0, of_all[:, 2:-1], of_all[:, -1]
        kinds = tf.stack([tf.math.is_nan(faults), tf.math.is_inf(faults)])
        differ = tf.reduce_any(tf.not_equal(kinds, kinds[:, :1]))
        overflowed = tf.reduce_any(tf.logical_and(are_bad, tf.math.is_finite(losses)))
        self._none_overflowed = tf.logical_not(tf.logical_and(overflowed, differ))
        all_finite = tf.logical_not(tf.reduce_any(are_bad))
        largest = None if largest is None else tf.reduce_max(of_all[:, 1])
        check = Check(all_finite, None, lambda: tf.reduce_sum(faults, 0), largest)
        return checked.but(check=check, losses=[losses]), all_finite

    def loss_is_at_fault(self, bundle: Bundle) -> Flag:
        return tf.logical_and(super().loss_is_at_fault(bundle), self._none_overflowed)


class SeveralReplicas:
    """Several replicas: one scalar of each is all-reduced.

    ```
    a replica contributes   0             its gradients are finite, and small enough
                            1             finite, but the sum over replicas may overflow
                            replicas + 1  not finite
    the sum of these says   0             apply
                            1 to replicas add the gradients up, and look at the sum
                            more          skip
    ```

    Two float16 gradients of 4e4 are finite, and their sum is not. If the loss scale
    requests it, the greatest magnitude of each replica crosses in the same message.
    """

    def __init__(self, are_added: bool) -> None:
        """`are_added` tells whether the optimizer adds their gradients up."""
        self._are_added = are_added
        self._count = replicas.count()

    def check(self, bundle: Bundle) -> Tuple[Bundle, Tensor]:
        finite = 0.0
        if self._are_added:
            is_safe = checks.sum_stays_finite(bundle.grads, self._count)
            if bundle.has_duplicates:
                rows_are_safe = bundles.row_sums_stay_finite(bundle, self._count)
                is_safe = tf.logical_and(is_safe, rows_are_safe)
            # What is safe to add up is finite: no other quick check is needed.
            finite = tf.where(is_safe, 0.0, 1.0)
            checked = bundles.check_as_applied(bundle, is_safe)
        else:
            checked = bundles.check_as_applied(bundle)
        is_finite, largest = checked.check.exact(), checked.check.largest
        contribution = tf.where(is_finite, finite, self._count + 1.0)
        if largest is None:
            return checked, contribution
        slots = replicas.in_own_slot(arithmetic.bounded(is_finite, largest))
        return checked, tf.concat([[contribution], slots], 0)

    def reduce(self, contributions: Tensor, bundle: Bundle) -> Check:
        total, largest = replicas.all_reduce_sum(contributions), None
        # Only the structure of this bundle is used, which is equal on all replicas.
        local = replicas.local_result(bundle)
        if local.check.largest is not None:
            total, largest = total[0], tf.reduce_max(total[1:])
        is_clear = tf.equal(total, 0.0)
        if not self._are_added:
            return Check(is_clear, largest=largest)

        def look_at_sum() -> Tuple[Flag, Tensor]:
            sums = [None] * len(local.groups)
            terms = replicas.call_for_each_replica(self._terms, bundle)
            for position, term in terms.items():
                sums[position] = replicas.all_reduce_sum(term)
            worst = checks.worst_of_each(sums, local.groups)
            return tf.math.is_finite(tf.reduce_sum(worst)), worst

        is_in_doubt = tf.logical_and(total > 0.0, total < self._count + 1.0)
        clear = is_clear, checks.no_faults(local.count)
        is_finite, worst = tf.cond(is_in_doubt, look_at_sum, lambda: clear)
        return Check(is_finite, None, lambda: worst, largest)

    def loss_is_at_fault(self, bundle: Bundle) -> Flag:
        """Whether a loss was bad, and no replica with finite losses overflowed."""

        def faults(local: Bundle) -> Tensor:
            is_bad = local.has_bad_loss()
            is_good = tf.logical_or(is_bad, local.check.exact())
            return tf.cast(tf.stack([is_bad, tf.logical_not(is_good)]), tf.float32)

        of_all = replicas.call_for_each_replica(faults, bundle)
        losses, overflows = tf.unstack(replicas.all_reduce_sum(of_all))
        return tf.logical_and(losses > 0.0, tf.equal(overflows, 0.0))

    def _terms(self, bundle: Bundle) -> Dict[int, Tensor]:
        """Returns what one replica adds to the sum that is looked at, by position.

        The strategy chooses the order of the sum. Of three or more terms the magnitudes
        are summed: if that is finite, so is the sum in every order. Sparse gradients
        are concatenated, and their duplicate rows summed when they are applied.
        """
        as_added = tf.identity if self._count == 2 else tf.abs
        terms: Dict[int, Tensor] = {}
        for position, grad in enumerate(bundle.grads):
            is_sparse = isinstance(grad, tf.IndexedSlices)
            values = [] if is_sparse else checks.floating_values([grad])
            if values:  # a complex gradient has two
                value = values[0] if len(values) == 1 else tf.stack(values)
                terms[position] = as_added(value)
            elif bundles.may_have_duplicates(grad) and grad.dense_shape is not None:
                terms[position] = bundles.magnitudes_of_rows(grad)
        return terms


def _bad_losses(bundle: Bundle) -> Tensor:
    return tf.cast(bundle.has_bad_loss(), tf.float32)


Reduction = Union[EqualReplicas, Workers, SeveralReplicas]
#: What `gather` is with Horovod, for errors.
_GATHER = "gather=lambda x: hvd.allgather(x[tf.newaxis])"


def refuse_own_losses() -> None:
    """Raises if each of several workers of Horovod would decide from its own losses."""
    horovod: Any = sys.modules.get("horovod.tensorflow")
    if horovod and horovod.is_initialized() and horovod.size() > 1:
        raise ValueError(
            "`nonfinite_loss` must be 'backoff' if Horovod's workers cannot agree, got "
            f"'skip'. Pass {_GATHER}, or set it as optimizer.engine.gather."
        )


def refuse_dtype(dtype: str) -> None:
    """Raises if replicas cannot exchange a sum in this dtype here."""
    if not replicas.can_sum(dtype):
        raise ValueError(
            "`communication_dtype` must be 'float16' or None with this TensorFlow, got "
            f"{dtype!r}, which its collectives cannot sum. Pass 'float16'."
        )
    if replicas.train_apart():
        raise ValueError(
            "`communication_dtype` must be None under ParameterServerStrategy, got "
            f"{dtype!r}: replicas exchange no sum there. Leave it out."
        )


@op_callbacks.paused()
def summed(bundle: Bundle, dtype: str) -> Bundle:
    """Returns the sum of all replicas' gradients, still scaled and equal on all.

    Earlier overflows cross with it, since clipping may have hidden them.
    """
    if replicas.count() == 1:
        return bundle
    scale, unknown = bundle.loss_scale._value(), bundle.of_unknown
    # Whatever is known of a gradient, it crosses with the loss scale as a factor.
    factors = [
        scale if by is None else scale / by if by is unknown else None
        for by in bundle.divisors
    ]
    sent = [_as_sent(grad, by, dtype) for grad, by in zip(bundle.grads, factors)]
    check, largest = bundle.check.without_gradients(bundle.count), None
    if bundle.loss_scale.last_largest is not None:  # of each replica, not of the sum
        largest = replicas.greatest(bundles.largest_before_clipping(bundle))
    if check.checks_nothing:
        sums, check = replicas.all_reduce_sums(sent), NO_CHECK._replace(largest=largest)
    else:
        is_finite = check.exact()
        of_gradients = next(grad.dtype for grad in sent if grad is not None)
        is_bad = tf.cast(tf.logical_not(is_finite), of_gradients)
        *sums, bad = replicas.all_reduce_sums([*sent, is_bad])
        # A replica at fault tells which of its gradients were, the others tell none.
        worst = partial(check.worst_of, bundle.count)
        check = Check(tf.equal(bad, 0), None, worst, largest)
    both = zip(sums, bundle.grads)
    grads = [
        None if grad is None else tf.cast(total, grad.dtype) for total, grad in both
    ]
    divisors = [by if f is None else scale for by, f in zip(bundle.divisors, factors)]
    return bundle.but(
        grads=grads,
        divisors=divisors,
        check=check,
        is_checked=False,
        is_measured=[largest is not None] * len(grads),
    )


def _as_sent(grad: Grad, factor: Optional[Scalar], dtype: str) -> Grad:
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        values = _as_sent(grad.values, factor, dtype)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    original, narrow = grad.dtype, tf.as_dtype(dtype)
    if factor is not None and (original.is_floating or original.is_complex):
        grad = multiply(grad, factor)
    is_wider = original.is_floating and original.size > narrow.size
    return tf.cast(grad, narrow if is_wider else original)
