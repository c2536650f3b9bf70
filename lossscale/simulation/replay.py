"""simulate: replays a loss scale over a recorded or made-up run, without a model."""

from __future__ import annotations

import copy
import os
from typing import Any, Dict, Tuple

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.runtime import mode
from lossscale.scales.base import LossScale
from lossscale.scales.headroom import FLOAT16_MAX
from lossscale.scales.managers import LossScaleManager
from lossscale.simulation import run_file
from lossscale.simulation.result import Simulation

#: XLA raises one of these, by version and op, for an op that it does not know.
_NOT_COMPILED = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.NotFoundError,
)


def simulate(
    loss_scale: LossScale,
    *,
    is_finite: Any = None,
    limit: Any = None,
    largest: Any = None,
) -> Simulation:
    """Replays a loss scale over a run of steps, without a model.

    Calls the object's own `adjust`, also that of a subclass, once per step. XLA
    compiles this for the CPU. If XLA cannot compile the rule, it runs in a graph, which
    is far slower. The run begins with the object's current state, and works on a copy:
    the object does not change.

    >>> import lossscale
    >>> limit = np.full([100], 2.0**12)  # where this run's gradients overflow
    >>> scale = lossscale.DynamicLossScale(2.0**15, increment_period=20)
    >>> simulate(scale, limit=limit)
    Simulation(steps=100, steps_lost=7, longest_stall=3, log2_below_limit=0.00)

    The scale falls from 2**15 to 2**12 in three steps. Then it tries 2**13 after every
    20 good steps, in vain. A loss scale that looks at the gradients gets `largest`, or
    without it the size at which they just reach the limit:

    >>> simulate(lossscale.HeadroomLossScale(), limit=limit)
    Simulation(steps=100, steps_lost=3, longest_stall=3, log2_below_limit=3.96)

    Args:
      loss_scale: A `LossScale`.
      is_finite: The run's flags: a `bool` array of shape `[steps]`, or the path of a
        file with them, as `lossscale.save_run` writes it.
      limit: Instead of flags, a float array of shape `[steps]` without NaN. A step
        overflows if its scale is greater than its limit.
      largest: A float array of shape `[steps]`: the greatest magnitude of each step's
        unscaled gradients, none of them negative or NaN. Without flags and limits, the
        limits are 65504 / largest. With them, only a loss scale that looks at the
        gradients uses it. None: the file's `largest`, or 65504 / limit.

    Returns:
      A `Simulation`.

    Raises:
      TypeError: `loss_scale` is no LossScale, an array has the wrong dtype, `is_finite`
        and `limit` are both given, nothing is given, or `loss_scale` looks at the
        gradients and only flags are given.
      ValueError: An array is empty, not one-dimensional, or not as long as another, or
        a number is NaN, or a magnitude negative.
      RuntimeError: Called in a graph or under a `tf.distribute` strategy.
    """
    _check_loss_scale(loss_scale)
    given = [each is not None for each in (is_finite, limit)]
    if all(given) or not (any(given) or largest is not None):
        raise TypeError(
            "`is_finite` or `limit` must be given, but not both, got "
            + ("both." if all(given) else "neither, and no `largest` either.")
        )
    if not mode.current().knows_values or tf.distribute.has_strategy():
        raise RuntimeError(
            "`simulate` must be called eagerly and outside strategy.scope(), got "
            "a graph or a strategy. Call it before or after training."
        )
    if isinstance(is_finite, (str, bytes, os.PathLike)):
        run = run_file.load_run(arguments.path("is_finite", is_finite))
        is_finite, largest = run.is_finite, run.largest if largest is None else largest
    if largest is not None:
        largest = _magnitudes(largest)
    if is_finite is None and limit is None:
        limit = _ratios(largest)
    trace = _flags(is_finite) if limit is None else _limits(limit)
    if largest is None and limit is not None:
        largest = _ratios(trace)
    if largest is not None and len(largest) != len(trace):
        raise ValueError(
            f"`largest` must have one entry per step, {len(trace)}, got {len(largest)}."
        )
    scales, applied, last = _run(loss_scale, trace, _seen(loss_scale, largest))
    if limit is not None:
        trace, limit = scales <= trace, np.asarray(limit)
    return Simulation(scales, trace, applied, last, limit)


def _check_loss_scale(loss_scale: Any) -> None:
    if not isinstance(loss_scale, LossScale):
        hint = "lossscale.get creates one from a number or a name."
        if isinstance(loss_scale, LossScaleManager):
            hint = "For a manager, pass manager.as_loss_scale()."
        raise TypeError(
            f"`loss_scale` must be a LossScale, got {arguments.shown(loss_scale)}. "
            f"{hint}"
        )


