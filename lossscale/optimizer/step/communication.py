"""Gradients cross the replicas in float16 or bfloat16, while they are still scaled.

The wrapper adds them up in the inner optimizer's place:

```
on each replica   cast each gradient to `communication_dtype`; multiply those that are
                  unscaled with the loss scale first
all-reduce        add them up in that dtype: half the bytes
on each replica   cast the sum back, to be divided in float32 and checked
```

The sum is equal on all replicas, so each of them finds the same flag in it. What
overflows in the cast or in the sum is infinite on all of them, and all skip the step.
"""

from __future__ import annotations

from typing import Any, List, Optional

import tensorflow as tf

from lossscale import arguments
from lossscale.gradients import scaling
from lossscale.gradients.check import CLEAN, Check
from lossscale.gradients.largest import bounded
from lossscale.optimizer.bundle import Bundle
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Grad, Scalar

#: What gradients may cross in.
DTYPES = ("float16", "bfloat16")
_OF_HOROVOD = (
    "adds them up by Horovod. Leave it out, and let Horovod compress them: "
    "hvd.DistributedOptimizer(..., compression=hvd.Compression.fp16)"
)


def checked_dtype(value: Any) -> Optional[str]:
    """Returns the argument `communication_dtype` as a string, None for None."""
    name = value.name if isinstance(value, tf.DType) else value
    if name is None or (isinstance(name, str) and name in DTYPES):
        return name
    raise ValueError(
        "`communication_dtype` must be 'float16', 'bfloat16' or None, got "
        f"{arguments.shown(value)}. None leaves the sum to the inner optimizer."
    )


def refuse_impossible(dtype: str, inner_optimizer: Any, way: Optional[str]) -> None:
    """Raises where the wrapper cannot add gradients up in the inner optimizer's place.

    Args:
      dtype: The argument `communication_dtype`.
      inner_optimizer: The inner optimizer.
      way: How it adds gradients up in a way of its own. None: it does not.

    Raises:
      ValueError: It does, the strategy's workers do not train in step, or TensorFlow
        adds up no such dtype.
    """
    _refuse_where(dtype)
    modules = {each.__module__.split(".")[0] for each in type(inner_optimizer).__mro__}
    way = _OF_HOROVOD if "horovod" in modules else way
    if way is not None:
        raise ValueError(
            "`communication_dtype` must be None if the inner optimizer adds gradients "
            f"up in a way of its own, got {dtype!r} and {inner_optimizer!r}, which "
            f"{way}."
        )


def _refuse_where(dtype: str) -> None:
    """Raises under a strategy, or with a TensorFlow, that cannot add gradients up."""
    if not replicas.can_sum(dtype):
        raise ValueError(
            "`communication_dtype` must be 'float16' or None with this TensorFlow, got "
            f"{dtype!r}, which its collectives do not add up. Install a newer "
            "TensorFlow, or take 'float16'."
        )
    if replicas.train_apart():
        raise ValueError(
            "`communication_dtype` must be None under ParameterServerStrategy, got "
            f"{dtype!r}: each worker applies its own gradients there, and no sum "
            "crosses. Leave it out."
        )


def refuse_unsummed(dtype: str) -> None:
    """Raises because `apply_gradients` was asked to leave the sum to the caller."""
    raise ValueError(
        "`skip_gradients_aggregation` must be False, and "
        "`experimental_aggregate_gradients` True, with "
        f"communication_dtype={dtype!r}: LossScaleOptimizer adds the gradients up. "
        "Leave out one of the two."
    )


def summed(bundle: Bundle, dtype: str) -> Bundle:
    """Returns the sum of all replicas' gradients, equal on all, still to be divided.

    Called in replica context, on several replicas.

    Args:
      bundle: This replica's gradients.
      dtype: What those cross in whose dtype is wider.
    """
    scale = bundle.loss_scale._value()
    sent = [
        _as_sent(grad, scale if divisor is None else None, dtype)
        for grad, divisor in zip(bundle.grads, bundle.divisors)
    ]
    divisors = [scale if each is None else each for each in bundle.divisors]
    check, sums = _sum_with(bundle.check.without_gradients(bundle.count), sent)
    grads = [_as_wide_as(total, grad) for total, grad in zip(sums, bundle.grads)]
    return bundle.but(grads=grads, divisors=divisors, check=check, is_checked=False)


def _sum_with(check: Check, sent: List[Any]) -> Any:
    """Adds up gradients, and with them how many replicas' check has failed.

    Args:
      check: Of when this replica's gradients were unscaled: the sum does not show what
        was clipped since.
      sent: The gradients as they cross.

    Returns:
      The check that all replicas know together, and the sums.
    """
    if check.is_clean:
        return CLEAN, replicas.all_reduce_sums(sent)
    is_finite = check.exact()
    dtype = next(each.dtype for each in sent if each is not None)
    is_bad = tf.cast(tf.logical_not(is_finite), dtype)
    *sums, bad = replicas.all_reduce_sums([*sent, is_bad])
    largest = check.largest
    if largest is not None:
        largest = replicas.greatest(bounded(is_finite, largest))
    # A replica at fault tells which of its gradients were; the others tell of none.
    count = len(sent)
    return Check(tf.equal(bad, 0), None, lambda: check.worst_of(count), largest), sums


def _as_sent(grad: Grad, factor: Optional[Scalar], dtype: str) -> Any:
    """Returns a gradient as it crosses.

    Args:
      grad: A gradient, or None.
      factor: What multiplies it for the way. None: it is still scaled.
      dtype: What it crosses in if its own dtype is wider.
    """
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        values = _as_sent(grad.values, factor, dtype)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    own, narrow = grad.dtype, tf.as_dtype(dtype)
    if factor is not None and (own.is_floating or own.is_complex):
        grad = scaling.multiply(grad, factor)
    is_wider = own.is_floating and own.size > narrow.size
    return tf.cast(grad, narrow if is_wider else own)


def _as_wide_as(total: Grad, grad: Grad) -> Any:
    """Returns a sum in the dtype of the gradients."""
    if isinstance(total, tf.IndexedSlices):
        values = _as_wide_as(total.values, grad.values)
        return tf.IndexedSlices(values, total.indices, total.dense_shape)
    return None if total is None else tf.cast(total, grad.dtype)
