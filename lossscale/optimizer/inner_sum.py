"""How Keras 3's optimizers are kept from adding gradients up across replicas."""

from __future__ import annotations

import functools
from typing import Any, Callable, List, Optional

from lossscale.runtime import replicas

#: The method in which an optimizer adds up the gradients of all replicas. Private: no
#: argument and no public method leaves that out (seen on Keras 3.3 to 3.15).
_METHOD = "_all_reduce_sum_gradients"


def own_way_to_sum(optimizer: Any, base: type) -> Optional[str]:
    """Says how an optimizer adds gradients up, if that cannot be done in its place.

    Args:
      optimizer: An optimizer of Keras 3.
      base: The base class of all of them.
    """
    for each in _parts(optimizer):
        steps = getattr(each, "gradient_accumulation_steps", None)
        if steps:
            return (
                f"has gradient_accumulation_steps={steps!r}: Keras adds up what it "
                "accumulated within its own update. Set it to None and accumulate in "
                "the loop, or leave out `communication_dtype`"
            )
        if getattr(type(each), _METHOD, None) is not getattr(base, _METHOD, None):
            return f"has a method {_METHOD} of its own. Leave it out"
    return None


class InnerSum:
    """Keeps an optimizer from adding up gradients that are added up already."""

    def __init__(self, optimizer: Any) -> None:
        """Replaces its method, and that of each optimizer that it consists of."""
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
        """Raises if an optimizer that has applied gradients did not ask for the sum.

        Raises:
          ValueError: It did not, and so may have added them up once more.
        """
        if replicas.count() > 1 and not self._was_left_out:
            raise ValueError(
                "`communication_dtype` must be None if the inner optimizer applies "
                f"gradients in a way of its own, got {optimizer!r}, which does not "
                f"call {_METHOD}. Leave it out."
            )


def _parts(optimizer: Any) -> List[Any]:
    """Returns an optimizer and, of a `MultiOptimizer`, those that it consists of."""
    inside = getattr(optimizer, "optimizers", None) or []
    return [optimizer, *(part for each in inside for part in _parts(each))]
