"""How a loss scale is adjusted to one step, in each context. Its class has the rule.

`LossScale` and the optimizers call these functions. A subclass need not call them.
"""

from __future__ import annotations

import inspect
from typing import Any, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.check import Check
from lossscale.gradients.finite import all_finite, checked
from lossscale.gradients.largest import bounded, largest_if_finite
from lossscale.runtime import mode, replicas
from lossscale.runtime.aliases import Flag, Scalar
from lossscale.runtime.control import group_ops, rarely, with_dependencies
from lossscale.runtime.graphs import let_bodies_go


def update(loss_scale: Any, grads: Any) -> Tuple[Any, Any]:
    """Adjusts a loss scale to gradients, as described at `LossScale.update`."""
    if loss_scale.last_largest is not None:
        largest = replicas.call_for_each_replica(largest_if_finite, grads)
        largest = replicas.greatest(largest)
        return tuple(loss_scale.adjust(tf.math.is_finite(largest), largest))
    if not tf.distribute.has_strategy():
        return adjust_by_check(loss_scale, checked(grads))
    is_finite = replicas.call_for_each_replica(all_finite, grads)
    return tuple(loss_scale.adjust(replicas.agree(is_finite)))


def check_takes_largest(loss_scale: Any) -> None:
    """Refuses a loss scale whose `adjust` does not take the largest gradient.

    Raises:
      TypeError: Its subclass overrides `adjust` without the argument `largest`.
    """
    signature = inspect.signature(loss_scale.adjust)
    try:
        signature.bind(True, 1.0)
    except TypeError:
        raise TypeError(
            f"`adjust` of {type(loss_scale).__name__} must take `largest` as second "
            f"argument, got adjust{signature}. Write `def adjust(self, is_finite, "
            "largest=None)`, and pass both to `super().adjust(is_finite, largest)`."
        ) from None


def arguments_of(
    loss_scale: Any, is_finite: Flag, largest: Optional[Scalar]
) -> List[Any]:
    """Returns the arguments of `adjust_state` after the first.

    Raises:
      TypeError: The loss scale needs `largest`, and it is None.
    """
    if loss_scale.needs_largest and largest is None:
        raise TypeError(
            "`largest` must be the greatest magnitude of the step's unscaled "
            f"gradients, since {type(loss_scale).__name__} needs it, got None. "
            "`update(grads)` computes it."
        )
    if loss_scale.last_largest is None or largest is None:
        return [is_finite]
    return [is_finite, tf.cast(tf.convert_to_tensor(largest), tf.float32)]


def unguarded(loss_scale: Any) -> Any:
    """Returns the loss scale that a `SpikeGuard` holds, and any other unchanged."""
    is_guard = getattr(loss_scale, "skips_spikes", False)
    return loss_scale.loss_scale if is_guard else loss_scale


def decision_of(loss_scale: Any, arguments: List[Any]) -> List[Any]:
    """Asks a loss scale whether to apply the step, before its state moves.

    Args:
      loss_scale: A `LossScale`. One that decides by more than the flag, as `SpikeGuard`
        does, has a method `_decide` with the arguments of its `_adjust`. On a bad step
        the greatest magnitude may have any value.
      arguments: As `arguments_of` returns them.

    Returns:
      `should_apply_gradients`, then the further arguments for `_adjust`, which come
      after the magnitude. An empty list if only the flag decides.
    """
    return [] if loss_scale._decide is None else list(loss_scale._decide(*arguments))


def adjust_by_check(loss_scale: Any, check: Check) -> Tuple[Any, Any]:
    """Like `LossScale.adjust`, but runs the exact check only if the quick check fails.

    With one replica, one branch of the graph holds both the exact check and the rule. A
    good step that does not move the loss scale is only counted, outside of that branch.

    Args:
      loss_scale: A `LossScale`.
      check: The check of the step's gradients, equal on all replicas.

    Returns:
      `update_op` and `should_apply_gradients`, as `LossScale.update` does.
    """
    if check.largest is not None:
        return tuple(loss_scale.adjust(check.exact(), check.largest))
    stays = None
    if mode.current().branch_saves_time and replicas.count() == 1:
        stays = loss_scale._stays()
    if stays is None:
        return tuple(loss_scale.adjust(check.exact()))

    def apply_rule() -> Any:
        is_finite = check.exact_in_branch()
        return with_dependencies(adjust_state(loss_scale, is_finite), is_finite)

    only_counts = tf.logical_and(check.quick, stays)
    is_finite = tf.cond(
        only_counts, lambda: _count_good(loss_scale), rarely(apply_rule)
    )
    let_bodies_go(is_finite)
    return group_ops([is_finite]), is_finite


def adjust_state(
    loss_scale: Any, is_finite: Flag, largest: Scalar = None, *decision: Any
) -> Any:
    """Runs the rule and moves the counters of every loss scale, once for all replicas.

    Args:
      loss_scale: A `LossScale`.
      is_finite: The agreed flag, a `bool` tensor of shape `[]`.
      largest: The greatest magnitude. None: not requested.
      *decision: The result of `decision_of`.

    Returns:
      The operation that a graph must run. None in eager mode, where all of it has run.
    """
    is_finite = replicas.local_result(is_finite)
    results, arguments = [], [is_finite]
    if largest is not None:
        largest = bounded(is_finite, replicas.local_result(largest))
        results.append(loss_scale.last_largest.assign(largest, read_value=False))
        arguments += [largest] if loss_scale.needs_largest else []
    arguments += map(replicas.local_result, decision)
    results.append(loss_scale._adjust(*arguments))
    results.append(loss_scale.last_step_finite.assign(is_finite, read_value=False))
    in_a_row = loss_scale.consecutive_skipped_steps
    # In eager mode the flag is known, and adding 0 would take as long as the rule.
    if mode.current().knows_values and is_finite:
        return group_ops([*results, in_a_row.assign(0, read_value=False)])
    skipped = tf.cast(tf.logical_not(is_finite), tf.int64)
    now_in_a_row = (tf.convert_to_tensor(in_a_row) + 1) * skipped
    results.append(loss_scale.skipped_steps.assign_add(skipped, read_value=False))
    results.append(in_a_row.assign(now_in_a_row, read_value=False))
    return group_ops(results)


def _count_good(loss_scale: Any) -> Any:
    """Counts a good step that does not move the loss scale. Returns its flag, True."""
    in_a_row = loss_scale.consecutive_skipped_steps.assign(0, read_value=False)
    is_finite = loss_scale.last_step_finite.assign(True, read_value=False)
    return with_dependencies([loss_scale._count_good(), in_a_row, is_finite], True)
