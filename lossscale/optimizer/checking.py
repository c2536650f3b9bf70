"""Checks of one replica's gradients: when they are unscaled, and when they are applied.

The quick check reads the gradients once and sums them. If the sum is finite, so are all
of them. Only if it is not, the exact check looks at each element.
"""

from __future__ import annotations

from typing import Callable, Tuple

import tensorflow as tf

from lossscale.gradients import rows
from lossscale.gradients.arithmetic import largest_magnitude
from lossscale.gradients.check import (
    CLEAN,
    Check,
    each_is_finite,
    floating_values,
    greater,
    sum_is_finite,
    worst_of_each,
)
from lossscale.optimizer.bundle import Bundle
from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Grads, PerGradient, Scalar
from lossscale.runtime.graphs import is_nested
from lossscale.runtime.op_types import as_number


def unscale_and_check(bundle: Bundle) -> Tuple[Grads, Check]:
    """Returns the unscaled gradients, and their check on this replica."""
    if not bundle.loss_scale.checks_gradients:
        return bundle.unscaled(), CLEAN
    few = bundle.packed()
    if is_nested():
        examined, quotients, check = few, *_made_nan_if_bad(few)
    else:
        quotients = few.divided()
        # A check that divides a second time needs no quotients: unused ones are freed.
        examined = few if mode.current().checks_anew else quotients
        check = check_of_quotients(examined)
    check = check._replace(
        worst=lambda: worst_of_each(examined.quotients(), few.groups)
    )
    if mode.current().knows_values:
        check = check.without_gradients(len(bundle.grads))
    if bundle.loss_scale.last_largest is not None:
        check = check._replace(largest=largest_magnitude(few.grads, few.divisors))
    return quotients.unscaled(), check


def _made_nan_if_bad(bundle: Bundle) -> Tuple[Bundle, Check]:
    """Returns gradients that are all NaN if one of them is not finite, and their check.

    A flag that is computed in a loop, a branch or a function cannot be used outside of
    it, but the gradients that it returns can. A NaN in them tells of the overflow, even
    if they are clipped by their norm first. No gradient has to be kept for that.
    """
    check = check_of_quotients(bundle)
    # XLA gets no branch: on TensorFlow 2.4 it compiles none in `tf.vectorized_map`.
    has_no_branch = mode.current().cond_runs_both
    is_finite = check.exact_in_branch() if has_no_branch else check.exact()
    # Our own check must not look like a comparison that the user made. On TensorFlow
    # 2.4 unscaled gradients in a function have no mark: the rules find their units.
    is_finite = as_number(is_finite)
    nan_if_bad = {
        id(divisor): tf.where(is_finite, divisor, float("nan"))
        for divisor in bundle.divisors
        if divisor is not None
    }
    divisors = [nan_if_bad.get(id(each)) for each in bundle.divisors]
    return bundle.but(divisors=divisors).divided(), Check(is_finite)


def check_of_quotients(bundle: Bundle) -> Check:
    """Returns the check of the quotients, without worst numbers."""

    def exact_check() -> Flag:
        return each_is_finite(floating_values(bundle.quotients()))

    if mode.current().looks_at_once:
        return Check(exact_check())
    return Check(_quick_check_of_quotients(bundle), exact_check)


def _quick_check_of_quotients(bundle: Bundle) -> Flag:
    """Returns the quick check of the quotients.

    If the divisor is at least 1, a quotient is finite exactly if the scaled gradient
    is, so the scaled gradients are summed. A divisor below 1 may make a finite gradient
    overflow, so the quick check fails.
    """
    quick = sum_is_finite(floating_values(bundle.grads))
    for divisor in bundle.distinct_divisors():
        if divisor is not None:
            quick = tf.logical_and(divisor >= 1.0, quick)
    return quick


def check_as_applied(bundle: Bundle, quick: Callable[[], Flag]) -> Bundle:
    """Returns gradients with both checks: of when they were unscaled, and of now.

    Args:
      bundle: The gradients.
      quick: Returns the quick check of the gradients as they are applied: of the
        quotients, and of the sums of duplicate rows. Not called where the exact check
        runs anyway.
    """
    if bundle.is_checked:
        return bundle

    def exact_check() -> Flag:
        grads = bundle.quotients()
        return each_is_finite(floating_values([*grads, *rows.added(grads)]))

    def worst() -> PerGradient:
        return _worst_as_applied(bundle)

    looks_at_once = mode.current().looks_at_once
    if looks_at_once and not rows.any_may_have_duplicates(bundle.grads):
        now = Check(exact_check(), None, worst)
    else:
        now = Check(quick(), exact_check, worst)
    return bundle.but(check=bundle.check.without_gradients(bundle.count) & now)


def quick_check_as_applied(bundle: Bundle) -> Flag:
    """Returns the quick check of gradients as they are applied."""
    return and_of_rows(_quick_check_of_quotients(bundle), bundle)


def and_of_rows(quick: Flag, bundle: Bundle, terms: int = 1) -> Flag:
    """Returns a quick check that covers the sums of duplicate rows, too.

    Args:
      quick: The quick check of the gradients themselves.
      bundle: The gradients.
      terms: How many replicas' gradients of this size will be added up.
    """
    if not rows.any_may_have_duplicates(bundle.grads):
        return quick
    of_rows = rows.sums_stay_finite(bundle.grads, bundle.divisors, terms)
    return tf.logical_and(quick, of_rows)


def _worst_as_applied(bundle: Bundle) -> PerGradient:
    grads = bundle.quotients()
    worst = worst_of_each(grads, bundle.groups)
    if rows.any_may_have_duplicates(grads):
        worst += worst_of_each(rows.added(grads), bundle.groups)
    return worst


def largest_unscaled(bundle: Bundle) -> Scalar:
    """Returns the greatest magnitude of the gradients before the user clipped them."""
    when_unscaled = bundle.check.largest
    if when_unscaled is None:
        return largest_magnitude(bundle.grads, bundle.divisors)
    if bundle.is_checked:
        return when_unscaled
    pairs = zip(bundle.grads, bundle.divisors)
    still_scaled = [(grad, divisor) for grad, divisor in pairs if divisor is not None]
    if not still_scaled:
        return when_unscaled
    return greater(when_unscaled, largest_magnitude(*map(list, zip(*still_scaled))))
