"""What the replicas know together of a step: of one replica, or of several."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.gradients import faults, rows
from lossscale.gradients.finite import (
    Finiteness,
    floating_values,
    sum_stays_finite,
)
from lossscale.gradients.largest import bounded
from lossscale.runtime import replicas


class Agreed(NamedTuple):
    """What the replicas know together of a step.

    Attributes:
      finiteness: Whether the step may be applied, equal on all replicas.
      codes_of_sum: The fault codes that only the sum of all replicas' gradients has.
        None: it cannot have any.
      largest: The greatest magnitude of the unscaled gradients, equal on all replicas.
        None: nobody asks.
    """

    finiteness: Finiteness
    codes_of_sum: Any
    largest: Any


class Own(NamedTuple):
    """What one replica knows by itself.

    Attributes:
      grads: Its gradients.
      earlier: A proof that they were when the user had them unscaled. None: there is
        none.
      prove: Returns a cheap proof that they are finite now. None: `earlier` is enough.
      look: Returns the exact flag, of then and now. None: `earlier` is that.
      largest: The greatest magnitude of the unscaled gradients. None: nobody asks.
    """

    grads: List[Any]
    earlier: Any
    prove: Optional[Callable[[], Any]]
    look: Optional[Callable[[], Any]]
    largest: Any


class Alone:
    """One replica, which has nobody to tell.

    Its vote is the cheap proof. To look can wait for the branch that needs it.
    """

    def vote(self, own: Own) -> Any:
        """Returns this replica's vote, a `bool` tensor of shape `[]`."""
        if own.prove is None:
            return own.earlier
        return both(own.earlier, own.prove())

    def agree(
        self, vote: Any, look: Any, *, grads: Any, groups: Any, largest: Any
    ) -> Agreed:
        """Returns what is known of the step.

        Args:
          vote: The vote, as it came through `replicas.merge_call`.
          look: Returns the exact flag. None: the vote is exact.
          grads: The gradients, as they came through it.
          groups: The positions of the gradients that each of them is made of.
          largest: The greatest magnitude of the unscaled ones. None: nobody asks.
        """
        del grads, groups
        flag, largest = map(replicas.local_result, (vote, largest))
        return Agreed(Finiteness(flag, look), None, largest)


class Among:
    """Several replicas: one scalar crosses them.

    A replica whose gradients are not finite votes `replicas + 1`. One whose gradients
    are so large that their sum with the others' might not be finite votes 1. If the
    votes add up to 0, the step may be applied, and to `replicas + 1` or more, it may
    not. Only between them, which almost never happens, must the gradients be added up
    to see. Where the loss scale asks for it, the greatest magnitude of each replica
    crosses with its vote.
    """

    def __init__(self, are_added: bool) -> None:
        """Several replicas.

        Args:
          are_added: Whether the optimizer adds their gradients up.
        """
        self._are_added = are_added
        self._replicas = replicas.count()

    def vote(self, own: Own) -> Any:
        """Returns this replica's vote, a `float32` tensor of shape `[]`.

        With the greatest magnitudes it has shape `[1 + replicas]`.
        """
        is_small: Any = True
        if self._are_added:
            is_small = sum_stays_finite(own.grads, self._replicas)
            if rows.any_may_repeat(own.grads):
                of_rows = rows.sums_stay_finite(own.grads, terms=self._replicas)
                is_small = tf.logical_and(is_small, of_rows)
        if own.prove is None:
            proof = own.earlier
        else:  # being small proves that they are finite, too
            proof = both(own.earlier, is_small if self._are_added else own.prove())
        doubt = tf.where(is_small, 0.0, 1.0)
        is_finite = Finiteness(proof, own.look).exact()
        vote = tf.where(is_finite, doubt, self._replicas + 1.0)
        if own.largest is None:
            return vote
        slots = replicas.in_own_slot(bounded(is_finite, own.largest))
        return tf.concat([[vote], slots], 0)

    def agree(
        self, vote: Any, look: Any, *, grads: Any, groups: Any, largest: Any
    ) -> Agreed:
        """Like `Alone.agree`. All have looked when they voted."""
        del look
        votes = replicas.all_reduce_sum(vote)
        if largest is not None:
            votes, largest = votes[0], tf.reduce_max(votes[1:])
        is_clear = tf.equal(votes, 0.0)
        if not self._are_added:
            return Agreed(Finiteness(is_clear), None, largest)
        in_doubt = tf.logical_and(votes > 0.0, votes < self._replicas + 1.0)
        clean = faults.clean(sum(map(len, groups)))
        is_finite, codes_of_sum = tf.cond(
            in_doubt,
            lambda: self._check_sum(grads, groups),
            lambda: (is_clear, clean),
        )
        return Agreed(Finiteness(is_finite), codes_of_sum, largest)

    def _check_sum(self, grads: Any, groups: List[List[int]]) -> Tuple[Any, Any]:
        sums = [None] * len(groups)
        terms = replicas.call_for_each_replica(self._terms, grads)
        for position, term in terms.items():
            sums[position] = replicas.all_reduce_sum(term)
        codes = faults.codes_of_each(sums, groups)
        return faults.are_clean(codes), codes

    def _terms(self, grads: List[Any]) -> Any:
        # Of three or more terms the order decides whether they overflow, and it is the
        # strategy's: if the sum of their magnitudes is finite, every order is. Sparse
        # gradients are concatenated: their equal rows are added up later.
        as_added = tf.identity if self._replicas == 2 else tf.abs
        terms = {i: as_added(_real(g)) for i, g in enumerate(grads) if _is_added(g)}
        sparse = {i: g for i, g in enumerate(grads) if rows.may_repeat(g)}
        of_rows = {i: rows.magnitudes(g) for i, g in sparse.items()}
        return {**terms, **{i: m for i, m in of_rows.items() if m is not None}}


def _is_added(grad: Any) -> bool:
    return not isinstance(grad, tf.IndexedSlices) and bool(floating_values([grad]))


def _real(grad: Any) -> Any:
    """Returns a gradient as one tensor of real numbers."""
    values = floating_values([grad])
    return values[0] if len(values) == 1 else tf.stack(values)


def both(earlier: Any, now: Any) -> Any:
    """Tells whether a flag of earlier, unless it is None, and one of now hold."""
    return now if earlier is None else tf.logical_and(earlier, now)
