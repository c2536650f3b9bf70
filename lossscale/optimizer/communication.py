"""Gradients that cross the replicas in float16 or bfloat16: `communication_dtype`.

The wrapper sums the gradients in the inner optimizer's place, while they are scaled:

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
from typing import Optional

import tensorflow as tf

from lossscale.gradients.arithmetic import bounded, multiply
from lossscale.gradients.bundle import Bundle
from lossscale.gradients.check import NO_CHECK, Check
from lossscale.runtime import op_callbacks, replicas
from lossscale.runtime.aliases import Grad, Scalar
from lossscale.scales.base import LossScale
from lossscale.scales.uses import value_of


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


def summed(bundle: Bundle, loss_scale: LossScale, dtype: str) -> Bundle:
    """Returns the sum of all replicas' gradients, still scaled and equal on all.

    Earlier overflows cross with it, since clipping may have hidden them.
    """
    refuse_dtype(dtype)
    if replicas.count() == 1:
        return bundle
    with op_callbacks.paused():
        return _summed(bundle, loss_scale, dtype)


def _summed(bundle: Bundle, loss_scale: LossScale, dtype: str) -> Bundle:
    scale, unknown = value_of(loss_scale), bundle.of_unknown
    # Whatever is known of a gradient, it crosses with the loss scale as a factor.
    factors = [
        scale if by is None else scale / by if by is unknown else None
        for by in bundle.divisors
    ]
    sent = [_as_sent(grad, by, dtype) for grad, by in zip(bundle.grads, factors)]
    check = bundle.check.without_gradients(bundle.count)
    if check.checks_nothing:
        sums, check = replicas.all_reduce_sums(sent), NO_CHECK
    else:
        is_finite, largest = check.exact(), check.largest
        of_gradients = next(grad.dtype for grad in sent if grad is not None)
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
