"""What a step does to a loss scale and a guard: judged, learned of, and counted."""

from __future__ import annotations

import collections.abc
import contextlib
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Tuple, Type

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.arguments import shown
from lossscale.gradients import arithmetic
from lossscale.runtime import mode, replicas
from lossscale.runtime.aliases import Flag, Grads, Op, Scalar, Tensor, Variable
from lossscale.runtime.control import either, group_ops, select
from lossscale.runtime.loss_scale_warning import warn

#: A loss scale of `base`, which imports this module.
LossScale = Any


class State:
    """The values of an object's variables before a step, by name, as attributes."""

    current_loss_scale: Tensor

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> Tensor:
        # A rule reads few of them.
        return tf.convert_to_tensor(variable_of(self._owner, name))


def adjust_to_step(
    loss_scale: LossScale,
    is_finite: Flag,
    largest: Optional[Scalar],
    rule_learns: Flag = True,
    *,
    guard: Any = None,
    grads: Optional[Grads] = None,
    shared: Any = None,
) -> Tuple[Op, Any, Any]:
    """Has the guard judge a step, runs the rule of a loss scale, and counts the step.

    The caller has checked the gradients, or the arguments. What becomes of a step:

    ```
    a step                                  is applied   the rule learns of it
    finite                                  yes          yes
    an overflow                             no           yes
    finite, and left out by the guard       no           no: only `last_largest` moves
    a bad loss, with nonfinite_loss="skip"  no           no, unless there are many
    ```

    All values are read before any is assigned. Nothing is assigned before the guard and
    the rule have returned what can be assigned.

    Args:
      loss_scale: A loss scale.
      is_finite: As in `LossScale.adjust`.
      largest: As in `LossScale.adjust`.
      rule_learns: If False, a bad step is only counted.
      guard: A `Guard`, or None.
      grads: The gradients, for a subclass with its own `update`.
      shared: The `SharedStep` of a loss scale that several optimizers share, or None.

    Returns:
      An operation that adjusts both, None in eager mode; whether to apply the step; and
      False if the guard leaves it out.
    """
    if guard is None and shared is None and grads is None and rule_learns is True:
        return (*_learned(loss_scale, is_finite, largest, is_finite), True)
    is_usual: Flag = True
    values: Dict[str, Tensor] = {}
    old = State(guard)
    if guard is not None and not (mode.current().knows_values and not is_finite):
        judged = arithmetic.bounded(is_finite, largest)
        is_usual, values = checked_verdict(guard, guard.judge(old, judged))
        # In a session nothing else computes the guard's values before the rule assigns.
        with tf.control_dependencies([group_ops(list(values.values()))]):
            is_usual = tf.identity(is_usual)
    applies = is_finite
    sharing: Any = contextlib.nullcontext
    if shared is not None:
        joined = shared.joined(is_finite, largest, rule_learns)
        is_finite, largest, rule_learns = joined
        sharing = partial(shared.set_back, largest)

    def learn() -> Tuple[Op, Any]:
        with sharing():
            if grads is not None:
                return _updated(loss_scale, is_finite, largest, grads)
            return _learned(loss_scale, is_finite, largest, applies)

    if is_usual is True and rule_learns is True:
        return (*learn(), True)

    def count() -> Flag:
        with sharing():
            op = replicas.merge_call(partial(_ignore, loss_scale))
        return flag_after(op, applies)

    def leave_out() -> Flag:
        last = loss_scale.last_largest
        noted = last is not None and last.assign(judged, read_value=False)
        return flag_after(noted, False)

    is_counted = is_usual  # by the loss scale
    if is_usual is not True:
        is_counted = tf.logical_or(tf.logical_not(applies), is_usual)

    def learn_nothing() -> Flag:
        if rule_learns is True:
            return leave_out()
        return either(is_counted, count, leave_out, True)

    learns = both(rule_learns, is_counted)
    if shared is not None:  # a session's branches wait for nothing else outside
        with tf.control_dependencies(shared.read):
            learns = tf.identity(learns)
    should_apply = either(
        learns, lambda: flag_after(*learn()), learn_nothing, is_small=grads is None
    )
    # Nothing of the guard changes if the rule raises an error.
    with tf.control_dependencies([should_apply]):
        new = {n: select(applies, v, getattr(old, n)) for n, v in values.items()}
        assigned = assign(guard, new)
    return group_ops([should_apply, *assigned]), should_apply, is_usual


