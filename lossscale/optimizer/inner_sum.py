"""Keeps an inner optimizer from summing gradients that the wrapper has summed."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import Any, Callable, Dict, Hashable, Iterator, List, Optional

import tensorflow as tf

from lossscale.runtime import replicas
from lossscale.runtime.aliases import Grads

#: Where calls are counted that are made once for all replicas.
_OF_ALL = "all replicas"


def own_way_to_sum(optimizer: Any, base: type, method: str) -> Optional[str]:
    """Says how an optimizer sums gradients, if the wrapper cannot do it instead.

    Args:
      optimizer: An inner optimizer.
      base: The base class of all optimizers of its Keras.
      method: The name of the method in which these sum gradients.

    Returns:
      Words that complete an error, with the fix. None: the wrapper can sum them.
    """
    for each in _parts(optimizer):
        steps = getattr(each, "gradient_accumulation_steps", None)  # Keras 3's
        if steps:
            return (
                f"has gradient_accumulation_steps={steps!r}: Keras sums accumulated "
                "gradients within its own update. Set gradient_accumulation_steps to "
                "None and accumulate in your loop, or leave out `communication_dtype`"
            )
        expected = getattr(base, method, None)
        if expected is None:
            return f"has no method {method} to replace. Leave out `communication_dtype`"
        if getattr(type(each), method, None) is not expected:
            return f"has its own method {method}. Leave out `communication_dtype`"
    return None


class InnerSum:
    """The sum over replicas of an inner optimizer, which the wrapper may leave out.

    No argument turns the sum off in every optimizer: Keras 3 has none, and a subclass
    of a Keras 2 optimizer may drop Keras's argument, or clip only if it is True. So the
    method that sums is replaced, on this object alone.
    """

    def __init__(self, optimizer: Any, method: str, is_left_out: bool) -> None:
        """Replaces the method that sums, also in the parts of a `MultiOptimizer`.

        Args:
          optimizer: The inner optimizer.
          method: The name of the method.
          is_left_out: Whether the wrapper sums instead. If not, nothing is replaced.
        """
        self._optimizer, self._method = optimizer, method
        self._is_left_out = is_left_out
        self._depth = 0  # in how many calls of `left_out` we are now
        self._counts: Dict[Hashable, int] = {}
        for each in _parts(optimizer) if is_left_out else []:
            add_up = functools.partial(self._leave_out, getattr(each, method))
            setattr(each, method, add_up)

    @contextmanager
    def left_out(self, grads: Grads) -> Iterator[None]:
        """Leaves out the sum of what the optimizer applies within.

        Args:
          grads: The gradients that it applies; some may be None.

        Raises:
          ValueError: The optimizer did not call the method for each gradient, so it may
            have summed them a second time.
        """
        if not self._is_left_out or replicas.count() == 1:
            yield
            return
        before = self._count()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._count() - before < sum(grad is not None for grad in grads):
            raise ValueError(
                "`communication_dtype` must be None if the inner optimizer applies "
                f"gradients in its own way, got {self._optimizer!r}, which does not "
                f"call {self._method} for each. Leave out `communication_dtype`."
            )

    def _leave_out(self, add_up: Callable[[Any], Any], grads_and_vars: Any) -> Any:
        if not self._depth:  # the inner optimizer is used without its wrapper
            return add_up(grads_and_vars)
        pairs = list(grads_and_vars)
        count = sum(grad is not None for grad, _ in pairs)
        self._counts[_caller()] = self._counts.get(_caller(), 0) + count
        return pairs

    def _count(self) -> int:
        """Returns for how many gradients this replica has left out the sum."""
        return sum(self._counts.get(key, 0) for key in {_caller(), _OF_ALL})


def restore(optimizer: Any, method: str) -> None:
    """Gives an optimizer its own sum back."""
    for each in _parts(optimizer):
        vars(each).pop(method, None)


def _caller() -> Hashable:
    is_one = not tf.distribute.in_cross_replica_context()
    return replicas.this_one() if is_one else _OF_ALL


def _parts(optimizer: Any) -> List[Any]:
    """Returns an optimizer and, if it is a `MultiOptimizer`, the optimizers in it."""
    inside = getattr(optimizer, "optimizers", None) or []
    return [optimizer, *(part for each in inside for part in _parts(each))]
