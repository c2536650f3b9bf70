"""How a step adjusts a loss scale: it is judged, the rule runs, and it is counted.

A loss scale may hold another one, and that one a third: a `chain`. All of them judge a
step before anything changes:

* The step is applied if it is finite, and every loss scale of the chain applies it.
* The rules run if every loss scale of the chain would have its rule learn of the step.
* One that is held neither counts a step nor keeps anything of it if a loss scale around
  it keeps the step from the rule: for the held one there was no such step.
"""

from __future__ import annotations

import functools
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
)

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.gradients import arithmetic
from lossscale.runtime import mode, replicas
from lossscale.runtime.aliases import Flag, Grads, Op, Scalar, Tensor
from lossscale.runtime.control import either, group_ops, run_either, select
from lossscale.runtime.loss_scale_warning import warn
from lossscale.scales.checks import (
    LossScale,
    checked_values,
    checked_verdict,
    variable_of,
)


class Verdict(NamedTuple):
    """What becomes of a step. A loss scale's `judge` gives it.

    The last row is the optimizer's: a loss scale does not see losses.

    ```
    a step                                  is applied   the rule is told of it
    finite                                  yes          yes
    an overflow                             no           yes
    finite, and left out, as a spike        no           no
    a bad loss, with nonfinite_loss="skip"  no           no, unless there are many
    ```

    How many bad losses are many, `lossscale/scales/ignored_losses.py` says: the tenth
    in a row, and some if more than one step in five has one.

    A verdict can only leave a step out: a step that is not finite is never applied,
    whatever `should_apply` is. Where one loss scale holds another one, a step is
    applied if both apply it, and their rules learn of it if both would have them learn.

    Attributes:
      should_apply: Whether the step is applied if it is finite.
      is_told: Whether the rule, `next_state`, learns of it.
      kept: New values by the names of variables, as `next_state` returns them. They are
        assigned whatever `is_told` is, but not if a loss scale that holds this one
        keeps the step from the rule.
    """

    should_apply: Flag
    is_told: Flag = True
    kept: Mapping[str, Tensor] = {}


class State:
    """The values of a loss scale's variables before a step, by name, as attributes."""

    current_loss_scale: Tensor

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale

    def __getattr__(self, name: str) -> Tensor:
        # A rule reads few of them.
        return tf.convert_to_tensor(variable_of(self._loss_scale, name))


def chain(loss_scale: LossScale) -> List[LossScale]:
    """Returns a loss scale, the one that it holds, the one that this holds, and so on.

    A loss scale that holds none is a chain by itself.
    """
    held = loss_scale._held()
    return [loss_scale] if held is None else [loss_scale, *chain(held)]


def adjust_to_step(
    loss_scale: LossScale,
    is_finite: Flag,
    largest: Optional[Scalar],
    rule_learns: Flag = True,
    grads: Optional[Grads] = None,
    calls_adjust: bool = True,
) -> Tuple[Op, Any]:
    """Judges a step, runs the rules, and counts it. Returns what `update` does.

    The caller has checked the gradients, or the arguments.

    Args:
      loss_scale: The outermost loss scale of a chain.
      is_finite: As in `LossScale.adjust`.
      largest: As in `LossScale.adjust`.
      rule_learns: Whether the rules learn of the step if the loss scales would let
        them. If False, the step is a bad one that is only counted, and not applied.
      grads: The gradients, for a subclass with its own `update`.
      calls_adjust: Whether to call a subclass's own `adjust`. `LossScale.adjust` passes
        False: the subclass's `adjust` calls it by `super()`, and must not run again.
    """
    if rule_learns is not True:
        return _adjusted_or_counted(loss_scale, is_finite, largest, rule_learns, grads)
    if grads is not None or (calls_adjust and "adjust" in loss_scale._overridden):
        return _adjusted_by_itself(loss_scale, is_finite, largest, grads)
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
    is_plain = not loss_scale._overridden & {"judge", "_adjust"}
    if is_plain and loss_scale._held() is None:
        change = functools.partial(_change_one, loss_scale)
        return replicas.merge_call(change, is_finite, largest), is_finite
    members = chain(loss_scale)
    should_apply, told, kept = _judged(members, is_finite, largest)
    # A flag that turns out to be malformed when a graph runs must stop the step, too.
    before = [] if should_apply is is_finite else [should_apply]
    change = functools.partial(_change_chain, members)
    update_op = replicas.merge_call(change, is_finite, largest, told, kept, before)
    return update_op, should_apply


