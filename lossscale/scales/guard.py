"""Guard: the contract of what leaves finite steps out, and what a step does with it."""

from __future__ import annotations

import abc
from types import SimpleNamespace
from typing import Any, Callable, Mapping, Optional, Tuple

import tensorflow as tf

from lossscale.gradients import arithmetic
from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Op, Scalar, Tensor, Variable
from lossscale.runtime.control import either, group_ops, select
from lossscale.scales.adjustment import State, assign, flag_after
from lossscale.scales.checks import checked_verdict
from lossscale.scales.variables import HasVariables


class Guard(HasVariables):
    """Leaves finite steps out, such as those with huge gradients.

    `SpikeGuard` is one. Your own implements `judge` and `get_config`, and sets
    `left_out_as`: docs/bad-batches.md. An optimizer asks it about each of its steps:

    ```
    is_finite = every gradient is finite, on every replica
    should_apply, values = guard.judge(state, largest)     # of a finite step only
    if is_finite and not should_apply: the step is left out, and the loss scale's rule
      does not learn of it
    ```

    It can only leave a step out: one that is not finite is never applied.

    Attributes:
      left_out_as: A string that a subclass sets: what reports call the steps that it
        leaves out, such as `"all zero"`.
    """

    left_out_as: str = ""
    # File format: Keras's files have these names of its variables.
    _prefix = "guard_"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.left_out_as:
            raise TypeError(
                "`left_out_as` must say what the steps are that `judge` leaves out, "
                f'as in "all zero", got {cls.left_out_as!r} for {cls.__name__}. Set '
                "it in the class, next to `judge`."
            )

    def __init__(self) -> None:
        super().__init__()
        self._unsaved = SimpleNamespace()

    @abc.abstractmethod
    def judge(self, state: Any, largest: Scalar) -> Tuple[Flag, Mapping[str, Tensor]]:
        """Decides about a finite step, and changes nothing.

        Called once for all replicas. AutoGraph does not convert it: choose with
        `tf.where`. In a graph it is computed at each step, and what it returns of one
        that is not finite is not used.

        Args:
          state: The values before the step: a tensor of each variable, as an attribute
            of its name.
          largest: A `float32` tensor of shape `[]`, equal on all replicas: the greatest
            magnitude of the unscaled gradients, before you clipped them.

        Returns:
          `(should_apply, values)`: whether the step is applied, a bool or a `bool`
          tensor of one element, and a dictionary of new values by the names of the
          guard's variables, which are assigned in either case. Others stay.
        """


def guarded(
    guard: Optional[Guard],
    is_finite: Flag,
    largest: Optional[Scalar],
    adjust: Callable[[], Tuple[Op, Any]],
    last_largest: Optional[Variable] = None,
) -> Tuple[Op, Any]:
    """Has a guard judge a step, and calls `adjust` unless it leaves the step out.

    `adjust` adjusts the loss scale. Returns what that does, for both. Nothing of the
    guard is assigned before the rule has returned: an error in it changes nothing. The
    variable `last_largest` gets that of a step that is left out, too.
    """
    if guard is None or (mode.current().knows_values and not is_finite):
        return adjust()
    state, largest = State(guard), arithmetic.bounded(is_finite, largest)
    verdict = guard.judge(state, largest)
    is_usual, values = checked_verdict(guard, verdict)
    is_usual = tf.convert_to_tensor(is_usual)
    learns = tf.logical_or(tf.logical_not(is_finite), is_usual)

    def leave_out() -> Flag:
        noted = []
        if last_largest is not None:
            noted.append(last_largest.assign(largest, read_value=False))
        return flag_after(noted, False)

    should_apply = either(learns, lambda: flag_after(*adjust()), leave_out, True)
    # A flag that turns out to be malformed when a graph runs must stop this, too.
    with tf.control_dependencies([should_apply]):
        new = {n: select(is_finite, v, getattr(state, n)) for n, v in values.items()}
        assigned = assign(guard, new)
    return group_ops([should_apply, *assigned]), should_apply
