"""The step that the wrappers of all Kerases share: check, agree, adjust, apply or skip.

Nothing here knows a rule of a loss scale, or a Keras.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.faults import Check
from lossscale.optimizer import sharing
from lossscale.optimizer.agreement import Agreed, Agreement
from lossscale.optimizer.fault_record import Entry
from lossscale.optimizer.unscaling import follows_its_rule, prepare, unscaled
from lossscale.runtime import replicas
from lossscale.runtime.control import either, group_ops, with_dependencies
from lossscale.scales.base import LossScale


def apply_or_skip(
    optimizer: Any,
    loss_scale: LossScale,
    grads: List[Any],
    variables: Any,
    apply: Callable[..., Any],
    *,
    divisor: Optional[Any],
    earlier: Optional[Check],
    is_checked: bool,
    aggregates: bool,
    entry: Optional[Entry],
    losses: List[Any],
) -> Any:
    """Unscales gradients and applies them, or skips them on every replica.

    They are applied only if they were finite on every replica when they were unscaled
    (`earlier`), are so now, and stay so when they are added up across replicas: two
    float16 gradients of 4e4 are finite, their sum is not. A skipped step changes
    nothing but the loss scale's own state and the record of what was at fault.

    Args:
      optimizer: The wrapper, one of those that share `loss_scale`.
      loss_scale: What is adjusted to the step.
      grads: This replica's gradients; some may be None.
      variables: What the gradients are applied to.
      apply: Called as `apply(grads, variables)` on each replica unless the step is
        skipped. It must hold nothing that differs between replicas.
      divisor: What they are still to be divided by, a `float32` tensor of shape `[]`.
        None: they are unscaled.
      earlier: This replica's check of when they were unscaled. None: there was none.
      is_checked: Whether nobody has changed them since, so that `earlier` says all.
      aggregates: Whether `apply` adds the gradients up across replicas.
      entry: Where a skipped step's faults are kept. None: nowhere.
      losses: The unscaled losses that the gradients are of, the last ones.

    Returns:
      In a graph, an op that does it all. None in eager mode.
    """
    if not loss_scale.checks_gradients:
        return group_ops([apply(unscaled(loss_scale, grads, divisor), variables)])
    prepared = prepare(loss_scale, grads, divisor, earlier, is_checked)
    finish = prepared.finish
    agreement = Agreement(prepared, aggregates)

    def record(grads: Any, earlier: Any, codes_of_sum: Any, losses: Any) -> Any:
        codes = replicas.call_for_each_replica(agreement.codes, grads, earlier)
        return _record(entry, loss_scale, codes, codes_of_sum, losses)

    def agree_and_adjust(vote: Any, grads: Any, earlier: Any) -> Tuple[Any, Any, Any]:
        agreed = agreement.agree(vote, grads, earlier)
        adjusted = _adjust(optimizer, loss_scale, agreed, grads)
        return (*adjusted, agreed.codes_of_sum)

    def meet(vote: Any, grads: Any, whole: Any, earlier: Any, losses: Any) -> Any:
        update_op, should_apply, codes_of_sum = agree_and_adjust(vote, grads, earlier)

        def apply_everywhere() -> Any:
            done = replicas.call_for_each_replica(
                _apply_here, apply, finish, grads, whole
            )
            return with_dependencies([done], True)

        def skip() -> Any:
            recorded = record(grads, earlier, codes_of_sum, losses)
            return with_dependencies([recorded], True)

        if should_apply is True:  # a rule that applies every step needs no branch
            done = apply_everywhere()
        else:
            done = either(should_apply, apply_everywhere, skip)
        return group_ops([done, update_op])

    if not tf.executing_eagerly():
        whole = _Whole(variables)
        return replicas.merge_call(
            meet, agreement.vote, prepared.grads, whole, prepared.earlier, losses
        )
    # Python's own branch may stand in replica context: no thread needs to start anew.
    _, should_apply, codes_of_sum = replicas.merge_call(
        agree_and_adjust, agreement.vote, prepared.grads, prepared.earlier
    )
    if bool(should_apply):
        apply(finish(prepared.grads), variables)
    else:
        replicas.merge_call(
            record, prepared.grads, prepared.earlier, codes_of_sum, losses
        )
    return None


class _Whole:
    """Keeps tf.distribute from handing on one replica's copy of each variable.

    Optimizers expect the mirrored variable, in replica context too.
    """

    def __init__(self, variables: Any) -> None:
        self.variables = variables


def _apply_here(
    apply: Callable[..., Any], finish: Callable[..., Any], grads: Any, whole: _Whole
) -> Any:
    return apply(finish(grads), whole.variables)


def _record(
    entry: Optional[Entry],
    loss_scale: LossScale,
    codes: Any,
    codes_of_sum: Any,
    losses: Any,
) -> Any:
    """Keeps what was at fault. Called once for all replicas, on a skipped step."""
    if entry is None:
        return None
    skipped = replicas.local_result(loss_scale.skipped_steps)
    return entry.write(codes, replicas.local_result(codes_of_sum), losses, skipped)


def _adjust(
    optimizer: Any, loss_scale: LossScale, agreed: Agreed, grads: List[Any]
) -> Tuple[Any, Any]:
    if follows_its_rule(loss_scale):
        return sharing.adjust(loss_scale, optimizer, agreed.finiteness)
    # A subclass that overrides update whole sees the gradients, and with them a scalar
    # that is finite only if the step was: the gradients may have been clipped since.
    flag = tf.where(agreed.finiteness.exact(), 0.0, float("nan"))
    return loss_scale.update([*grads, flag])