def _adjusted_by_itself(
    loss_scale: LossScale,
    is_finite: Flag,
    largest: Optional[Scalar],
    grads: Optional[Grads],
) -> Tuple[Op, Flag]:
    """Calls a subclass's own `update` or `adjust`. No overflow is applied."""
    if grads is not None:
        # They may have been clipped since the check. A scalar that is infinite on a
        # bad step tells the subclass that they were not finite.
        is_bad = arithmetic.infinite_unless(is_finite)
        update_op, should_apply = loss_scale.update([*grads, is_bad])
    elif largest is None:  # a subclass's `adjust` may take the flag alone
        update_op, should_apply = loss_scale.adjust(is_finite)
    else:
        update_op, should_apply = loss_scale.adjust(is_finite, largest)
    return update_op, both(is_finite, should_apply)


def _adjusted_or_counted(
    loss_scale: LossScale,
    is_finite: Flag,
    largest: Optional[Scalar],
    rule_learns: Flag,
    grads: Optional[Grads],
) -> Tuple[Op, Flag]:
    """Adjusts a loss scale to a step, or only counts it, if it is a bad one."""

    def adjust() -> Flag:
        return after(*adjust_to_step(loss_scale, is_finite, largest, True, grads))

    def count() -> Flag:
        bad, change = tf.constant(False), functools.partial(_change_chain, [loss_scale])
        magnitude = arithmetic.infinite_unless(bad)
        return after(
            replicas.merge_call(change, bad, magnitude, [False], [{}], []), bad
        )

    def after(update_op: Op, should_apply: Any) -> Flag:
        with tf.control_dependencies([group_ops([update_op])]):
            return tf.reshape(tf.convert_to_tensor(should_apply, tf.bool), [])

    should_apply = either(rule_learns, adjust, count)
    return group_ops([should_apply]), should_apply


def would_apply(
    loss_scale: LossScale, is_finite: Flag, largest: Optional[Scalar]
) -> Flag:
    """Tells whether the loss scale applies a step. Changes nothing."""
    if largest is not None:
        largest = arithmetic.bounded(is_finite, largest)
    should_apply, _, _ = _judged(chain(loss_scale), is_finite, largest)
    return should_apply


def _judged(
    members: List[LossScale], is_finite: Flag, largest: Optional[Scalar]
) -> Tuple[Flag, List[Flag], List[Mapping[str, Tensor]]]:
    """Returns whether a step is applied, and `is_told` and `kept` of each verdict.

    Changes nothing. Only here is it decided, and no verdict makes an overflow applied.
    """
    should_apply = is_finite
    told: List[Flag] = []
    kept: List[Mapping[str, Tensor]] = []
    for member in members:
        if not member.checks_gradients:
            break  # it applies every step, and passes none on
        verdict = Verdict(is_finite)
        if "judge" in member._overridden:
            its_largest = None if member.last_largest is None else largest
            returned = member.judge(State(member), is_finite, its_largest)
            verdict = Verdict(*checked_verdict(member, returned, Verdict))
            should_apply = both(should_apply, verdict.should_apply)
        told.append(verdict.is_told)
        kept.append(verdict.kept)
    return should_apply, told, kept


def _change_one(
    loss_scale: LossScale, is_finite: Flag, largest: Optional[Scalar]
) -> Op:
    """Changes the variables of one that holds none: see `replicas.merge_call`."""
    is_finite = tf.convert_to_tensor(replicas.local_result(is_finite))
    largest = replicas.local_result(largest)
    # The rule may read the counters, so it runs before they change.
    assigned = assign(loss_scale, new_values(loss_scale, is_finite, largest))
    counted = _count(loss_scale, is_finite, largest, True, {})
    return group_ops([assigned, counted])


