"""A bundle: one replica's gradients on their way through a step, and their checks."""

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
      divisors: What each gradient must still be divided by. None: it is unscaled.
      of_unknown: The divisor of gradients of which only the state of the step knows
        whether they are scaled: 1 if not. None: there are none, or they are unscaled.
      check: First the check of when the gradients were unscaled, then also that of when
        they are applied, on this replica.
      is_checked: Whether `check` covers all gradients as they are now.
      losses: The losses, before they were scaled, of which it is known that these
        gradients were made of them.
      groups: For each of `grads`, the positions of the gradients that are packed in it.
    """

    loss_scale: LossScale
    grads: Grads
    divisors: Divisors
    check: Check = CLEAN
    is_checked: bool = False
    of_unknown: Optional[Scalar] = None
    losses: List[Tensor] = field(default_factory=list)
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
        # A division in a branch makes tensors of the branch's graph.
        return [
            in_this_graph(g) if by is None else self.loss_scale.unscale_by(g, by)
            for g, by in zip(self.grads, self.divisors)
        ]

    def divided(self) -> Bundle:
        """Returns the bundle after the division, so that nothing is left to divide."""
        return self.but(grads=self.quotients(), divisors=[None] * len(self.grads))

    def has_bad_loss(self) -> Flag:
        """Tells whether a loss was not finite before it was scaled. For a branch."""
        return tf.logical_not(each_is_finite(floating_values(self.losses)))

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
    check = check_of_quotients(few if mode.current().by_xla else quotients)
    if mode.current().runs_parts and is_nested():
        # A session keeps no state. Gradients tell it of an overflow in a loop or a
        # branch, even if they are clipped by their norm: all of them are made NaN.
        # A constant NaN would stop a run that looks for NaNs.
        nan_if_bad = tf.sqrt(tf.where(check.exact(), 1.0, -1.0))
        quotients = few.but(
            divisors=[None if by is None else by * nan_if_bad for by in few.divisors]
        ).divided()
        check = CLEAN
    if bundle.loss_scale.last_largest is not None:
        largest = largest_magnitude(few.grads, few.divisors)
        check = check._replace(largest=tf.minimum(largest, tf.float32.max))
    return quotients.unscaled(), check


def check_of_quotients(
    bundle: Bundle, quick: Optional[Flag] = None, with_rows: bool = False
) -> Check:
    """Returns the check of the quotients, and of the sums of duplicate rows if asked.

    `quick` is the quick check of both, None if the caller has not made it: the scaled
    gradients are summed, and a divisor below 1, which may make a finite gradient
    overflow, fails.
    """

    def exact_check() -> Flag:
        grads = bundle.quotients()
        added = rows.added(grads) if with_rows else []
        return each_is_finite(floating_values([*grads, *added]))

    def worst() -> PerGradient:
        grads = bundle.quotients()
        numbers = worst_of_each(grads, bundle.groups)
        if with_rows:
            numbers += worst_of_each(rows.added(grads), bundle.groups)
        return numbers

    if mode.current().looks_at_once and not with_rows:
        return Check(exact_check(), None, worst)
    if quick is None:
        quick = sum_is_finite(floating_values(bundle.grads))
        for divisor in bundle.distinct_divisors():
            if divisor is not None:
                quick = tf.logical_and(divisor >= 1.0, quick)
        if with_rows:
            quick = and_of_rows(quick, bundle)
    return Check(quick, exact_check, worst)


def check_as_applied(bundle: Bundle, quick: Optional[Flag] = None) -> Bundle:
    """Returns gradients with both checks: of when they were unscaled, and of now.

    `quick` is as in `check_of_quotients`.
    """
    if bundle.is_checked:
        return bundle
    has_duplicates = rows.any_may_have_duplicates(bundle.grads)
    now = check_of_quotients(bundle, quick, has_duplicates)
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
    known, grads = bundle.check.largest, bundle.grads
    if known is not None:
        if bundle.is_checked or all(by is None for by in bundle.divisors):
            return known
        # It covers the gradients that were unscaled.
        grads = [None if by is None else g for g, by in zip(grads, bundle.divisors)]
    largest = largest_magnitude(grads, bundle.divisors)
    return greater(known, tf.minimum(largest, tf.float32.max))
