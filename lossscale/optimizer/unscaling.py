"""Unscale and check one replica's gradients, in the order that is fastest here."""

from __future__ import annotations

import functools
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.gradients import faults
from lossscale.gradients.faults import Check
from lossscale.gradients.finite import floating_values, sum_is_finite
from lossscale.gradients.packing import is_small, pack, unpack
from lossscale.runtime import replicas
from lossscale.runtime.control import xla_only_if
from lossscale.runtime.mode import in_xla
from lossscale.scales.base import LossScale


class Prepared(NamedTuple):
    """Gradients as the branch of a step takes them.

    Attributes:
      grads: A list of tensors, small gradients packed into one perhaps.
      groups: The positions of the gradients that each of them is made of.
      finish: Called within the branch. Returns the unscaled gradients from `grads`.
      earlier: The check of when they were unscaled. None: there was none.
      is_checked: Whether nobody has changed them since, so that `earlier` says all.
    """

    grads: List[Any]
    groups: List[List[int]]
    finish: Callable[[List[Any]], List[Any]]
    earlier: Optional[Check]
    is_checked: bool


def prepare(
    loss_scale: LossScale,
    grads: List[Any],
    divisor: Any,
    earlier: Optional[Check],
    is_checked: bool,
) -> Prepared:
    """Unscales gradients, or leaves it to the branch where that is faster.

    Args:
      loss_scale: The loss scale.
      grads: This replica's gradients; some may be None.
      divisor: What they are to be divided by. None: they are unscaled.
      earlier: The check of when they were unscaled. None: there was none.
      is_checked: Whether nobody has changed them since, so that `earlier` says all.
    """
    alone = [[position] for position in range(len(grads))]
    if divisor is not None and _unscales_in_branch(loss_scale):
        if not is_checked:
            later = _check_quotients(loss_scale, grads, divisor)
            earlier = faults.combine(earlier, later)
        finish = functools.partial(unscaled, loss_scale, divisor=divisor)
        return Prepared(grads, alone, finish, earlier, True)
    if is_checked or not follows_its_rule(loss_scale):
        grads = unscaled(loss_scale, grads, divisor)
        return Prepared(grads, alone, list, earlier, is_checked)
    packed, groups = pack(grads)
    packed = unscaled(loss_scale, packed, divisor)
    finish = functools.partial(unpack, groups=groups)
    return Prepared(packed, groups, finish, earlier, False)


def unscale_and_check(
    loss_scale: LossScale, grads: List[Any], divisor: Any
) -> Tuple[List[Any], Optional[Check]]:
    """Returns unscaled gradients, and their check on this replica.

    That is None if `loss_scale` does not look at gradients.
    """
    if not loss_scale.checks_gradients:
        return unscaled(loss_scale, grads, divisor), None
    if in_xla():
        check = _check_quotients(loss_scale, grads, divisor)
        return unscaled(loss_scale, grads, divisor), check
    packed, groups = pack(grads)
    packed = unscaled(loss_scale, packed, divisor)
    return unpack(packed, groups), faults.check(packed, groups)


def unscaled(loss_scale: LossScale, grads: List[Any], divisor: Any) -> List[Any]:
    """Returns gradients divided by `divisor`, or as they came if that is None."""
    if divisor is None:
        return grads
    return list(loss_scale.unscale_by(grads, divisor))


def follows_its_rule(loss_scale: LossScale) -> bool:
    """Tells whether the flag is all that moves `loss_scale`.

    A subclass that overrides `update` whole looks at the gradients itself.
    """
    return type(loss_scale).update is LossScale.update


def _unscales_in_branch(loss_scale: LossScale) -> bool:
    """Tells whether to unscale within the branch, where XLA fuses it into the update.

    Elsewhere gradients are divided first: that runs in place, and the sum that checks
    them finds the smaller ones in the processor's cache.
    """
    return in_xla() and replicas.count() == 1 and follows_its_rule(loss_scale)


def _check_quotients(loss_scale: LossScale, grads: List[Any], divisor: Any) -> Check:
    """Returns the check of unscaled gradients, from the scaled ones. For XLA.

    It would otherwise keep the unscaled ones in memory for the exact check. Divided by
    1 or more, what is finite stays so, and what is not does. Below 1 it may overflow,
    and only the exact check of the quotients can tell.

    Small gradients are checked exactly at once: it takes no longer to run, and XLA
    compiles 1,000 of them in a quarter of the time.
    """

    def look(positions: List[int]) -> Check:
        chosen = unscaled(loss_scale, [grads[i] for i in positions], divisor)
        return faults.check_each(chosen, [[i] for i in range(len(chosen))])

    values = [floating_values([grad]) for grad in grads]
    small = [i for i, found in enumerate(values) if all(map(is_small, found))]
    large = [i for i, found in enumerate(values) if not all(map(is_small, found))]
    if not large:
        return look(small)
    large_values = [value for i in large for value in values[i]]
    proof = tf.logical_and(divisor >= 1.0, sum_is_finite(large_values))
    of_large = Check(
        *xla_only_if(
            tf.logical_not(proof),
            lambda: tuple(look(large)),
            tuple(faults.clean(len(large))),
        )
    )
    of_small = look(small)
    is_finite = tf.logical_and(of_small.is_finite, of_large.is_finite)
    codes = tf.concat([of_small.codes, of_large.codes], 0)
    return Check(is_finite, faults.in_order(codes, [small, large]))
