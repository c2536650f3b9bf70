"""What a step does to a loss scale and a guard: judged, learned of, and counted."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.gradients import arithmetic
from lossscale.runtime import mode, replicas
from lossscale.runtime.aliases import Flag, Grads, Op, Scalar, Tensor
from lossscale.runtime.control import either, group_ops, select
from lossscale.runtime.loss_scale_warning import warn
from lossscale.scales.checks import (
    LossScale,
    checked_values,
    checked_verdict,
    variable_of,
)


class State:
    """The values of an object's variables before a step, by name, as attributes."""

    current_loss_scale: Tensor

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> Tensor:
        # A rule reads few of them.
        return tf.convert_to_tensor(variable_of(self._owner, name))


class Adjusted(NamedTuple):
    """What became of a step.

    Attributes:
      op: An operation that adjusts the loss scale and the guard, None in eager mode.
      should_apply: Whether to apply the step.
      is_usual: False if the guard leaves the step out. True without one.
    """

    op: Op
    should_apply: Any
    is_usual: Any


def adjust_to_step(
    loss_scale: LossScale,
    is_finite: Flag,
    largest: Optional[Scalar],
    rule_learns: Flag = True,
    *,
    guard: Any = None,
    grads: Optional[Grads] = None,
    shared: Any = None,
) -> Adjusted:
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
    """
    if guard is None and shared is None and grads is None and rule_learns is True:
        return Adjusted(*_learned(loss_scale, is_finite, largest, is_finite), True)
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
    sharing: Any = nullcontext
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
        return Adjusted(*learn(), True)

    def count() -> Flag:
        bad = tf.constant(False)
        of_bad_step = bad, arithmetic.infinite_unless(bad)
        only_count = partial(_change, loss_scale, False)
        with sharing():
            op, _ = replicas.merge_call(only_count, *of_bad_step)
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
    return Adjusted(group_ops([should_apply, *assigned]), should_apply, is_usual)


def _learned(
    loss_scale: LossScale, is_finite: Flag, largest: Optional[Scalar], applies: Flag
) -> Tuple[Op, Any]:
    """Runs the rule of a loss scale, and counts the step."""
    if not loss_scale.checks_gradients:
        return group_ops([]), True
    if loss_scale.needs_largest and largest is None:
        raise TypeError(
            "`largest` must be the greatest magnitude of the step's unscaled "
            f"gradients, since {type(loss_scale).__name__} needs it, got None. "
            "`update(grads)` computes it."
        )
    if largest is not None:
        is_requested = loss_scale.last_largest is not None
        largest = arithmetic.bounded(is_finite, largest) if is_requested else None
    change = partial(_change, loss_scale, True)
    op, may_fail = replicas.merge_call(change, is_finite, largest)
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
    loss_scale: LossScale, learns: bool, is_finite: Flag, largest: Optional[Scalar]
) -> Tuple[Op, bool]:
    """Runs the rule, unless it ignores the step, and counts that: for `merge_call`.

    Returns an operation, and whether it may fail since a shape is not known yet.
    """
    is_finite = tf.convert_to_tensor(replicas.local_result(is_finite))
    largest = replicas.local_result(largest)
    values: Dict[str, Tensor] = {}
    ops, may_fail, ignored = [], False, loss_scale.ignored_loss_steps
    if learns:
        values, may_fail = new_values(loss_scale, is_finite, largest)
    elif ignored is not None:
        ops.append(ignored.assign_add(1, read_value=False))
    ops.append(_count(loss_scale, is_finite, largest, values))
    return group_ops(ops), may_fail


def new_values(
    loss_scale: LossScale, is_finite: Flag, largest: Optional[Scalar]
) -> Tuple[Dict[str, Tensor], bool]:
    """Returns what the rule makes of the variables, by name. Assigns nothing.

    Also returns whether only a run can tell if a value has the right shape.
    """
    state, name = State(loss_scale), "current_loss_scale"
    current = valid = None
    if hasattr(loss_scale, "initial_loss_scale") and hasattr(loss_scale, name):
        current = state.current_loss_scale
        state.current_loss_scale = valid = repaired(loss_scale, current)
    if loss_scale.needs_largest:
        values = loss_scale.next_state(state, is_finite, largest)
    else:
        values = loss_scale.next_state(state, is_finite)
    wanted = f"`next_state` of {type(loss_scale).__name__} must return"
    values, may_fail = checked_values(loss_scale, wanted, values)
    if valid is not current:  # what was replaced is moved no further
        moved = values.get(name, valid)
        values[name] = select(tf.equal(current, valid), moved, valid)
    return values, may_fail


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
    infinity. So the next step brings such a value back, and moves it no further. Eager
    mode warns.
    """
    floor = getattr(loss_scale, "min_loss_scale", arguments.FLOAT32_MIN)
    knows_values = mode.current().knows_values
    # A scale at its floor was rounded to float32, too.
    if knows_values and float(np.float32(floor)) <= float(current) < float("inf"):
        return current
    is_number = tf.logical_and(current > 0.0, current <= tf.float32.max)  # NaN is not
    valid = tf.maximum(current, floor)
    valid = select(is_number, valid, loss_scale.initial_loss_scale)
    if knows_values:
        warn(
            f"The loss scale was {float(current)!r}, but it must be finite and at "
            f"least {floor:g}. The run continues with {float(valid)!r}. If a file held "
            "that value, check where the file came from. If not, `next_state` of "
            f"{type(loss_scale).__name__} has returned it: keep what it returns "
            "positive and finite."
        )
    return valid
