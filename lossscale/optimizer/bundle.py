"""A bundle: one replica's gradients on their way through a step, and their checks.

The quick check reads the gradients once and sums them. If the sum is finite, so are all
of them. Only if it is not, the exact check looks at each element.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, List, Optional, Tuple

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
from lossscale.gradients.packing import groups_of_one, in_this_graph, pack, unpack
from lossscale.runtime import mode
from lossscale.runtime.aliases import Divisors, Flag, Grads, PerGradient, Scalar, Tensor
from lossscale.runtime.graphs import is_nested
from lossscale.scales.base import LossScale


@dataclass(eq=False)
class Bundle:
    """Gradients, their divisors, and their check.

    A bundle is no tensor and no list, so `tf.distribute` takes it across replicas as a
    whole. No method changes a bundle: each returns a new one, or gradients.

    Attributes:
      loss_scale: The loss scale that multiplied the gradients' loss.
      grads: The gradients; some may be None. Small ones may be packed into one.
      divisors: What each gradient must still be divided by, a `float32` tensor of shape
        `[]`. None: the gradient is unscaled.
      check: What is known of the gradients: first the check of when they were unscaled,
        at the end the check of the whole step.
      is_checked: Whether `check` covers all gradients as they are now.
      losses: The last losses of these gradients, before they were scaled.
      groups: For each of `grads`, the positions of the gradients that are packed in it.
    """

    loss_scale: LossScale
    grads: Grads
    divisors: Divisors
    check: Check = CLEAN
    is_checked: bool = False
    losses: List[Optional[Tensor]] = field(default_factory=list)
    groups: List[List[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = self.groups or groups_of_one(len(self.grads))

    @property
    def count(self) -> int:
        """How many gradients there are, before any were packed."""
        return sum(map(len, self.groups))

    def but(self, **changes: Any) -> Bundle:
        """Returns a copy of the bundle in which these attributes are changed."""
        return replace(self, **changes)

    def distinct_divisors(self) -> Divisors:
        """Returns the different divisors of the gradients that are not None."""
        pairs = zip(self.grads, self.divisors)
        return list({id(by): by for grad, by in pairs if grad is not None}.values())

    def packed(self) -> Bundle:
        """Returns the bundle with small gradients packed, if it has one divisor."""
        if len(self.distinct_divisors()) > 1:
            return self
        grads, groups = pack(self.grads)
        divisors = [self.divisors[group[0]] for group in groups]
        return self.but(grads=grads, groups=groups, divisors=divisors)

    def quotients(self) -> Grads:
        """Returns the gradients divided by their divisors. Packed ones stay packed."""
        distinct = self.distinct_divisors()
        if len(distinct) == 1:
            (divisor,) = distinct
            if divisor is None:
                return self.grads
            return list(self.loss_scale.unscale_by(self.grads, divisor))
        # Keras 3 wants all gradients from one graph, but a division in a branch makes
        # tensors of the branch's graph.
        return [
            in_this_graph(g) if by is None else self.loss_scale.unscale_by(g, by)
            for g, by in zip(self.grads, self.divisors)
        ]

    def divided(self) -> Bundle:
        """Returns the bundle after the division, so that nothing is left to divide."""
        return self.but(grads=self.quotients(), divisors=[None] * len(self.grads))

    def unscaled(self) -> Grads:
        """Returns the gradients divided by their divisors, and unpacked."""
        return unpack(self.quotients(), self.groups)


def unscale_and_check(bundle: Bundle) -> Tuple[Grads, Check]:
    """Returns the unscaled gradients, and their check on this replica."""
    if not bundle.loss_scale.checks_gradients:
        return bundle.unscaled(), CLEAN
    few = bundle.packed()
    quotients = few.divided()
    # Under XLA the check divides a second time, so that no quotient need be stored for
    # it. A graph reuses the memory of what it divides, unless it is read again.
    examined = few if mode.current().by_xla else quotients
    check = check_of_quotients(examined)
    if mode.current().runs_parts and is_nested():
        # A session keeps no state. Gradients tell it of an overflow in a loop or a
        # branch, even if they are clipped by their norm: all of them are made NaN.
        nan_if_bad = tf.where(check.exact(), 1.0, float("nan"))
        quotients = few.but(
            divisors=[None if by is None else by * nan_if_bad for by in few.divisors]
        ).divided()
        check = CLEAN
    if not check.is_clean:
        check = check._replace(
            worst=lambda: worst_of_each(examined.quotients(), few.groups)
        )
    if bundle.loss_scale.last_largest is not None:
        largest = largest_magnitude(few.grads, few.divisors)
        check = check._replace(largest=tf.minimum(largest, tf.float32.max))
    return quotients.unscaled(), check


def check_of_quotients(bundle: Bundle) -> Check:
    """Returns the check of the quotients, without worst numbers."""

    def exact_check() -> Flag:
        return each_is_finite(floating_values(bundle.quotients()))

    if mode.current().looks_at_once:
        return Check(exact_check())
    return Check(quick_check_of_quotients(bundle), exact_check)


def quick_check_of_quotients(bundle: Bundle) -> Flag:
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


def check_as_applied(bundle: Bundle, quick: Optional[Flag] = None) -> Bundle:
    """Returns gradients with both checks: of when they were unscaled, and of now.

    `quick` is the quick check of now, of the quotients and of the sums of duplicate
    rows. None: it is made here, unless the exact check runs anyway.
    """
    if bundle.is_checked:
        return bundle

    def exact_check() -> Flag:
        grads = bundle.quotients()
        return each_is_finite(floating_values([*grads, *rows.added(grads)]))

    def worst() -> PerGradient:
        grads = bundle.quotients()
        numbers = worst_of_each(grads, bundle.groups)
        if rows.any_may_have_duplicates(grads):
            numbers += worst_of_each(rows.added(grads), bundle.groups)
        return numbers

    looks_at_once = mode.current().looks_at_once
    if looks_at_once and not rows.any_may_have_duplicates(bundle.grads):
        now = Check(exact_check(), None, worst)
    else:
        if quick is None:
            quick = and_of_rows(quick_check_of_quotients(bundle), bundle)
        now = Check(quick, exact_check, worst)
    return bundle.but(check=bundle.check.without_gradients(bundle.count) & now)


def and_of_rows(quick: Flag, bundle: Bundle, terms: int = 1) -> Flag:
    """Returns a quick check that covers the sums of duplicate rows, too.

    `terms` is how many replicas' gradients of this size will be added up.
    """
    if not rows.any_may_have_duplicates(bundle.grads):
        return quick
    of_rows = rows.sums_stay_finite(bundle.grads, bundle.divisors, terms)
    return tf.logical_and(quick, of_rows)


def largest_unscaled(bundle: Bundle) -> Scalar:
    """Returns the greatest magnitude before the user clipped. It is always finite."""
    known = bundle.check.largest
    if known is not None and bundle.is_checked:
        return known
    pairs = list(zip(bundle.grads, bundle.divisors))
    if known is not None:
        pairs = [(grad, by) for grad, by in pairs if by is not None]
        if not pairs:
            return known
    largest = largest_magnitude([grad for grad, _ in pairs], [by for _, by in pairs])
    return greater(known, tf.minimum(largest, tf.float32.max))
