"""New values that float8 layers hand over in the place of gradients.

Keras 3's float8 layers keep scales and histories of magnitudes in variables. For such a
variable a tape returns no gradient but a new value, which the optimizer assigns to it.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

from lossscale.gradients.check import Check, checked, worst_of_each
from lossscale.gradients.packing import groups_of_one
from lossscale.optimizer.pending import before_division
from lossscale.runtime.aliases import Grad, Grads, Variable

#: The names of variables that hold magnitudes of scaled gradients. Keras 3 has no other
#: mark for them.
_OF_GRADIENTS = ("outputs_grad_scale", "outputs_grad_amax_history")


def is_overwritten(variable: Variable) -> bool:
    """Tells whether a variable's "gradient" is its new value (Keras 3.2 and later)."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def holds_scaled(variable: Variable) -> bool:
    """Tells whether a variable holds a magnitude of scaled gradients.

    A float8 layer divides gradients by such a scale, bounds the quotients, and
    multiplies them by the scale again. So the gradients are scaled all the same.
    """
    return is_overwritten(variable) and variable.name in _OF_GRADIENTS


def apart(grads: Grads, variables: List[Variable]) -> Tuple[Grads, Grads]:
    """Separates gradients from new values: each list has None for the other's.

    `get_unscaled_gradients` cannot tell a new value from a gradient, and divides it.
    The new values are returned as the layer handed them over.
    """
    rest: Grads = []
    values: Grads = []
    for grad, variable in zip(grads, variables or [None] * len(grads)):
        is_value = is_overwritten(variable)
        before = before_division(grad) if is_value and grad is not None else None
        value = grad if before is None else before.grad
        rest.append(None if is_value else grad)
        values.append(value if is_value else None)
    return rest, values


def check_of(values: Sequence[Grad], grads: Grads) -> Check:
    """Returns the check of new values, which are applied as they are.

    A float8 layer bounds its gradients, so an infinity is often left in its history of
    magnitudes only. The worst numbers are those of new values and gradients.
    """
    every: Grads = [g if v is None else v for v, g in zip(values, grads)]
    groups = groups_of_one(len(every))
    return checked(values)._replace(worst=lambda: worst_of_each(every, groups))
