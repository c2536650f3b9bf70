"""A check of gradients: are all finite, which are not, and how large are they?"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

import tensorflow as tf

from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Scalar, Tensor
from lossscale.runtime.control import either


class Check(NamedTuple):
    """A quick check of gradients, and an exact check for when it fails.

    `earlier & later` joins two checks of the same gradients, or of two lists of
    gradients. `CLEAN` checks nothing: joined with another check it changes nothing.

    Attributes:
      quick: The quick check, a `bool` tensor of shape `[]`. If True, all gradients are
        finite; if False, only the exact check can tell. The Python value True if there
        is nothing to check.
      exact_check: A function that returns the exact flag, a `bool` tensor of shape
        `[]`. It must work in a branch, and for either `quick`. None: `quick` is exact.
      worst: A function that returns a `float32` tensor of shape `[gradients]`, the
        worst number of each gradient (see `faults`). Called if a step is skipped,
        perhaps within a branch. None: no gradient can be at fault.
      largest: The greatest magnitude of the gradients, a `float32` tensor of shape
        `[]`. None: not requested.
    """

    quick: Flag
    exact_check: Optional[Callable[[], Flag]] = None
    worst: Optional[Callable[[], Tensor]] = None
    largest: Optional[Scalar] = None

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing to check."""
        return self.quick is True

    def exact(self) -> Flag:
        """Returns the exact flag. Runs the exact check only if the quick one fails."""
        if self.exact_check is None:
            return self.quick
        return either(self.quick, _true, self.exact_check)

    def exact_in_branch(self) -> Flag:
        """Returns the exact flag, always by the exact check. For use in a branch."""
        return self.quick if self.exact_check is None else self.exact_check()

    def worst_of(self, count: int) -> Tensor:
        """Returns the worst numbers of `count` gradients."""
        return tf.zeros([count]) if self.worst is None else self.worst()

    def without_gradients(self, count: int) -> Check:
        """Returns this check in a form that no longer needs the gradients.

        The exact check runs now, in a branch of its own. A check that needs its
        gradients keeps them in memory until the step is decided: then clipping by the
        global norm would need as much memory again as the gradients take.

        Args:
          count: The number of gradients that it checks.
        """
        if self.exact_check is None:
            return self
        if mode.current().knows_values and self.quick:
            return Check(self.quick, largest=self.largest)

        def examine() -> Any:
            return self.exact_in_branch(), self.worst_of(count)

        flag, worst = either(self.quick, lambda: (_true(), tf.zeros([count])), examine)
        return Check(flag, None, lambda: worst, self.largest)

    def __and__(self, later: Check) -> Check:
        largest = greater(self.largest, later.largest)
        if self.is_clean or later.is_clean:
            remaining = later if self.is_clean else self
            return remaining._replace(largest=largest)

        def exact_check() -> Flag:
            return tf.logical_and(self.exact_in_branch(), later.exact_in_branch())

        are_exact = self.exact_check is None and later.exact_check is None
        quick = tf.logical_and(self.quick, later.quick)
        worst = self._first_worst(later.worst)
        return Check(quick, None if are_exact else exact_check, worst, largest)

    def _first_worst(
        self, later: Optional[Callable[[], Tensor]]
    ) -> Optional[Callable[[], Tensor]]:
        """Returns a function for the worst numbers of this check, or of a later one.

        If a gradient was not finite at the first check, it caused what the second check
        finds: clipping by an infinite norm makes every gradient NaN.
        """
        earlier = self.worst
        if earlier is None or later is None:
            return later if earlier is None else earlier
        return lambda: tf.where(self.exact_in_branch(), later(), earlier())


#: A check of nothing.
CLEAN = Check(True)


def greater(one: Optional[Scalar], other: Optional[Scalar]) -> Optional[Scalar]:
    """Returns the greater of two magnitudes. None means: not requested."""
    if one is None or other is None:
        return other if one is None else one
    return tf.maximum(one, other)


def _true() -> Flag:
    return tf.constant(True)
