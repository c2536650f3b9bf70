"""One replica's gradients divided by loss scales, and checked from the scaled ones."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.gradients import faults, rows
from lossscale.gradients.faults import Check
from lossscale.gradients.finite import (
    Finiteness,
    each_is_finite,
    finiteness,
    floating_values,
    sum_is_finite,
)
from lossscale.gradients.largest import greater, largest_magnitude
from lossscale.gradients.packing import in_this_graph, pack, unpack
from lossscale.runtime import mode
from lossscale.runtime.graphs import is_nested
from lossscale.scales.base import LossScale


class Packed(NamedTuple):
    """Gradients of which small ones may have become one.

    Attributes:
      grads: The gradients.
      groups: The positions of the gradients that each is made of.
      divisors: What each is to be divided by. None: it is unscaled.
    """

    grads: List[Any]
    groups: List[List[int]]
    divisors: List[Any]


def packed(grads: List[Any], divisors: List[Any]) -> Packed:
    """Packs small gradients, if all are to be divided by the same."""
    if len(_distinct(grads, divisors)) > 1:
        return Packed(grads, alone(grads), divisors)
    found, groups = pack(grads)
    return Packed(found, groups, [divisors[group[0]] for group in groups])


def alone(grads: List[Any]) -> List[List[int]]:
    """Returns the groups of gradients of which none are packed."""
    return [[position] for position in range(len(grads))]


def divided(
    loss_scale: LossScale, grads: List[Any], divisors: Optional[List[Any]]
) -> List[Any]:
    """Returns gradients divided, each by its divisor; as it came if that is None."""
    if divisors is None:
        return grads
    distinct = _distinct(grads, divisors)
    if len(distinct) == 1:
        (divisor,) = distinct.values()
        return grads if divisor is None else list(loss_scale.unscale_by(grads, divisor))
    # Keras 3 wants all from one graph: those that are divided in a branch, and others.
    return [
        in_this_graph(grad) if divisor is None else loss_scale.unscale_by(grad, divisor)
        for grad, divisor in zip(grads, divisors)
    ]


def unscale_and_check(
    loss_scale: LossScale, grads: List[Any], divisors: List[Any]
) -> Tuple[List[Any], Optional[Check]]:
    """Returns unscaled gradients, and their check on this replica.

    That is None if `loss_scale` does not look at gradients.
    """
    if not loss_scale.checks_gradients:
        return divided(loss_scale, grads, divisors), None
    few, groups, by = packed(grads, divisors)
    seen: Tuple[List[Any], Optional[List[Any]]] = few, by
    if is_nested():
        quotients, finiteness = _shown(loss_scale, few, by)
    else:
        quotients = divided(loss_scale, few, by)
        # If that looks at them anew, what is returned is kept only if it is used.
        if not mode.current().checks_anew:
            seen = quotients, None
        finiteness = finiteness_once_divided(loss_scale, *seen)
    check = faults.check(
        finiteness,
        lambda: faults.codes_of_each(divided(loss_scale, *seen), groups),
        len(grads),
    )
    if loss_scale.last_largest is not None:
        check = check._replace(largest=largest_magnitude(few, by))
    return unpack(quotients, groups), check


def _shown(
    loss_scale: LossScale, grads: List[Any], divisors: List[Any]
) -> Tuple[List[Any], Finiteness]:
    """Returns quotients that show it if one was not finite, and whether they are.

    All are NaN then. For a loop, a branch, or a function within another: no flag leaves
    them, and what clips an infinity leaves a NaN alone.
    """
    known = finiteness_once_divided(loss_scale, grads, divisors)
    # No branch under XLA: on TensorFlow 2.4 it compiles none in `tf.vectorized_map`.
    is_finite = known.looked() if mode.current().cond_runs_both else known.exact()
    shown = {
        id(divisor): tf.where(is_finite, divisor, float("nan"))
        for divisor in divisors
        if divisor is not None
    }
    by = [shown.get(id(each)) for each in divisors]
    return divided(loss_scale, grads, by), Finiteness(is_finite)


def largest_unscaled(
    grads: List[Any], divisors: List[Any], earlier: Optional[Check], is_checked: bool
) -> Any:
    """Returns the greatest magnitude of gradients, before anybody clipped them.

    Args:
      grads: The gradients.
      divisors: What each is still to be divided by. None: it is unscaled.
      earlier: The check of those that the user had unscaled. None: there was none, and
        what is unscaled is looked at as it came.
      is_checked: Whether that is a check of them all.
    """
    if earlier is None or earlier.largest is None:
        return largest_magnitude(grads, divisors)
    if is_checked:
        return earlier.largest
    rest = [(g, by) for g, by in zip(grads, divisors) if by is not None]
    if not rest:
        return earlier.largest
    return greater(earlier.largest, largest_magnitude(*map(list, zip(*rest))))


def proof_as_applied(
    loss_scale: LossScale, grads: List[Any], divisors: Optional[List[Any]]
) -> Any:
    """Returns a cheap proof that gradients are finite, and equal rows added up are.

    Args:
      loss_scale: What divides them.
      grads: A list of gradients.
      divisors: What each is still to be divided by. None: all are unscaled.
    """
    proof = finiteness_once_divided(loss_scale, grads, divisors).proof
    if not rows.any_may_repeat(grads):
        return proof
    return tf.logical_and(proof, rows.sums_stay_finite(grads, divisors))


def finiteness_once_divided(
    loss_scale: LossScale, grads: List[Any], divisors: Optional[List[Any]]
) -> Finiteness:
    """Returns whether gradients are finite once they are divided."""
    if divisors is None or mode.current().looks_at_once:
        return finiteness(divided(loss_scale, grads, divisors))

    def look() -> Any:
        return each_is_finite(floating_values(divided(loss_scale, grads, divisors)))

    return Finiteness(_proof_of_quotients(grads, divisors), look)


def _proof_of_quotients(grads: List[Any], divisors: List[Any]) -> Any:
    """Returns a cheap proof that gradients are finite once they are divided.

    Divided by 1 or more, what is finite stays so, and what is not does: the scaled ones
    prove it. Below 1 they may overflow, and only the quotients can tell.
    """
    proof = sum_is_finite(floating_values(grads))
    for divisor in _distinct(grads, divisors).values():
        if divisor is not None:
            proof = tf.logical_and(divisor >= 1.0, proof)
    return proof


def _distinct(grads: List[Any], divisors: List[Any]) -> Dict[int, Any]:
    """Returns the different divisors of gradients that are there."""
    pairs = zip(grads, divisors)
    return {id(divisor): divisor for grad, divisor in pairs if grad is not None}
