"""The step that the wrappers of all Kerases share: check, agree, adjust, apply or skip.

Nothing here knows a rule of a loss scale, or a Keras.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.faults import Check
from lossscale.gradients.finite import exactly
from lossscale.optimizer import sharing
from lossscale.optimizer.agreement import Finding, Verdict
from lossscale.optimizer.fault_record import Place
from lossscale.optimizer.unscaling import is_plain, prepare, unscaled
from lossscale.runtime import mode, replicas
from lossscale.runtime.control import after, grouped
from lossscale.scales.base import LossScale


def apply_or_skip(
    optimizer: Any,
    loss_scale: LossScale,
    grads: List[Any],
    variables: Any,
    apply: Callable[..., Any],
    *,
    divisor: Optional[Any],
    known: Optional[Check],
    is_checked: bool,
    aggregates: bool,
    place: Optional[Place],
    losses: List[Any],
) -> Any:
    """Unscales gradients and applies them, or skips them on every replica.

    They are applied only if they were finite on every replica when they were unscaled
    (`known`), are so now, and stay so when they are added up across replicas: two
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
      known: What was seen of them on this replica when they were unscaled. None if that
        is not known.
      is_checked: Whether nobody has changed them since, so that `known` holds.
      aggregates: Whether `apply` adds the gradients up across replicas.
      place: Where a skipped step's faults are kept. None: nowhere.
      losses: The unscaled losses that the gradients are of, as far as they are known.

    Returns:
      In a graph, an op that does it all. None in eager mode.
    """
    if not loss_scale.checks_gradients:
        return grouped([apply(unscaled(loss_scale, grads, divisor), variables)])
    prepared = prepare(loss_scale, grads, divisor, known, is_checked)
    change = prepared.change
    verdict = Verdict(prepared, aggregates)

    def note(grads: Any, known: Any, faults_of_sum: Any, losses: Any) -> Any:
        faults = replicas.for_each(verdict.faults, grads, known)
        return _note(place, loss_scale, faults, faults_of_sum, losses)

    def settle(code: Any, grads: Any, known: Any) -> Tuple[Any, Any, Any]:
        finding = verdict.read(code, grads, known)
        settled = _update(optimizer, loss_scale, finding, grads)
        return (*settled, finding.faults_of_sum)

    def branch(code: Any, grads: Any, held: Any, known: Any, losses: Any) -> Any:
        update_op, should_apply, faults_of_sum = settle(code, grads, known)

        def apply_everywhere() -> Any:
            done = replicas.for_each(_apply_held, apply, change, grads, held)
            return after([done], True)

        def write() -> Any:
            return after([note(grads, known, faults_of_sum, losses)], True)

        if should_apply is True:  # a rule that applies every step needs no branch
            done = apply_everywhere()
        else:
            done = mode.run_either(should_apply, apply_everywhere, write)
        return grouped([done, update_op])

    if not tf.executing_eagerly():
        held = _Held(variables)
        return replicas.once(
            branch, verdict.code, prepared.grads, held, prepared.known, losses
        )
    # Python's own branch may stand in replica context: no thread needs to start anew.
    _, should_apply, of_sum = replicas.once(
        settle, verdict.code, prepared.grads, prepared.known
    )
    if bool(should_apply):
        apply(change(prepared.grads), variables)
    else:
        replicas.once(note, prepared.grads, prepared.known, of_sum, losses)
    return None


class _Held:
    """Hides variables from tf.distribute, which would hand on one replica's copy.

    Optimizers expect the mirrored variable, in replica context too.
    """

    def __init__(self, variables: Any) -> None:
        self.variables = variables


def _apply_held(
    apply: Callable[..., Any], change: Callable[..., Any], grads: Any, held: _Held
) -> Any:
    return apply(change(grads), held.variables)


def _note(
    place: Optional[Place],
    loss_scale: LossScale,
    faults: Any,
    faults_of_sum: Any,
    losses: Any,
) -> Any:
    """Keeps what was at fault. Called once for all replicas, on a skipped step."""
    if place is None:
        return None
    skipped = replicas.first(loss_scale.skipped_steps)
    return place.write(faults, replicas.first(faults_of_sum), losses, skipped)


def _update(
    optimizer: Any, loss_scale: LossScale, finding: Finding, grads: List[Any]
) -> Tuple[Any, Any]:
    known = (finding.surely_finite, finding.find_out)
    if is_plain(loss_scale):
        return sharing.adjust(loss_scale, optimizer, *known)
    is_finite = exactly(*known)
    # A subclass that overrides update whole sees the gradients, and with them a scalar
    # that is finite only if the step was: the gradients may have been clipped since.
    flag = tf.where(is_finite, 0.0, float("nan"))
    return loss_scale.update([*grads, flag])
