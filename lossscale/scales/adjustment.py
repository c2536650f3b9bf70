"""How a step adjusts a loss scale: it is judged, the rule runs, and it is counted.

A loss scale may hold another one, and that one a third: a `chain`. All of them judge a
step before anything changes:

* The step is applied if it is finite, and every loss scale of the chain applies it.
* The rules run if every loss scale of the chain would have its rule learn of the step.
* One that is held neither counts a step nor keeps anything of it if a loss scale around
  it keeps the step from the rule: for the held one there was no such step.
"""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import itertools
from typing import (
    TYPE_CHECKING,
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
from lossscale.arguments import shown
from lossscale.gradients import arithmetic
from lossscale.runtime import mode, replicas
from lossscale.runtime.aliases import Flag, Op, Scalar, Tensor, Variable
from lossscale.runtime.control import group_ops, run_either
from lossscale.runtime.loss_scale_warning import warn

if TYPE_CHECKING:
    from lossscale.scales.base import LossScale


class Verdict(NamedTuple):
    """What becomes of a step. A loss scale's `judge` gives it.

    The last row is the optimizer's: a loss scale does not see losses.

    ```
    a step                                  is applied   the rule is told of it
    finite                                  yes          yes
    an overflow                             no           yes
    finite, and left out, as a spike        no           no
    a bad loss, with nonfinite_loss="skip"  no           one in ten in a row
    ```

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
    members = [loss_scale]
    held = loss_scale._held()
    while held is not None:
        members.append(held)
        held = held._held()
    return members


def take_step(
    loss_scale: LossScale,
    is_finite: Flag,
    largest: Optional[Scalar],
    is_told: bool = True,
) -> Tuple[Op, Any]:
    """Judges a step, runs the rules, and counts it. Returns what `update` does.

    The caller has checked the arguments. If `is_told` is False, the step is a bad one
    that is only counted: nobody judges it.
    """
    if not loss_scale.checks_gradients:
        return group_ops([]), True
    members = chain(loss_scale)
    for member in members:
        if member.needs_largest and largest is None:
            raise TypeError(
                "`largest` must be the greatest magnitude of the step's unscaled "
                f"gradients, since {type(member).__name__} needs it, got None. "
                "`update(grads)` computes it."
            )
    if largest is not None:
        is_requested = loss_scale.last_largest is not None
        largest = arithmetic.bounded(is_finite, largest) if is_requested else None
    if is_told:
        should_apply, verdicts = _judged(members, is_finite, largest)
    else:
        should_apply, verdicts = False, [Verdict(False, False)]
    told = [verdict.is_told for verdict in verdicts]
    kept = [verdict.kept for verdict in verdicts]
    # A flag that turns out to be malformed when a graph runs must stop the step, too.
    before = [] if should_apply is is_finite else [should_apply]
    change = functools.partial(_change, members)
    update_op = replicas.merge_call(change, is_finite, largest, told, kept, before)
    return update_op, should_apply


def would_apply(
    loss_scale: LossScale, is_finite: Flag, largest: Optional[Scalar]
) -> Flag:
    """Tells whether the loss scale applies a step. Changes nothing."""
    if largest is not None:
        largest = arithmetic.bounded(is_finite, largest)
    return _judged(chain(loss_scale), is_finite, largest)[0]


def _judged(
    members: List[LossScale], is_finite: Flag, largest: Optional[Scalar]
) -> Tuple[Flag, List[Verdict]]:
    """Returns whether a step is applied, and the verdicts. Changes nothing.

    Only here is it decided, and no verdict makes an overflow applied.
    """
    should_apply, verdicts = is_finite, []
    for member in members:
        if not member.checks_gradients:
            break  # it applies every step, and passes none on
        verdict = Verdict(is_finite)
        if "judge" in member._overridden:
            its_largest = None if member.last_largest is None else largest
            found = member.judge(State(member), is_finite, its_largest)
            verdict = _checked_verdict(member, found)
        should_apply = both(should_apply, verdict.should_apply)
        verdicts.append(verdict)
    return should_apply, verdicts


def _change(
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

    def run_rules() -> List[Op]:
        new = [new_values(each, is_finite, largest) for each in with_rule]
        return [assign(*pair) for pair in zip(with_rule, new)]

    # Conditions, and what is done on each. Rules may read the counters, so they are
    # before these; of two members the inner one is the first.
    work: List[Tuple[Flag, Callable[[], Any]]] = []
    for number, (member, values) in enumerate(zip(members, kept)):
        its_largest = None if member.last_largest is None else largest
        if number and "adjust" in member._overridden:
            given = [is_finite] if its_largest is None else [is_finite, its_largest]
            work.insert(
                0, (passed_on[number], functools.partial(member.adjust, *given))
            )
            break
        count = functools.partial(
            _count, member, is_finite, its_largest, passed_on[-1], values
        )
        work.insert(0, (passed_on[number], count))
        if (
            "_adjust" in member._overridden
        ):  # it assigns, and passes the step on, itself
            given = [is_finite, largest] if member.needs_largest else [is_finite]
            adjust = functools.partial(member._adjust, *given)
            work.insert(0, (passed_on[number + 1], adjust))
            break
        with_rule.append(member)
    work.insert(0, (passed_on[-1], run_rules))
    results = []
    with tf.control_dependencies([replicas.local_result(flag) for flag in before]):
        for _, group in itertools.groupby(work, lambda pair: id(pair[0])):
            (condition, *_), functions = zip(*group)
            run = functools.partial(_each, functions)
            results.append(run_either(condition, run, list, True))
    return group_ops(results)


def _each(functions: Iterable[Callable[[], Any]]) -> List[Any]:
    """Calls functions, one after the other, and returns what they return."""
    return [function() for function in functions]


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
        values[name] = tf.where(tf.equal(current, valid), moved, valid)
    return values


def _count(
    loss_scale: LossScale,
    is_finite: Flag,
    largest: Optional[Scalar],
    is_told: Flag,
    values: Mapping[str, Tensor],
) -> List[Op]:
    """Counts a step, and assigns `values`, those that the verdict keeps."""
    zero, one = tf.constant(0, tf.int64), tf.constant(1, tf.int64)
    bad = tf.where(is_finite, zero, one)
    results = [loss_scale.skipped_steps.assign_add(bad, read_value=False)]
    untold = loss_scale._unsaved.untold
    if untold is not None and is_told is not True:
        bad = tf.where(is_told, zero, bad)
        results.append(untold.assign_add(bad, read_value=False))
    in_a_row = tf.convert_to_tensor(loss_scale.consecutive_skipped_steps) + one
    counts = {
        "consecutive_skipped_steps": tf.where(is_finite, zero, in_a_row),
        "last_step_finite": is_finite,
    }
    if largest is not None:
        results.append(loss_scale.last_largest.assign(largest, read_value=False))
    return [*results, assign(loss_scale, {**values, **counts})]


def assign(loss_scale: LossScale, values: Mapping[str, Tensor]) -> List[Op]:
    """Assigns values, which are checked, to the variables of these names."""
    ops = []
    for name, value in values.items():
        variable, new = getattr(loss_scale, name), replicas.local_result(value)
        ops.append(variable.assign(new, read_value=False))
    return ops


def both(one: Flag, other: Flag) -> Flag:
    """Tells whether both are True. Python's True adds no operation to a graph."""
    if one is True or one is other:
        return other
    return one if other is True else tf.logical_and(one, other)


def variable_of(loss_scale: LossScale, name: str) -> Variable:
    """Returns the variable that is the attribute `name`, or raises."""
    found = getattr(loss_scale, name, None)
    if isinstance(found, tf.Variable):
        return found
    cls = type(loss_scale).__name__
    create = f"self.{name} = self._add_weight({name!r}, 0)"
    if hasattr(found, "assign"):
        raise TypeError(
            f"`{name}` of {cls} must be a tf.Variable, got {shown(found)}. Create it "
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
) -> Dict[str, Tensor]:
    """Returns new values by name as tensors of the variables' dtypes, or raises.

    `wanted` is how an error begins.
    """
    if not isinstance(values, collections.abc.Mapping):
        raise TypeError(
            f"{wanted} a dictionary of new values by the names of variables, got "
            f"{shown(values)}."
        )
    checked = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(
                f"{wanted} a dictionary of new values by the names of variables, got "
                f"the key {shown(name)}. Write the name as a string."
            )
        variable = variable_of(loss_scale, name)
        dtype, shape, new = variable.dtype.base_dtype, variable.shape, None
        if not isinstance(value, (tf.IndexedSlices, tf.SparseTensor)):
            with contextlib.suppress(TypeError, ValueError):
                new = tf.convert_to_tensor(value, dtype)
        # A graph takes an eager tensor of any dtype.
        if new is None or new.dtype != dtype or not shape.is_compatible_with(new.shape):
            raise TypeError(
                f"{wanted} {dtype.name} of shape {shape} for {name!r}, got "
                f"{shown(value)}. tf.cast changes a dtype, tf.reshape a shape."
            )
        checked[name] = new
    return checked


def _checked_verdict(loss_scale: LossScale, verdict: Any) -> Verdict:
    """Returns a verdict with flags of shape `[]` and checked values, or raises."""
    wanted = f"`judge` of {type(loss_scale).__name__} must return a Verdict"
    if not isinstance(verdict, Verdict):
        raise TypeError(
            f"{wanted}, got {shown(verdict)}. Write "
            "lossscale.Verdict(should_apply=is_finite)."
        )
    should_apply = _checked_flag(f"{wanted} whose `should_apply` is", verdict[0])
    is_told = _checked_flag(f"{wanted} whose `is_told` is", verdict[1])
    kept = checked_values(loss_scale, f"{wanted} whose `kept` is", verdict[2])
    return Verdict(should_apply, is_told, kept)


def _checked_flag(wanted: str, value: Any) -> Flag:
    """Returns a flag as a bool or a tensor of shape `[]`. `wanted` begins the error."""
    flag: Any = None
    with contextlib.suppress(TypeError, ValueError):
        flag = tf.convert_to_tensor(value)
    is_flag = flag is not None and flag.dtype.is_bool
    if not is_flag or flag.shape.num_elements() not in {None, 1}:
        raise TypeError(
            f"{wanted} a bool, or a bool tensor of one element, got {shown(value)}. "
            "Write a comparison such as `largest < 100.0`; tf.reduce_all makes one of "
            "several."
        )
    if isinstance(value, (bool, np.bool_)):
        return bool(value)  # no operation of a graph depends on it
    return flag if flag.shape.rank == 0 else tf.reshape(flag, [])


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
    valid = tf.where(is_number, valid, loss_scale.initial_loss_scale)
    if knows_values:
        warn(
            f"The loss scale was {float(current)!r}, below its floor or no number that "
            f"it can be. It goes on with {float(valid)!r}. If it was restored from a "
            "file, check where that came from. If not, `next_state` of "
            f"{type(loss_scale).__name__} has returned it: keep what it returns "
            "positive and finite."
        )
    return valid
