"""simulate: replays a loss scale over a run, without a model, and what it returns."""

from __future__ import annotations

import copy
import dataclasses
import numbers
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.arguments import shown
from lossscale.plotting import pyplot
from lossscale.runtime import mode
from lossscale.runtime.aliases import Array
from lossscale.runtime.control import group_ops
from lossscale.scales import serialization
from lossscale.scales.adjustment import adjust_to_step
from lossscale.scales.base import LossScale
from lossscale.scales.guard import Guard
from lossscale.scales.headroom import FLOAT16_MAX
from lossscale.scales.ignored_losses import count_ignored_steps, raised


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Simulation:
    """What a loss scale did over a run. The arrays have one entry per step, in order.

    Attributes:
      loss_scale: A `float32` array of shape `[steps]`, the scale of each step.
      is_finite: A `bool` array of shape `[steps]`, whether the gradients were finite.
      applied: A `bool` array of shape `[steps]`, whether the step was applied.
      final_loss_scale: A float, the scale after the last step.
      limit: A float array of shape `[steps]`, the limits that were used, or None.
    """

    loss_scale: Array
    is_finite: Array
    applied: Array
    final_loss_scale: float
    limit: Optional[Array] = None

    @property
    def steps_lost(self) -> int:
        """The number of skipped steps."""
        return int(np.sum(~self.applied))

    @property
    def spikes(self) -> Array:
        """Which finite steps were skipped, as by a `SpikeGuard`: `bool`, `[steps]`."""
        return self.is_finite & ~self.applied

    @property
    def overflows_applied(self) -> int:
        """The number of steps applied although their gradients were not finite."""
        return int(np.sum(self.applied & ~self.is_finite))

    @property
    def longest_stall(self) -> int:
        """The largest number of steps that were skipped in a row."""
        ends = np.flatnonzero(np.concatenate([[True], self.applied, [True]]))
        return int(np.max(np.diff(ends))) - 1

    @property
    def log2_below_limit(self) -> Optional[float]:
        """How many powers of two the scale was below the limit, on average.

        The smaller it is, the less was lost to underflow. None unless applied steps
        have finite and positive limits.
        """
        if self.limit is None:
            return None
        used = self.applied & np.isfinite(self.limit) & (self.limit > 0)
        if not used.any():
            return None
        limits = self.limit[used].astype(np.float64)
        return float(np.mean(np.log2(limits / self.loss_scale[used])))

    @property
    def summary(self) -> Dict[str, Any]:
        """The figures above by name, and the number of steps."""
        names = ("steps_lost", "overflows_applied", "longest_stall", "log2_below_limit")
        figures = {name: getattr(self, name) for name in names}
        return {"steps": len(self.loss_scale), **figures}

    def __repr__(self) -> str:
        listed = ", ".join(
            f"{name}={value:.2f}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.summary.items()
            if value is not None and (name, value) != ("overflows_applied", 0)
        )
        return f"Simulation({listed})"

    def plot(self, ax: Any = None) -> Any:
        """Draws the scale, the limit if there was one, and the lost steps.

        Args:
          ax: matplotlib `Axes` to draw on. None makes a figure.

        Returns:
          The `Axes`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        where: Dict[str, Any] = {}
        if ax is None:
            ax = pyplot().subplots(figsize=(9, 3), layout="constrained")[1]
            where = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}  # off the lines
        if self.limit is not None:
            ax.plot(self.limit, color="0.7", label="limit")
        lost = np.flatnonzero(~self.applied)
        ends = np.append(self.loss_scale, self.loss_scale[-1:])  # of the last step, too
        ax.step(range(len(ends)), ends, where="post", label="loss scale")
        heights, label = self.loss_scale[lost], f"{len(lost)} steps lost"
        ax.plot(lost, heights, "|", color="C3", label=label)
        ax.set_yscale("log", base=2)
        ax.set_xlabel("step")
        ax.set_ylabel("loss scale")
        ax.legend(**where)
        return ax


def simulate(
    loss_scale: Any,
    *,
    guard: Optional[Guard] = None,
    is_finite: Any = None,
    limit: Any = None,
    largest: Any = None,
    bad_losses: Any = None,
    nonfinite_loss: str = "backoff",
) -> Simulation:
    """Replays a loss scale over a run of steps, without a model.

    Use it to choose a schedule. From the steps of a run, or limits above which steps
    overflow, it tells which steps another loss scale would have lost:

    >>> import lossscale
    >>> limit = np.full([100], 2.0**12)  # where this run's gradients overflow
    >>> scale = lossscale.DynamicLossScale(2.0**15, increment_period=20)
    >>> simulate(scale, limit=limit)
    Simulation(steps=100, steps_lost=7, longest_stall=3, log2_below_limit=0.00)

    The scale falls to 2**12 in three steps. Then it tries 2**13 after every 20 good
    steps, in vain. https://github.com/lossscale/lossscale/blob/main/docs/simulate.md
    has more programs.

    It calls `adjust` once per step on a copy, which begins with the current state.

    Args:
      loss_scale: A `LossScale`, or a number: with a guard, its steps are checked.
      guard: A `Guard`, or None.
      is_finite: A `bool` array of shape `[steps]`, the run's flags, or None.
      limit: A float array of shape `[steps]` without NaN, or None, instead of flags: a
        step overflows if its scale is greater.
      largest: A float array of shape `[steps]`, the greatest magnitude of each step's
        unscaled gradients, or None: 65504 / `limit`. Alone, the limits are 65504 /
        `largest`; otherwise only a loss scale that looks at the gradients uses it.
      bad_losses: A `bool` array of shape `[steps]`, or None: the steps whose unscaled
        loss was not finite. So are their gradients, whatever flags or limits say.
      nonfinite_loss: `"backoff"` or `"skip"`, as in `LossScaleOptimizer`: whether such
        steps count as overflows.

    Returns:
      A `Simulation`.

    Raises:
      TypeError: An argument has the wrong type or dtype, is missing, or excludes
        another one.
      ValueError: An array has the wrong shape, or a number that it must not hold.
      RuntimeError: Called in a graph or under a `tf.distribute` strategy.
    """
    guard = serialization.get_guard(guard)
    if not isinstance(loss_scale, (LossScale, numbers.Real)):
        raise TypeError(
            "`loss_scale` must be a LossScale or a number, got "
            f"{arguments.shown(loss_scale)}. lossscale.get returns one for a name or a "
            "manager."
        )
    loss_scale = serialization.get_checked(loss_scale, guard)
    has_flags, has_limit = is_finite is not None, limit is not None
    if has_flags == has_limit and (has_flags or largest is None):
        got = "both. Leave out one." if has_flags else "neither, nor `largest` alone."
        raise TypeError(
            f"`is_finite` or `limit` must be given, but not both, got {got}"
        )
    if not mode.current().knows_values or tf.distribute.has_strategy():
        raise RuntimeError(
            "`simulate` must be called eagerly and outside strategy.scope(), got "
            "a graph or a strategy. Call it before or after training."
        )
    arguments.choice("nonfinite_loss", nonfinite_loss, allowed=("backoff", "skip"))
    if largest is not None:
        largest = _per_step("largest", largest, np.float32)
        refused = largest[~(largest >= 0)]
        if refused.size:
            raise ValueError(
                f"`largest` must hold no NaN and nothing negative, got {refused[0]}."
            )
    if has_flags:
        trace = _per_step("is_finite", is_finite, np.bool_)
    else:
        limit = _ratios(largest) if limit is None else limit
        trace = _per_step("limit", limit, np.float64)
        if np.isnan(trace).any():
            raise ValueError(
                f"`limit` must hold no NaN, got {np.isnan(trace).sum()} of them. "
                "Write numpy.inf where no scale overflows, 0 where each does."
            )
        largest = _ratios(trace) if largest is None else largest
    steps = len(trace)
    if not steps:
        name = "is_finite" if has_flags else "limit"
        raise ValueError(f"`{name}` must hold at least one step, got none.")
    if largest is not None:
        largest = _per_step("largest", largest, np.float32, steps)
    bad = np.zeros(steps, np.bool_)
    if bad_losses is not None:
        bad = _per_step("bad_losses", bad_losses, np.bool_, steps)
    trace = trace & ~bad if has_flags else np.where(bad, -np.inf, trace)
    looks = loss_scale if loss_scale.needs_largest else guard
    seen = np.zeros(steps, np.float32) if looks is None else largest
    if seen is None:
        raise TypeError(
            f"`largest` must be given with flags, since {type(looks).__name__}"
            " looks at the gradients, got None. Pass the greatest magnitude of "
            "each step, or a `limit` in place of flags."
        )
    may_ignore = bad & (nonfinite_loss == "skip") & loss_scale.checks_gradients
    run = [trace, seen, may_ignore]
    # On the CPU, since a GPU would have to return a few scalars a million times.
    with tf.device("CPU:0"):
        try:
            scales, applied = _replay(loss_scale, guard, run, mode.COMPILED_BY_XLA)
        except tf.errors.OpError:  # XLA does not know an op
            scales, applied = _replay(loss_scale, guard, run, {})
    last, scales = float(scales[-1]), scales[:-1]
    if limit is not None:
        trace, limit = scales <= trace, np.asarray(limit)
    return Simulation(scales, trace, applied, last, limit)


def _ratios(values: Array) -> Array:
    """Returns magnitudes for limits, and limits for magnitudes: 65504 / values."""
    with np.errstate(divide="ignore", over="ignore"):  # infinity will do
        return np.divide(FLOAT16_MAX, values, dtype=np.float64).astype(np.float32)


def _copy(loss_scale: Any) -> Any:
    """Returns a copy with plain variables, on one device."""
    memo: Dict[int, Any] = {
        id(variable): tf.Variable(variable.numpy(), trainable=False)
        for variable in (*loss_scale.variables, *loss_scale._kept().values())
    }
    for module in (loss_scale, *loss_scale.submodules):
        # TensorFlow keeps restored values here that the object lacks. A copy would hold
        # the whole checkpoint, and warn when deleted.
        kept = getattr(module, "_self_unconditional_deferred_dependencies", None)
        if kept is not None:
            memo[id(kept)] = {}
    return copy.deepcopy(loss_scale, memo)


def _replay(
    loss_scale: LossScale,
    guard: Optional[Guard],
    run: List[Array],
    options: Dict[str, bool],
) -> Tuple[Array, Array]:
    """Returns the scale of each step and after the last, and what was applied."""
    loss_scale, guard = _copy(loss_scale), guard and _copy(guard)
    steps, ignores = len(run[0]), run[-1].any()
    if ignores:
        count_ignored_steps(loss_scale)

    def scale_now() -> Any:
        return tf.reshape(tf.cast(loss_scale(), tf.float32), [])

    def body(i: Any, run: Any, level: Any, scales: Any, applied: Any) -> Any:
        scale = scale_now()
        entry, seen, may_ignore = [array[i] for array in run]
        is_limit = not entry.dtype.is_bool
        is_finite = tf.cast(scale, tf.float64) <= entry if is_limit else entry
        is_finite = tf.logical_and(is_finite, tf.math.is_finite(seen))  # as `adjust`
        rule_learns = True
        if ignores:
            higher, counts = raised(level, 0)
            level = tf.where(may_ignore, higher, level)
            rule_learns = tf.logical_or(~may_ignore, counts)
        op, should_apply, _ = adjust_to_step(
            loss_scale, is_finite, seen, rule_learns, guard=guard
        )
        with tf.control_dependencies([group_ops([op])]):
            should_apply = tf.reshape(tf.convert_to_tensor(should_apply, tf.bool), [])
        level = tf.maximum(level - tf.cast(should_apply, tf.int64), 0)
        scales = scales.write(i, scale)
        return i + 1, run, level, scales, applied.write(i, should_apply)

    def replay(*run: Any) -> Any:
        scales = tf.TensorArray(tf.float32, steps, element_shape=[])
        applied = tf.TensorArray(tf.bool, steps, element_shape=[])
        # Of `ignored_losses`: this is the only optimizer.
        level = tf.constant(0, tf.int64)
        *_, scales, applied = tf.while_loop(
            lambda i, *_: i < steps, body, [0, [*run], level, scales, applied]
        )
        return scales.stack(), applied.stack()

    compiled = tf.function(replay, autograph=False, **options)
    tensors = [tf.convert_to_tensor(array) for array in run]
    # A plain call would make TensorFlow warn of a function that it traces each time.
    scales, applied = compiled.get_concrete_function(*tensors)(*tensors)
    return np.append(scales.numpy(), scale_now().numpy()), applied.numpy()


def _per_step(name: str, value: Any, dtype: Any, steps: Optional[int] = None) -> Array:
    """Returns an argument as an array of shape `[steps]`, of any length if None."""
    # For NumPy a timedelta64 is a number, too: not for us.
    holds, kinds = ("booleans", "b") if dtype is np.bool_ else ("numbers", "iuf")
    try:
        array: Array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"`{name}` must be an array, got {shown(value)}.") from error
    if array.size and array.dtype.kind not in kinds:
        fix = f" Pass numpy.asarray({name}, bool)." if kinds == "b" else ""
        raise TypeError(f"`{name}` must hold {holds}, got dtype {array.dtype}.{fix}")
    if array.ndim != 1 or steps not in {None, array.size}:
        wanted = "steps" if steps is None else steps
        raise ValueError(
            f"`{name}` must have one entry per step, shape [{wanted}], got shape "
            f"{list(array.shape)}."
        )
    with np.errstate(over="ignore"):  # infinity will do
        return array.astype(dtype)
