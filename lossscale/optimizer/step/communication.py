"""Gradients cross the replicas in float16 or bfloat16, while they are still scaled.

The wrapper sums the gradients in the inner optimizer's place:

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

from typing import Any, Optional, Tuple

import tensorflow as tf

from lossscale import arguments
from lossscale.gradients.arithmetic import bounded, multiply
from lossscale.gradients.check import CLEAN, Check
from lossscale.optimizer.bundle import Bundle
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Grad, Grads, Scalar
from lossscale.scales.base import LossScale

#: The dtypes in which gradients may cross.
DTYPES = ("float16", "bfloat16")
_OF_HOROVOD = (
    "sums them with Horovod. Leave out `communication_dtype`, and let Horovod compress "
    "the gradients: hvd.DistributedOptimizer(..., compression=hvd.Compression.fp16)"
)


def checked_dtype(value: Any) -> Optional[str]:
    """Returns the argument `communication_dtype` as a string or None.

    Raises:
      ValueError: It is another dtype.
    """
    name = value.name if isinstance(value, tf.DType) else value
    if name is None or (isinstance(name, str) and name in DTYPES):
        return name
    raise ValueError(
        "`communication_dtype` must be 'float16', 'bfloat16' or None, got "
        f"{arguments.shown(value)}. With None, the inner optimizer sums the gradients."
    )


def refuse_impossible(dtype: str, inner_optimizer: Any, way: Optional[str]) -> None:
    """Raises if the wrapper cannot sum gradients in the inner optimizer's place.

    Args:
      dtype: The argument `communication_dtype`.
      inner_optimizer: The inner optimizer.
      way: How the inner optimizer sums gradients in its own way, in words that complete
        the error. None: it does not.

    Raises:
      ValueError: The inner optimizer does, the strategy's workers do not train in step,
        or this TensorFlow cannot sum the dtype across replicas.
    """
    _refuse_where(dtype)
    modules = {each.__module__.split(".")[0] for each in type(inner_optimizer).__mro__}
    way = _OF_HOROVOD if "horovod" in modules else way
    if way is not None:
        raise ValueError(
            "`communication_dtype` must be None if the inner optimizer sums gradients "
            f"in its own way, got {dtype!r} and {inner_optimizer!r}, which {way}."
        )


def _refuse_where(dtype: str) -> None:
    """Raises if this strategy or this TensorFlow cannot sum gradients in a dtype."""
    if not replicas.can_sum(dtype):
        raise ValueError(
            "`communication_dtype` must be 'float16' or None with this TensorFlow, got "
            f"{dtype!r}, which its collectives cannot sum. Install a newer TensorFlow, "
            "or pass 'float16'."
        )
    if replicas.train_apart():
        raise ValueError(
            "`communication_dtype` must be None under ParameterServerStrategy, got "
            f"{dtype!r}. Each worker applies its own gradients there, so replicas "
            "exchange no sum. Leave out `communication_dtype`."
        )


def refuse_unchecked(dtype: Optional[str], loss_scale: LossScale) -> None:
    """Raises if nobody would see that the sum has overflowed in float16."""
    if dtype == "float16" and not loss_scale.checks_gradients:
        raise ValueError(
            "`loss_scale` must be one that checks gradients with "
            f"communication_dtype='float16', got {loss_scale!r}: a sum that overflows "
            "in float16 would make weights infinite. Write "
            "FixedLossScale(..., skip_nonfinite=True), or "
            "communication_dtype='bfloat16', whose range is that of float32."
        )


def refuse_unsummed(dtype: str) -> None:
    """Raises: the caller of `apply_gradients` wants to sum the gradients itself."""
    raise ValueError(
        "`skip_gradients_aggregation` must be False, and "
        "`experimental_aggregate_gradients` True, with "
        f"communication_dtype={dtype!r}: LossScaleOptimizer sums the gradients then. "
        "Leave out `communication_dtype`, or the argument that turns the sum off."
    )


def summed(bundle: Bundle, dtype: str) -> Bundle:
    """Returns the sum of all replicas' gradients, still scaled and equal on all.

    Call it in replica context, on several replicas.

    Args:
      bundle: This replica's gradients.
      dtype: The dtype in which the gradients of wider dtypes cross.

    Returns:
      A bundle that is still to be divided and checked.
    """
    scale = bundle.loss_scale._value()
    sent = [
        _as_sent(grad, scale if divisor is None else None, dtype)
        for grad, divisor in zip(bundle.grads, bundle.divisors)
    ]
    divisors = [scale if each is None else each for each in bundle.divisors]
    check, sums = _sum_with(bundle.check.without_gradients(bundle.count), sent)
    grads = [
        None if grad is None else tf.cast(total, grad.dtype)
        for total, grad in zip(sums, bundle.grads)
    ]
    return bundle.but(grads=grads, divisors=divisors, check=check, is_checked=False)


def _sum_with(check: Check, sent: Grads) -> Tuple[Check, Grads]:
    """Sums gradients, and together with them the replicas whose check has failed.

    Args:
      check: The check of when this replica's gradients were unscaled. The sum does not
        show an overflow that was clipped since then.
      sent: The gradients as they cross.

    Returns:
      The check of all replicas together, and the sums.
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
    # A replica at fault reports which of its gradients were; the others report none.
    count = len(sent)
    return Check(tf.equal(bad, 0), None, lambda: check.worst_of(count), largest), sums


def _as_sent(grad: Grad, factor: Optional[Scalar], dtype: str) -> Grad:
    """Returns a gradient in the form in which it crosses.

    Args:
      grad: A gradient, or None.
      factor: The loss scale, if it must multiply the gradient. None: the gradient is
        still scaled.
      dtype: The dtype in which the gradient crosses, if its own dtype is wider.
    """
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
