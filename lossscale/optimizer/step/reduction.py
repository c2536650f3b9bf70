"""The flag, all-reduced: do all replicas together apply this step?

One replica, several, and several whose gradients are added up already are three classes
of one interface, `FlagReduction`.
"""

from __future__ import annotations

from functools import partial
from typing import Dict, List, Protocol, Tuple

import tensorflow as tf

from lossscale.gradients import rows
from lossscale.gradients.arithmetic import bounded
from lossscale.gradients.check import (
    Check,
    are_clean,
    clean,
    floating_values,
    sum_stays_finite,
    worst_of_each,
)
from lossscale.optimizer.bundle import Bundle
from lossscale.optimizer.checking import (
    and_of_rows,
    check_as_applied,
    quick_check_as_applied,
)
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Flag, Grad, Tensor


class FlagReduction(Protocol):
    """How the replicas that train in step come to one flag."""

    #: Whether one replica decides: gradients are divided in the branch that applies.
    is_of_one: bool

    def check(self, bundle: Bundle) -> Tuple[Bundle, Tensor]:
        """Checks one replica's gradients as they are to be applied.

        Returns:
          The bundle with its check, and what the replica contributes to `reduce`.
        """

    def reduce(self, contributions: Tensor, bundle: Bundle) -> Check:
        """Returns the check of the whole step, equal on all replicas.

        Args:
          contributions: Of all replicas, as `replicas.merge_call` merges them.
          bundle: The bundles of all replicas, as it merges them.
        """


class OneReplica:
    """One replica: its quick check decides, and the exact one can wait for a branch.

    Gradients are divided in the branch that applies them. There the quotients are used
    as soon as they are there, which needs less memory; a skipped step has none.
    """

    is_of_one = True

    def check(self, bundle: Bundle) -> Tuple[Bundle, Flag]:
        checked = check_as_applied(bundle, partial(quick_check_as_applied, bundle))
        return checked, checked.check.quick

    def reduce(self, contributions: Flag, bundle: Bundle) -> Check:
        check = replicas.local_result(bundle).check

        def exact_check() -> Flag:
            exact = lambda local: local.check.exact_in_branch()  # noqa: E731
            return replicas.local_result(replicas.call_for_each_replica(exact, bundle))

        is_exact = check.exact_check is None
        quick, largest = map(replicas.local_result, (contributions, check.largest))
        return Check(quick, None if is_exact else exact_check, largest=largest)


class SummedReplicas(OneReplica):
    """Several replicas that have the same gradients, the sum of all of them.

    They find the same flag, and none has to cross. Gradients are divided before the
    branch, as with `SeveralReplicas`.
    """

    is_of_one = False


class SeveralReplicas:
    """Several replicas: one scalar of each is all-reduced.

    ```
    a replica contributes   0             its gradients are finite, and small enough
                            1             finite, but the sum over replicas may overflow
                            replicas + 1  not finite
    the sum of these says   0             apply
                            1 to replicas add the gradients up, and look at the sum
                            more          skip
    ```

    The second row almost never happens. If the loss scale requests it, the greatest
    magnitude of each replica crosses in the same message.

    Gradients are divided before the branch, since the quotients are what is looked at:
    two replicas that left it to the branch took 4.3 ms for 3.7, 12 M with Adam.
    """

    is_of_one = False

    def __init__(self, are_added: bool) -> None:
        """Several replicas.

        Args:
          are_added: Whether the optimizer adds their gradients up.
        """
        self._are_added = are_added
        self._count = replicas.count()

    def check(self, bundle: Bundle) -> Tuple[Bundle, Tensor]:
        if self._are_added:
            is_small = self._sum_stays_finite(bundle)
            # What is small is finite: no other quick check is needed.
            checked = check_as_applied(bundle, lambda: is_small)
        else:
            is_small = True
            checked, _ = OneReplica().check(bundle)
        is_finite, largest = checked.check.exact(), checked.check.largest
        contribution = tf.where(
            is_finite, tf.where(is_small, 0.0, 1.0), self._count + 1.0
        )
        if largest is None:
            return checked, contribution
        slots = replicas.in_own_slot(bounded(is_finite, largest))
        return checked, tf.concat([[contribution], slots], 0)

    def _sum_stays_finite(self, bundle: Bundle) -> Flag:
        """Tells whether the sum over the replicas surely is finite."""
        is_small = sum_stays_finite(bundle.grads, self._count)
        return and_of_rows(is_small, bundle, terms=self._count)

    def reduce(self, contributions: Tensor, bundle: Bundle) -> Check:
        total, largest = replicas.all_reduce_sum(contributions), None
        local = replicas.local_result(bundle)
        if local.check.largest is not None:
            total, largest = total[0], tf.reduce_max(total[1:])
        is_clear = tf.equal(total, 0.0)
        if not self._are_added:
            return Check(is_clear, largest=largest)
        is_in_doubt = tf.logical_and(total > 0.0, total < self._count + 1.0)
        nothing = clean(local.count)
        is_finite, worst = tf.cond(
            is_in_doubt, lambda: self._check_sum(bundle), lambda: (is_clear, nothing)
        )
        return Check(is_finite, None, lambda: worst, largest)

    def _check_sum(self, bundle: Bundle) -> Tuple[Flag, Tensor]:
        """Returns the flag of the sum over the replicas, and its worst numbers."""
        groups = replicas.local_result(bundle).groups
        sums = [None] * len(groups)
        terms = replicas.call_for_each_replica(self._terms, bundle)
        for position, term in terms.items():
            sums[position] = replicas.all_reduce_sum(term)
        worst = worst_of_each(sums, groups)
        return are_clean(worst), worst

    def _terms(self, bundle: Bundle) -> Dict[int, Tensor]:
        """Returns what one replica adds to the sum that is looked at, by position.

        The strategy chooses the order of the sum, and of three or more terms that
        decides whether it overflows. If the sum of the magnitudes is finite, every
        order is. Sparse gradients are concatenated, and their duplicate rows summed
        when they are applied.
        """
        as_added = tf.identity if self._count == 2 else tf.abs
        terms: Dict[int, Tensor] = {}
        for position, grad in enumerate(bundle.grads):
            if _is_added(grad):
                terms[position] = as_added(_real(grad))
            elif rows.may_have_duplicates(grad) and grad.dense_shape is not None:
                terms[position] = rows.magnitudes(grad)
        return terms


def reduction_for(are_added: bool, are_summed: bool = False) -> FlagReduction:
    """Returns how the replicas that train in step come to one flag.

    Args:
      are_added: Whether the optimizer adds their gradients up.
      are_summed: Whether that is done already: `communication.summed`.
    """
    if replicas.count() == 1:
        return OneReplica()
    return SummedReplicas() if are_summed else SeveralReplicas(are_added)


def _is_added(grad: Grad) -> bool:
    return not isinstance(grad, tf.IndexedSlices) and bool(floating_values([grad]))


def _real(grad: Grad) -> Tensor:
    """Returns a gradient as one tensor of real numbers."""
    values: List[Tensor] = floating_values([grad])
    return values[0] if len(values) == 1 else tf.stack(values)