def _learned(
    loss_scale: LossScale, is_finite: Flag, largest: Optional[Scalar], applies: Flag
) -> Tuple[Op, Any]:
    """Runs the rule of a loss scale, and counts the step."""
    if not loss_scale.checks_gradients:
        return group_ops([]), True
    if largest is not None:
        is_requested = loss_scale.last_largest is not None
        largest = arithmetic.bounded(is_finite, largest) if is_requested else None
    op, may_fail = replicas.merge_call(partial(_change, loss_scale), is_finite, largest)
    # Usually the gradients need not wait for the loss scale.
    return op, flag_after(op, applies) if may_fail else applies


def _updated(
    loss_scale: LossScale, is_finite: Flag, largest: Optional[Scalar], grads: Grads
) -> Tuple[Op, Any]:
    """Calls a subclass's own `update`, which may leave out finite steps, too."""
    # They may have been clipped since the check. A scalar that is infinite on a bad
    # step tells the subclass that they were not finite.
    is_bad = arithmetic.infinite_unless(is_finite)
    op, should_apply = loss_scale.update([*grads, is_bad])
    if loss_scale.last_largest is not None and largest is not None:
        with tf.control_dependencies([group_ops([op])]):
            largest = arithmetic.bounded(is_finite, largest)
            noted = loss_scale.last_largest.assign(largest, read_value=False)
        op = group_ops([op, noted])
    return op, both(is_finite, should_apply)


def flag_after(op: Op, flag: Any) -> Flag:
    """Returns a flag as a tensor of shape `[]`, after an operation has run."""
    with tf.control_dependencies([group_ops([op])]):
        return tf.reshape(tf.convert_to_tensor(flag, tf.bool), [])


def _change(
    loss_scale: LossScale, is_finite: Flag, largest: Optional[Scalar]
) -> Tuple[Op, bool]:
    """Runs the rule, assigns what it returns, and counts the step: for `merge_call`.

    Also returns whether only a run can tell if a value has the right shape.
    """
    is_finite = tf.convert_to_tensor(replicas.local_result(is_finite))
    largest = replicas.local_result(largest)
    state, name = State(loss_scale), "current_loss_scale"
    current = valid = None
    if hasattr(loss_scale, "initial_loss_scale") and hasattr(loss_scale, name):
        current = state.current_loss_scale
        state.current_loss_scale = valid = repaired(loss_scale, current)
    seen = (is_finite, largest) if loss_scale.needs_largest else (is_finite,)
    values = loss_scale.next_state(state, *seen)
    wanted = f"`next_state` of {type(loss_scale).__name__} must return"
    values, may_fail = checked_values(loss_scale, wanted, values)
    if valid is not current:  # what was replaced is moved no further
        moved = values.get(name, valid)
        values[name] = select(tf.equal(current, valid), moved, valid)
    return _count(loss_scale, is_finite, largest, values), may_fail


def _ignore(loss_scale: LossScale) -> Op:
    """Counts a bad step of which the rule does not learn: for `merge_call`."""
    bad, ops = tf.constant(False), []
    if loss_scale.ignored_loss_steps is not None:
        ops.append(loss_scale.ignored_loss_steps.assign_add(1, read_value=False))
    infinite = arithmetic.infinite_unless(bad)
    return group_ops([*ops, _count(loss_scale, bad, infinite, {})])