def _seen(loss_scale: LossScale, largest: Any) -> Any:
    """Returns `largest` if the loss scale looks at the gradients, otherwise None."""
    if not loss_scale.needs_largest:
        return None
    if largest is None:
        raise TypeError(
            f"`largest` must be given with flags, since {type(loss_scale).__name__} "
            "looks at the gradients, got None. Pass the greatest magnitude of each "
            "step, or a `limit` in place of flags."
        )
    return largest


def _ratios(values: Any) -> Any:
    """Returns magnitudes for limits, and limits for magnitudes: 65504 / values."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.divide(FLOAT16_MAX, values, dtype=np.float64).astype(np.float32)


def _magnitudes(largest: Any) -> Any:
    array = arguments.array("largest", largest)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"`largest` must hold numbers, got dtype {array.dtype}.")
    array = _not_empty("largest", run_file.one_dimensional("largest", array))
    if not (array >= 0).all():
        raise ValueError(
            f"`largest` must hold no NaN and nothing negative, got {array.min()}. "
            "Write numpy.inf where a step overflowed."
        )
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _flags(is_finite: Any) -> Any:
    return _not_empty("is_finite", run_file.flags("is_finite", is_finite))


def _limits(limit: Any) -> Any:
    """Returns the largest `float32` up to each limit: scales exceed both or none."""
    array = arguments.array("limit", limit)
    if array.dtype.kind not in "iuf":  # for NumPy a timedelta64 is a number, too
        raise TypeError(f"`limit` must hold numbers, got dtype {array.dtype}.")
    array = _not_empty("limit", run_file.one_dimensional("limit", array))
    if np.isnan(array).any():
        raise ValueError(
            f"`limit` must hold no NaN, got {int(np.isnan(array).sum())} of them. "
            "Write numpy.inf where a step never overflows, 0 where it always does."
        )
    with np.errstate(over="ignore"):  # infinity will do for what float32 cannot hold
        nearest = array.astype(np.float32)
    below = np.nextafter(nearest, np.float32(-np.inf))
    return np.where(nearest > array, below, nearest)


def _not_empty(name: str, array: Any) -> Any:
    if not array.size:
        raise ValueError(f"`{name}` must hold at least one step, got none.")
    return array


def _run(loss_scale: LossScale, trace: Any, largest: Any) -> Tuple[Any, Any, float]:
    # On the CPU, since a GPU would have to return a few scalars a million times.
    with tf.device("CPU:0"):
        try:
            return _replay(_copy(loss_scale), trace, largest, mode.COMPILED_BY_XLA)
        except _NOT_COMPILED:
            return _replay(_copy(loss_scale), trace, largest, {})


def _copy(loss_scale: LossScale) -> LossScale:
    """Returns a copy with plain variables, on one device."""
    kept = loss_scale.last_largest
    memo: Dict[int, Any] = {
        id(variable): tf.Variable(variable.numpy(), trainable=False)
        for variable in (*loss_scale.variables, *([] if kept is None else [kept]))
    }
    for module in (loss_scale, *loss_scale.submodules):
        # TensorFlow keeps restored values here that the object lacks, in case it gets a
        # place for them. A copy would hold the whole checkpoint, and warn when deleted.
        # Without the private name (seen on TensorFlow 2.4-2.21) they are copied.
        kept = getattr(module, "_self_unconditional_deferred_dependencies", None)
        if kept is not None:
            memo[id(kept)] = {}
    return copy.deepcopy(loss_scale, memo)


def _replay(
    loss_scale: LossScale, trace: Any, largest: Any, options: Dict[str, bool]
) -> Tuple[Any, Any, float]:
    steps = len(trace)
    told = [trace] if largest is None else [trace, largest]

    def body(i: Any, told: Any, scales: Any, applied: Any) -> Any:
        scale = tf.reshape(tf.cast(loss_scale(), tf.float32), [])
        entry, *seen = [array[i] for array in told]
        is_finite = entry if entry.dtype.is_bool else scale <= entry
        _, should_apply = loss_scale.adjust(is_finite, *seen)
        should_apply = tf.reshape(tf.convert_to_tensor(should_apply, tf.bool), [])
        return i + 1, told, scales.write(i, scale), applied.write(i, should_apply)

    def replay(*told: Any) -> Any:
        scales = tf.TensorArray(tf.float32, steps, element_shape=[])
        applied = tf.TensorArray(tf.bool, steps, element_shape=[])
        _, _, scales, applied = tf.while_loop(
            lambda i, *_: i < steps, body, [0, [*told], scales, applied]
        )
        return scales.stack(), applied.stack()

    compiled = tf.function(replay, autograph=False, **options)
    tensors = [tf.convert_to_tensor(array) for array in told]
    # A plain call would make TensorFlow warn of a function that it traces each time.
    scales, applied = compiled.get_concrete_function(*tensors)(*tensors)
    return scales.numpy(), applied.numpy(), float(loss_scale().numpy())
