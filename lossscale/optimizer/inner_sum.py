"""Keeps Keras 3's optimizers from summing gradients that the wrapper has summed."""

from __future__ import annotations

import functools
from typing import Any, Callable, List, Optional

from lossscale.runtime import replicas

#: The method in which an optimizer sums the gradients of all replicas. It is private,
#: but no argument and no public method turns the sum off (seen on Keras 3.3 to 3.15).
_METHOD = "_all_reduce_sum_gradients"


def own_way_to_sum(optimizer: Any, base: type) -> Optional[str]:
    """Says how an optimizer sums gradients, if the wrapper cannot do it instead.

    Args:
      optimizer: An optimizer of Keras 3.
      base: The base class of all optimizers of Keras 3.

    Returns:
      Words that complete an error, with the fix. None: the wrapper can sum them.
    """
    for each in _parts(optimizer):
        steps = getattr(each, "gradient_accumulation_steps", None)
        if steps:
            return (
                f"has gradient_accumulation_steps={steps!r}: Keras sums accumulated "
                "gradients within its own update. Set gradient_accumulation_steps to "
                "None and accumulate in your loop, or leave out `communication_dtype`"
            )
        if getattr(type(each), _METHOD, None) is not getattr(base, _METHOD, None):
            return f"has its own method {_METHOD}. Leave out `communication_dtype`"
    return None


class InnerSum:
    """Keeps an optimizer from summing gradients that the wrapper has summed."""

    def __init__(self, optimizer: Any) -> None:
        """Replaces the method that sums, also in the parts of a `MultiOptimizer`."""
        self._was_left_out = False
        for each in _parts(optimizer):
            add_up = functools.partial(self._leave_out, getattr(each, _METHOD))
            setattr(each, _METHOD, add_up)

    def _leave_out(self, add_up: Callable[[Any], Any], grads_and_vars: Any) -> Any:
        if replicas.count() == 1:
            return add_up(grads_and_vars)
        self._was_left_out = True
        return list(grads_and_vars)

    def check(self, optimizer: Any) -> None:
        """Raises if an optimizer applied gradients and did not call the new method.

        Raises:
          ValueError: The optimizer may have summed the gradients a second time.
        """
        if replicas.count() > 1 and not self._was_left_out:
            raise ValueError(
                "`communication_dtype` must be None if the inner optimizer applies "
                f"gradients in its own way, got {optimizer!r}, which does not call "
                f"{_METHOD}. Leave out `communication_dtype`."
            )


def _parts(optimizer: Any) -> List[Any]:
    """Returns an optimizer and, if it is a `MultiOptimizer`, the optimizers in it."""
    inside = getattr(optimizer, "optimizers", None) or []
    return [optimizer, *(part for each in inside for part in _parts(each))]