def _count(
    loss_scale: LossScale,
    is_finite: Flag,
    largest: Optional[Scalar],
    values: Mapping[str, Tensor],
) -> Op:
    """Assigns what the rule has returned, and counts a step."""
    zero, one = tf.constant(0, tf.int64), tf.constant(1, tf.int64)
    in_a_row = select(is_finite, zero, loss_scale.consecutive_skipped_steps + one)
    counts = {"consecutive_skipped_steps": in_a_row, "last_step_finite": is_finite}
    values = {**counts, **values}
    if largest is not None and loss_scale.last_largest is not None:
        values["last_largest"] = largest
    # In a session nothing else has all values computed before one is assigned.
    with tf.control_dependencies([group_ops(list(values.values()))]):
        bad = select(is_finite, zero, one)
        skipped = loss_scale.skipped_steps.assign_add(bad, read_value=False)
        return group_ops([skipped, *assign(loss_scale, values)])


def assign(owner: Any, values: Mapping[str, Tensor]) -> List[Op]:
    """Assigns values, which are checked, to the variables of these names."""
    here = {name: replicas.local_result(value) for name, value in values.items()}
    pairs = [(getattr(owner, name), value) for name, value in here.items()]
    return [variable.assign(value, read_value=False) for variable, value in pairs]


def both(one: Flag, other: Flag) -> Flag:
    """Tells whether both are True. Python's True adds no operation to a graph."""
    if one is True or one is other:
        return other
    return one if other is True else tf.logical_and(one, other)


def repaired(loss_scale: LossScale, current: Scalar) -> Scalar:
    """Returns `max(current, floor) if 0 < current < inf else initial`.

    A file may hold 0, as Keras 3's own wrapper writes it, or anything else, and a rule
    of a user's own may return it. A rule that multiplies would never leave 0, NaN or
    infinity. So the next step brings such a value back. Eager mode warns.
    """
    floor = getattr(loss_scale, "min_loss_scale", arguments.FLOAT32_MIN)
    knows_values = mode.current().knows_values
    # A scale at its floor was rounded to float32, too.
    if knows_values and float(np.float32(floor)) <= float(current) < float("inf"):
        return current
    is_number = tf.logical_and(current > 0.0, current <= tf.float32.max)  # NaN is not
    valid = select(is_number, tf.maximum(current, floor), loss_scale.initial_loss_scale)
    if knows_values:
        warn(
            f"The loss scale was {float(current)!r}, but it must be finite and at "
            f"least {floor:g}. The run continues with {float(valid)!r}. If a file held "
            "that value, check where the file came from. If not, `next_state` of "
            f"{type(loss_scale).__name__} has returned it: keep what it returns "
            "positive and finite."
        )
    return valid


def variable_of(loss_scale: LossScale, name: str) -> Variable:
    """Returns the variable that is the attribute `name`, or raises."""
    value = getattr(loss_scale, name, None)
    if isinstance(value, tf.Variable):
        return value
    cls = type(loss_scale).__name__
    create = f"self.{name} = self._add_weight({name!r}, 0)"
    if hasattr(value, "assign"):
        raise TypeError(
            f"`{name}` of {cls} must be a tf.Variable, got {shown(value)}. Create it "
            f"in the constructor: {create}"
        )
    variables = [k for k, v in vars(loss_scale).items() if isinstance(v, tf.Variable)]
    raise AttributeError(
        f"{cls} must have the variables that its rule names, "
        f"{', '.join(sorted(variables))}, got {name!r}. Correct the name, or create "
        f"the variable in the constructor: {create}"
    )


def checked_values(
    loss_scale: LossScale, wanted: str, values: Any
) -> Tuple[Dict[str, Tensor], bool]:
    """Returns new values by name as tensors, or an error that `wanted` begins.

    Also returns whether a shape is not known yet: if it is wrong, the run raises.
    """
    if not isinstance(values, collections.abc.Mapping):
        raise TypeError(
            f"{wanted} a dictionary of new values by the names of variables, got "
            f"{shown(values)}."
        )
    checked, may_fail = {}, False
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(
                f"{wanted} a dictionary of new values by the names of variables, got "
                f"the key {shown(name)}. Write the name as a string."
            )
        variable = variable_of(loss_scale, name)
        dtype, shape = variable.dtype.base_dtype, variable.shape
        new = value if isinstance(value, tf.Tensor) else _converted(value, dtype)
        # A graph takes an eager tensor of any dtype.
        if new is None or new.dtype != dtype or not shape.is_compatible_with(new.shape):
            raise TypeError(
                f"{wanted} {dtype.name} of shape {shape} for {name!r}, got "
                f"{shown(value)}. tf.cast changes a dtype, tf.reshape a shape."
            )
        if not new.shape.is_fully_defined():
            new, may_fail = tf.ensure_shape(new, shape), True
        checked[name] = new
    return checked, may_fail


