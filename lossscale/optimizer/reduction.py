"""The flag, all-reduced, and gradients that cross the replicas in float16.

Do all replicas together apply this step? Replicas whose gradients are equal find the
same flag: `EqualReplicas`. Otherwise one scalar of each crosses: `SeveralReplicas`.

With `communication_dtype` the wrapper sums the gradients in the inner optimizer's
place, while they are still scaled:

```
on each replica   multiply the unscaled gradients by the loss scale, then cast all
                  gradients to `communication_dtype`
all-reduce        sum them in that dtype: half the bytes of float32
on each replica   cast the sum back, to be divided in float32 and checked
```

The sum is equal on all replicas, so each replica finds the same flag in it. If the cast
or the sum overflows, the sum is not finite on any replica, and all skip the step.
"""

from __future__ import annotations

from functools import partial
from typing import Dict, Optional, Tuple, Union

import tensorflow as tf

from lossscale.gradients import rows
from lossscale.gradients.arithmetic import bounded, multiply
from lossscale.gradients.check import (
    CLEAN,
    Check,
    clean,
    floating_values,
    sum_stays_finite,
    worst_of_each,
)
from lossscale.optimizer.bundle import Bundle, and_of_rows, check_as_applied
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Flag, Grad, Scalar, Tensor
from lossscale.scales.base import value_of


class EqualReplicas:
    """One replica, or several with equal gradients: the sum of all of them.

    The quick check of any replica decides, and the exact one can wait for a branch.
    """

    def check(self, bundle: Bundle) -> Tuple[Bundle, Flag]:
        """Returns the checked bundle, and what this replica contributes to `reduce`."""
        checked = check_as_applied(bundle)
        return checked, checked.check.quick

    def reduce(self, contributions: Flag, bundle: Bundle) -> Check:
        """Returns the check of the whole step. `merge_call` merged the arguments."""
        del contributions  # the bundle holds the same
        check: Check = replicas.local_result(bundle).check._replace(worst=None)
        if check.exact_check is None:
            return check

        def exact_check() -> Flag:
            exact = lambda local: local.check.exact_in_branch()  # noqa: E731
            return replicas.local_result(replicas.call_for_each_replica(exact, bundle))

        return check._replace(exact_check=exact_check)

    def loss_is_at_fault(self, bundle: Bundle) -> Flag:
        """Tells whether an unscaled loss was not finite on any replica. For a branch.

        A sum of gradients does not show whether a good loss overflowed, too.
        """
        at_fault = lambda local: tf.cast(local.has_bad_loss(), tf.float32)  # noqa: E731
        bad = replicas.call_for_each_replica(at_fault, bundle)
        return replicas.all_reduce_sum(bad) > 0.0


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
            is_small = sum_stays_finite(bundle.grads, self._count)
            is_small = and_of_rows(is_small, bundle, terms=self._count)
            # What is small is finite: no other quick check is needed.
            finite = tf.where(is_small, 0.0, 1.0)
            checked = check_as_applied(bundle, is_small)
        else:
            checked = check_as_applied(bundle)
        is_finite, largest = checked.check.exact(), checked.check.largest
        contribution = tf.where(is_finite, finite, self._count + 1.0)
        if largest is None:
            return checked, contribution
        slots = replicas.in_own_slot(bounded(is_finite, largest))
        return checked, tf.concat([[contribution], slots], 0)

    def reduce(self, contributions: Tensor, bundle: Bundle) -> Check:
        """Sums what the replicas contribute: here it crosses. For all replicas."""
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
            worst = worst_of_each(sums, local.groups)
            return tf.math.is_finite(tf.reduce_sum(worst)), worst

        is_in_doubt = tf.logical_and(total > 0.0, total < self._count + 1.0)
        nothing = clean(local.count)
        clear = lambda: (is_clear, nothing)  # noqa: E731
        is_finite, worst = tf.cond(is_in_doubt, look_at_sum, clear)
        return Check(is_finite, None, lambda: worst, largest)

    def loss_is_at_fault(self, bundle: Bundle) -> Flag:
        """The same, and no gradients of a good loss overflowed on another replica."""

        def faults(local: Bundle) -> Tensor:
            is_bad = local.has_bad_loss()
            is_good = tf.logical_or(is_bad, local.check.exact_in_branch())
            return tf.cast(tf.stack([is_bad, tf.logical_not(is_good)]), tf.float32)

        found = replicas.call_for_each_replica(faults, bundle)
        losses, overflows = tf.unstack(replicas.all_reduce_sum(found))
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
            values = [] if is_sparse else floating_values([grad])
            if values:  # a complex gradient has two
                value = values[0] if len(values) == 1 else tf.stack(values)
                terms[position] = as_added(value)
            elif rows.may_have_duplicates(grad) and grad.dense_shape is not None:
                terms[position] = rows.magnitudes(grad)
        return terms


FlagReduction = Union[EqualReplicas, SeveralReplicas]


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


def summed(bundle: Bundle, dtype: str) -> Bundle:
    """Returns the sum of all replicas' gradients, still scaled and equal on all.

    Whether what was unscaled had overflowed crosses with it: the sum does not show an
    overflow that was clipped since then. Call it in replica context.
    """
    scale, unknown = value_of(bundle.loss_scale), bundle.of_unknown
    # Whatever is known of a gradient, it crosses with the loss scale as a factor.
    factors = [
        scale if by is None else scale / by if by is unknown else None
        for by in bundle.divisors
    ]
    sent = [_as_sent(grad, by, dtype) for grad, by in zip(bundle.grads, factors)]
    check = bundle.check.without_gradients(bundle.count)
    if check.is_clean:
        sums, check = replicas.all_reduce_sums(sent), CLEAN
    else:
        is_finite, largest = check.exact(), check.largest
        of_gradients = next(each.dtype for each in sent if each is not None)
        is_bad = tf.cast(tf.logical_not(is_finite), of_gradients)
        *sums, bad = replicas.all_reduce_sums([*sent, is_bad])
        if largest is not None:
            largest = replicas.greatest(bounded(is_finite, largest))
        # A replica at fault tells which of its gradients were, the others tell none.
        worst = partial(check.worst_of, bundle.count)
        check = Check(tf.equal(bad, 0), None, worst, largest)
    both = zip(sums, bundle.grads)
    grads = [
        None if grad is None else tf.cast(total, grad.dtype) for total, grad in both
    ]
    divisors = [by if f is None else scale for by, f in zip(bundle.divisors, factors)]
    return bundle.but(grads=grads, divisors=divisors, check=check, is_checked=False)


def _as_sent(grad: Grad, factor: Optional[Scalar], dtype: str) -> Grad:
    """Returns a gradient as it crosses: times `factor`, in the narrower dtype."""
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        values = _as_sent(grad.values, factor, dtype)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    own, narrow = grad.dtype, tf.as_dtype(dtype)
    if factor is not None and (own.is_floating or own.is_complex):
        grad = multiply(grad, factor)
    is_wider = own.is_floating and own.size > narrow.size
    return tf.cast(grad, narrow if is_wider else own)
