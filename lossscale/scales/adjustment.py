"""How a step adjusts a loss scale: its rule runs, and the step is counted."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Mapping, Optional, Tuple

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


def adjust_to_step(
    loss_scale: LossScale,
    is_finite: Flag,
    largest: Optional[Scalar],
    rule_learns: Flag = True,
    grads: Optional[Grads] = None,
) -> Tuple[Op, Any]:
    """Runs the rule of a loss scale, and counts the step. Returns what `update` does.

    The caller has checked the gradients, or the arguments. What becomes of a step:

    ```
    a step                                  is applied   the rule learns of it
    finite                                  yes          yes
    an overflow                             no           yes
    finite, and left out by a guard         no           no: see `guard.guarded`
    a bad loss, with nonfinite_loss="skip"  no           no, unless there are many
    ```

    Args:
      loss_scale: A loss scale.
      is_finite: As in `LossScale.adjust`.
      largest: As in `LossScale.adjust`.
      rule_learns: If False, the step is a bad one that is only counted.
      grads: The gradients, for a subclass with its own `update`.
    """
    if rule_learns is not True:
        return _adjusted_or_counted(loss_scale, is_finite, largest, rule_learns, grads)
    if grads is not None:
        # They may have been clipped since the check. A scalar that is infinite on a
        # bad step tells the subclass that they were not finite.
        is_bad = arithmetic.infinite_unless(is_finite)
        update_op, should_apply = loss_scale.update([*grads, is_bad])
        return update_op, both(is_finite, should_apply)
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
    change = functools.partial(_change, loss_scale)
    return replicas.merge_call(change, is_finite, largest), is_finite


def _adjusted_or_counted(
    loss_scale: LossScale,
    is_finite: Flag,
    largest: Optional[Scalar],
    rule_learns: Flag,
    grads: Optional[Grads],
) -> Tuple[Op, Flag]:
    """Adjusts a loss scale to a step, or only counts it, if it is a bad one."""

    def adjust() -> Flag:
        return flag_after(*adjust_to_step(loss_scale, is_finite, largest, True, grads))

    def count() -> Flag:
        bad, change = tf.constant(False), functools.partial(_only_count, loss_scale)
        given = bad, arithmetic.infinite_unless(bad)
        return flag_after(replicas.merge_call(change, *given), bad)

    should_apply = either(rule_learns, adjust, count)
    return group_ops([should_apply]), should_apply


def flag_after(op: Op, flag: Any) -> Flag:
    """Returns a flag as a tensor of shape `[]`, after an operation has run."""
    with tf.control_dependencies([group_ops([op])]):
        return tf.reshape(tf.convert_to_tensor(flag, tf.bool), [])


def _change(loss_scale: LossScale, is_finite: Flag, largest: Optional[Scalar]) -> Op:
    """Runs the rule, and counts the step: see `replicas.merge_call`."""
    is_finite = tf.convert_to_tensor(replicas.local_result(is_finite))
    largest = replicas.local_result(largest)
    # The rule may read the counters, so it runs before they change.
    assigned = assign(loss_scale, new_values(loss_scale, is_finite, largest))
    return group_ops([assigned, _count(loss_scale, is_finite, largest)])


def _only_count(loss_scale: LossScale, is_finite: Flag, largest: Scalar) -> Op:
    """Counts a bad step that the rule ignores: see `replicas.merge_call`."""
    is_finite, largest = map(replicas.local_result, (is_finite, largest))
    counted = _count(loss_scale, tf.convert_to_tensor(is_finite), largest)
    ignored = loss_scale.ignored_loss_steps
    if ignored is not None:
        counted.append(ignored.assign_add(1, read_value=False))
    return group_ops(counted)


def new_values(
    loss_scale: LossScale, is_finite: Flag, largest: Optional[Scalar]
) -> Dict[str, Tensor]:
    """Returns what the rule makes of the variables, by name. Assigns nothing."""
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
    values = checked_values(loss_scale, wanted, values)
    if valid is not current:  # what was replaced is moved no further
        moved = values.get(name, valid)
        values[name] = select(tf.equal(current, valid), moved, valid)
    return values


def _count(
    loss_scale: LossScale, is_finite: Flag, largest: Optional[Scalar]
) -> List[Op]:
    """Counts a step."""
    zero, one = tf.constant(0, tf.int64), tf.constant(1, tf.int64)
    bad = select(is_finite, zero, one)
    results = [loss_scale.skipped_steps.assign_add(bad, read_value=False)]
    in_a_row = select(is_finite, zero, loss_scale.consecutive_skipped_steps + one)
    counts = {"consecutive_skipped_steps": in_a_row, "last_step_finite": is_finite}
    if largest is not None and loss_scale.last_largest is not None:
        results.append(loss_scale.last_largest.assign(largest, read_value=False))
    return [*results, *assign(loss_scale, counts)]


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