def _converted(value: Any, dtype: tf.DType) -> Optional[Tensor]:
    """Returns a value as a tensor, None if it has no such dtype."""
    if not isinstance(value, (tf.IndexedSlices, tf.SparseTensor)):
        with contextlib.suppress(TypeError, ValueError):
            return tf.convert_to_tensor(value, dtype)
    return None


def checked_verdict(guard: Any, verdict: Any) -> Tuple[Tensor, Dict[str, Tensor]]:
    """Returns what a guard's `judge` has returned, a flag and new values, or raises."""
    wanted = f"`judge` of {type(guard).__name__} must return (should_apply, values)"
    if not isinstance(verdict, (tuple, list)) or len(verdict) != 2:
        raise TypeError(
            f"{wanted}, got {shown(verdict)}. Write return should_apply, {{}} if no "
            "variable changes."
        )
    flag = f"{wanted} whose `should_apply` is a bool, or a bool tensor of one element"
    fix = "Write a comparison such as `largest < 100.0`"
    should_apply = _one_element(flag, verdict[0], "a bool", fix, TypeError)
    values, _ = checked_values(guard, f"{wanted} whose `values` are", verdict[1])
    return should_apply, values


def checked_step(
    is_finite: Any, largest: Optional[Any], is_used: bool
) -> Tuple[Flag, Optional[Scalar]]:
    """Returns the arguments of `adjust` as tensors of shape `[]`, or raises.

    A step whose `largest` is no magnitude is not finite. `is_used`: whether it counts.
    """
    must = "`{}` must be {}, or a tensor of one element"
    wanted = must.format("is_finite", "a bool")
    is_finite = _one_element(wanted, is_finite, "a bool", "Pass a flag")
    if largest is None or not is_used:
        return is_finite, largest
    wanted, value = must.format("largest", "a number"), largest
    largest = _one_element(wanted, largest, "a number", "Pass a magnitude")
    wide = largest if largest.dtype == tf.float32 else tf.cast(largest, tf.float64)
    # Infinity as a constant would stop a run that looks for infinities.
    is_magnitude = tf.logical_and(wide >= 0.0, wide <= wide.dtype.max)
    if mode.current().knows_values and is_finite and not is_magnitude:
        raise ValueError(
            "`largest` must be a finite number from 0 on if the gradients were "
            f"finite, got {shown(value)}. If not, pass is_finite=False."
        )
    is_finite = tf.logical_and(is_finite, is_magnitude)
    return is_finite, tf.cast(tf.minimum(wide, tf.float32.max), tf.float32)


def _one_element(
    wanted: str, value: Any, kind: str, fix: str, of_shape: Type[Exception] = ValueError
) -> Tensor:
    """Returns what is "a bool" or "a number" as a tensor of shape `[]`, or raises."""

    def refused(error: Type[Exception]) -> Exception:
        return error(
            f"{wanted}, got {shown(value)}. {fix}; to reduce several to one, "
            "tf.reduce_all is for flags, tf.reduce_max for numbers."
        )

    # TensorFlow would keep a tensor for each Python number that it was ever given.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        tensor = tf.convert_to_tensor(np.asarray(float(value)) if is_number else value)
    except (TypeError, ValueError, OverflowError) as error:
        raise refused(TypeError) from error
    dtype = tensor.dtype
    is_real = dtype.is_floating or dtype.is_integer
    if not (dtype.is_bool if kind == "a bool" else is_real):
        raise refused(TypeError)
    if tensor.shape.num_elements() not in {None, 1}:
        raise refused(of_shape)
    return tensor if tensor.shape.rank == 0 else tf.reshape(tensor, [])
