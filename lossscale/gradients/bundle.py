"""A bundle: one replica's gradients on their way through a step, and their checks.

Gradients are checked when they are unscaled (`unscale_and_check`) and before they are
applied (`check_as_applied`), since a program may change them in between.

An optimizer sums the duplicate rows of a sparse gradient only when it applies them. In
float16 each value may be finite, but not their sum: the second check covers the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Iterable, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients import check as checks
from lossscale.gradients.arithmetic import largest_magnitude
from lossscale.gradients.check import NO_CHECK, Check, floating_values
from lossscale.runtime import mode
from lossscale.runtime.aliases import Divisors, Flag, Grad, Grads, Scalar, Tensor
from lossscale.runtime.graphs import is_nested


@dataclass(eq=False)
class Bundle:
    """Gradients, their divisors, and their check.

    A bundle is no tensor and no list, so `tf.distribute` takes it across replicas as a
    whole. No method changes a bundle: each returns a new one, or gradients.

    Attributes:
      loss_scale: The `LossScale` that multiplied the gradients' loss.
      grads: The gradients; some may be None. Small ones may be packed into one.
      divisors: What each gradient must still be divided by. None: it is unscaled.
      losses: The unscaled losses that these gradients are known to come from.
      of_unknown: The divisor of gradients of which only the state of the step knows
        whether they are scaled: 1 if not. None: there are none, or they are unscaled.
      check: First the check of when the gradients were unscaled, then also that of when
        they are applied, on this replica.
      is_checked: Whether `check` covers all gradients as they are now.
      is_measured: Of each gradient, whether `check.largest` covers it, as it was before
        it was clipped. Empty: of none.
      groups: For each of `grads`, the positions of the gradients that are packed in it.
    """

    loss_scale: Any
    grads: Grads
    divisors: Divisors
    losses: List[Tensor] = field(default_factory=list)
    of_unknown: Optional[Scalar] = None
    check: Check = NO_CHECK
    is_checked: bool = False
    is_measured: List[bool] = field(default_factory=list)
    groups: List[List[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = self.groups or [[i] for i in range(len(self.grads))]

    @property
    def count(self) -> int:
        """How many gradients there are, before any were packed."""
        return sum(map(len, self.groups))

    @property
    def has_duplicates(self) -> bool:
        """Whether a gradient may have duplicate rows with a sum that overflows."""
        return any(map(may_have_duplicates, self.grads))

    def but(self, **changes: Any) -> Bundle:
        """Returns a copy of the bundle in which these attributes are changed."""
        return replace(self, **changes)

    def distinct_divisors(self) -> Divisors:
        """Returns the different divisors. Gradients that are None do not count."""
        pairs = zip(self.grads, self.divisors)
        return list({id(by): by for grad, by in pairs if grad is not None}.values())

    def packed(self) -> Bundle:
        """Packs small gradients, if all are divided and measured alike."""
        distinct = self.distinct_divisors()
        if len(distinct) > 1 or len({*self.is_measured}) > 1:
            return self
        grads, groups = checks.pack(self.grads)
        divisors = (distinct or [None]) * len(grads)
        return self.but(grads=grads, groups=groups, divisors=divisors)

    def divided(self) -> Bundle:
        """Returns the bundle after the division: nothing is left to divide."""
        distinct, unscale_by = self.distinct_divisors(), self.loss_scale.unscale_by
        if len(distinct) == 1:
            if distinct[0] is None:
                return self
            grads = list(unscale_by(self.grads, distinct[0]))
        else:
            # A division in a branch makes tensors of the branch's graph.
            grads = [
                checks.in_this_graph(grad) if by is None else unscale_by(grad, by)
                for grad, by in zip(self.grads, self.divisors)
            ]
        return self.but(grads=grads, divisors=[None] * len(grads))

    def unscaled_gradients(self) -> Grads:
        """Returns the true gradients: divided, and unpacked."""
        return checks.unpack(self.divided().grads, self.groups)

    def largest(self) -> Scalar:
        """Returns the quotients' greatest magnitude, at most float32's maximum."""
        return tf.minimum(largest_magnitude(self.grads, self.divisors), tf.float32.max)

    def has_bad_loss(self) -> Flag:
        """Tells whether a loss was not finite before it was scaled."""
        return tf.logical_not(checks.each_is_finite(floating_values(self.losses)))


def unscale_and_check(bundle: Bundle) -> Tuple[Grads, Check]:
    """Returns the unscaled gradients, and their check on this replica."""
    if not bundle.loss_scale.checks_gradients:
        return bundle.unscaled_gradients(), NO_CHECK
    packed = bundle.packed()
    quotients = packed.divided()
    # Under XLA the check divides a second time, so that no quotient need be stored for
    # it. Elsewhere it reads the quotients. Then nothing reads the scaled gradients
    # again, and a graph can store the quotients in their memory.
    check = check_of_quotients(packed if mode.current().by_xla else quotients)
    if bundle.loss_scale.last_largest is not None:
        check = check._replace(largest=packed.largest())
    if mode.current().runs_parts and is_nested():
        # A session keeps no state, and no tensor of a loop or a branch is visible after
        # it. So an overflow makes all gradients NaN, which clipping does not hide.
        # A constant NaN would stop a run that looks for NaNs.
        nan_if_bad = tf.sqrt(tf.where(check.exact(), 1.0, -1.0))
        quotients = packed.but(
            divisors=[None if by is None else by * nan_if_bad for by in packed.divisors]
        ).divided()
        check = NO_CHECK
    return quotients.unscaled_gradients(), check


def check_of_quotients(
    bundle: Bundle, quick: Optional[Flag] = None, with_sums: bool = False
) -> Check:
    """Returns the check of the quotients, and of sums of duplicate rows if asked.

    `quick` is the quick check of both. None: it is made here, before any division that
    is still to be done. It is False if a divisor is below 1: then a finite sum proves
    nothing about the quotients.
    """

    def exact_check() -> Flag:
        grads = bundle.divided().grads
        added = sums_of_rows(grads) if with_sums else []
        return checks.each_is_finite(floating_values([*grads, *added]))

    def worst() -> Tensor:
        grads = bundle.divided().grads
        numbers = checks.worst_of_each(grads, bundle.groups)
        if with_sums:
            numbers += checks.worst_of_each(sums_of_rows(grads), bundle.groups)
        return numbers

    if mode.current().looks_at_once and not with_sums:
        return Check(exact_check(), None, worst)
    if quick is None:
        quick = checks.sum_is_finite(floating_values(bundle.grads))
        for divisor in bundle.distinct_divisors():
            if divisor is not None:
                quick = tf.logical_and(divisor >= 1.0, quick)
        if with_sums:
            quick = tf.logical_and(quick, row_sums_stay_finite(bundle))
    return Check(quick, exact_check, worst)


def check_as_applied(bundle: Bundle, quick: Optional[Flag] = None) -> Bundle:
    """Returns gradients with both checks: of when they were unscaled, and of now.

    In the result `quick` is exact. The argument is that of `check_of_quotients`.
    """
    check = bundle.check
    if not bundle.is_checked:
        now = check_of_quotients(bundle, quick, bundle.has_duplicates)
        if check.checks_nothing:
            check = now._replace(largest=check.largest)
        else:
            check = check.without_gradients(bundle.count) & now
    return bundle.but(check=check._replace(quick=check.exact(), exact_check=None))


def largest_before_clipping(bundle: Bundle) -> Scalar:
    """Returns the greatest magnitude, before the user clipped what was unscaled."""
    largest = bundle.check.largest
    if largest is None:
        return bundle.largest()
    measured = [all(bundle.is_measured[i] for i in group) for group in bundle.groups]
    others = [None if is_m else g for is_m, g in zip(measured, bundle.grads)]
    if all(grad is None for grad in others):
        return largest
    return checks.greater(largest, bundle.but(grads=others).largest())


def as_they_are(grads: Grads) -> List[Any]:
    """Returns gradients as they are now. Reads variables, which may change later."""
    unchanging = (tf.Tensor, tf.IndexedSlices, type(None))
    return [g if isinstance(g, unchanging) else tf.convert_to_tensor(g) for g in grads]


def may_have_duplicates(grad: Grad) -> bool:
    """Tells whether a gradient may have duplicate rows with a sum that overflows."""
    if not isinstance(grad, tf.IndexedSlices):
        return False
    dtype = grad.values.dtype
    return bool(dtype.is_floating) and dtype.size == 2


def row_sums_stay_finite(bundle: Bundle, terms: int = 1) -> Flag:
    """Tells whether the sums of duplicate rows are surely finite. Reads the rows once.

    They are if the magnitudes of all rows, duplicate or not, have a finite sum. False
    proves nothing. `terms` is how many gradients of this size will be added.
    """
    proofs = []
    for grad, divisor in zip(bundle.grads, bundle.divisors):
        if may_have_duplicates(grad):
            wide = tf.abs(tf.cast(grad.values, tf.float32))
            # Half of the range is left for rounding. `inf < limit` is False, as needed.
            limit = tf.constant(float(grad.values.dtype.max) / (2 * terms))
            limit = limit if divisor is None else limit * divisor
            proofs.append(tf.reduce_all(tf.reduce_sum(wide, axis=0) < limit))
    return tf.reduce_all(tf.stack(proofs))


def sums_of_rows(grads: Iterable[Grad]) -> List[Any]:
    """Returns the sums of each gradient's duplicate rows, None if it has none.

    Of three or more rows the magnitudes are summed: if that is finite, so is the sum in
    every order, and the optimizer chooses the order.
    """
    return [_sums(grad) if may_have_duplicates(grad) else None for grad in grads]


def _sums(grad: Grad) -> Tensor:
    # XLA has no tf.unique, and knows only inputs' shapes in a branch of TensorFlow 2.4,
    # where it sorts no int64. No variable has 2**31 rows.
    order = tf.argsort(tf.cast(grad.indices, tf.int32))
    ordered = tf.gather(grad.indices, order)
    is_new = tf.cast(tf.not_equal(ordered[1:], ordered[:-1]), tf.int32)
    positions = tf.concat([tf.zeros_like(order[:1]), tf.cumsum(is_new)], 0)
    wide = tf.cast(tf.gather(grad.values, order), tf.float32)
    signed, magnitudes, counts = (
        tf.math.unsorted_segment_sum(terms, positions, tf.shape(order)[0])
        for terms in (wide, tf.abs(wide), tf.ones_like(wide))
    )
    sums = tf.where(counts > 2.0, magnitudes, signed)
    return tf.cast(sums, grad.values.dtype)


def magnitudes_of_rows(grad: Grad) -> Tensor:
    """Returns the sums of duplicate rows' magnitudes, dense, in the same dtype."""
    wide = tf.abs(tf.cast(grad.values, tf.float32))
    total = tf.math.unsorted_segment_sum(wide, grad.indices, grad.dense_shape[0])
    return tf.cast(total, grad.values.dtype)