def _change_chain(
    members: List[LossScale],
    is_finite: Flag,
    largest: Optional[Scalar],
    told: List[Flag],
    kept: List[Mapping[str, Tensor]],
    before: List[Tensor],
) -> Op:
    """Changes the variables of a chain: see `replicas.merge_call`.

    `told` and `kept` are of the members' verdicts. Nothing is assigned before `before`
    is computed, or before all rules have returned: an error in one changes nothing.
    """
    is_finite = tf.convert_to_tensor(replicas.local_result(is_finite))
    largest = replicas.local_result(largest)
    # Whether each member gets the step from those that hold it, and the rules get it.
    passed_on: List[Flag] = [True]
    for flag in told:
        passed_on.append(both(passed_on[-1], replicas.local_result(flag)))
    with_rule: List[LossScale] = []
    rules = functools.partial(_run_rules, with_rule, is_finite, largest)
    # Conditions, and what is done on each. Rules may read the counters, so they are
    # before these; of two members the inner one is the first.
    work: List[Tuple[Flag, Callable[[], Any]]] = []
    for number, (member, values) in enumerate(zip(members, kept)):
        its_largest = None if member.last_largest is None else largest
        if number and "adjust" in member._overridden:
            step = [is_finite] if its_largest is None else [is_finite, its_largest]
            adjust = functools.partial(member.adjust, *step)
            work.insert(0, (passed_on[number], adjust))
            break
        count = functools.partial(
            _count, member, is_finite, its_largest, passed_on[-1], values
        )
        work.insert(0, (passed_on[number], count))
        # It assigns by itself, and passes the step on to what it holds.
        if "_adjust" in member._overridden:
            step = [is_finite, largest] if member.needs_largest else [is_finite]
            adjust = functools.partial(member._adjust, *step)
            work.insert(0, (passed_on[number + 1], adjust))
            break
        with_rule.append(member)
    work.insert(0, (passed_on[-1], rules))
    # Neighbours with the same condition are in one branch.
    branches: List[Tuple[Flag, List[Callable[[], Any]]]] = []
    for condition, function in work:
        if not branches or branches[-1][0] is not condition:
            branches.append((condition, []))
        branches[-1][1].append(function)
    results = []
    with tf.control_dependencies(list(map(replicas.local_result, before))):
        for condition, functions in branches:
            run = functools.partial(_call_all, functions)
            results.append(run_either(condition, run, list, True))
    return group_ops(results)


def _call_all(functions: Iterable[Callable[[], Any]]) -> List[Any]:
    """Calls functions, one after the other, and returns what they return."""
    return [function() for function in functions]


def _run_rules(
    members: List[LossScale], is_finite: Flag, largest: Optional[Scalar]
) -> List[Op]:
    """Assigns what the rules return, after all of them have returned."""
    new = [new_values(member, is_finite, largest) for member in members]
    return [assign(member, values) for member, values in zip(members, new)]


def new_values(
    loss_scale: LossScale, is_finite: Flag, largest: Optional[Scalar]
) -> Dict[str, Tensor]:
    """Returns what the rule makes of the variables, by name. Assigns nothing."""
    has_rule = "next_state" in loss_scale._overridden
    if not has_rule and loss_scale._held() is not None:
        return {}  # the rule is that of the one that it holds
    state, name = State(loss_scale), "current_loss_scale"
    current = valid = None
    if hasattr(loss_scale, "initial_loss_scale") and hasattr(loss_scale, name):
        current = state.current_loss_scale
        state.current_loss_scale = valid = repaired(loss_scale, current)
    if has_rule and loss_scale.needs_largest and not loss_scale._largest_is_for_held:
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
    loss_scale: LossScale,
    is_finite: Flag,
    largest: Optional[Scalar],
    rule_learns: Flag,
    values: Mapping[str, Tensor],
) -> List[Op]:
    """Counts a step, and assigns `values`, those that the verdict keeps."""
    zero, one = tf.constant(0, tf.int64), tf.constant(1, tf.int64)
    bad = select(is_finite, zero, one)
    results = [loss_scale.skipped_steps.assign_add(bad, read_value=False)]
    ignored = loss_scale.ignored_loss_steps
    if ignored is not None and rule_learns is not True:
        bad = select(rule_learns, zero, bad)
        results.append(ignored.assign_add(bad, read_value=False))
    in_a_row = select(is_finite, zero, loss_scale.consecutive_skipped_steps + one)
    counts = {"consecutive_skipped_steps": in_a_row, "last_step_finite": is_finite}
    if largest is not None:
        results.append(loss_scale.last_largest.assign(largest, read_value=False))
    return [*results, assign(loss_scale, {**values, **counts})]


def assign(loss_scale: LossScale, values: Mapping[str, Tensor]) -> List[Op]:
    """Assigns values, which are checked, to the variables of these names."""
    here = {name: replicas.local_result(value) for name, value in values.items()}
    pairs = [(getattr(loss_scale, name), value) for name, value in here.items()]
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
