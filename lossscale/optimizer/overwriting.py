"""New values that float8 layers hand over in the place of gradients.

Keras 3's float8 layers keep scales and histories of magnitudes in variables. For such a
variable a tape returns no gradient but a new value, which the optimizer assigns to it.
"""

from __future__ import annotations

from typing import Iterable, Sequence

from lossscale.gradients.check import Check, checked, worst_of_each
from lossscale.gradients.packing import groups_of_one
from lossscale.optimizer.provenance.history import History
from lossscale.runtime import kerases
from lossscale.runtime.aliases import Grad, Grads, Tensor, Variable
from lossscale.units.unit import Unit

#: The names of variables that hold magnitudes of scaled gradients. No others have these
#: names (seen in Keras 3.3 to 3.15, which has no other mark for such variables).
_OF_GRADIENTS = ("outputs_grad_scale", "outputs_grad_amax_history")
#: The unit of these variables: they grow with the loss scale, as scaled gradients do.
_SCALED = Unit(1.0, 1.0, from_variable=True)


def is_overwritten(variable: Variable) -> bool:
    """Tells whether a variable's "gradient" is its new value (Keras 3.2 and later)."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def note_units(history: History, variables: Iterable[Variable]) -> None:
    """Notes which variables hold magnitudes of scaled gradients.

    A float8 layer divides gradients by such a scale, bounds the quotients, and
    multiplies them by the scale again. If we know that the scale moves with the loss
    scale, the quotients have exponent 0 and the gradients are known to be scaled.
    """
    for variable in variables:
        if is_overwritten(variable) and variable.name in _OF_GRADIENTS:
            history.values.note_variable(kerases.tensor_of(variable), _SCALED)


def as_handed_over(history: History, value: Tensor) -> Tensor:
    """Returns a new value as the layer handed it over.

    `get_unscaled_gradients` cannot tell a new value from a gradient, and divides it.

    Raises:
      ValueError: The value was divided in eager mode, which does not keep the undivided
        one.
    """
    unscaling = history.unscaling_of(value)
    if unscaling is None:
        return value
    before = unscaling.before_division().get(id(value))
    if before is None:
        raise ValueError(
            "`grads` must hold the new values of variables that they overwrite "
            "(float8) as the tape returned them, got one that get_unscaled_gradients "
            "returned. Unscale the other gradients only."
        )
    return before[0]


def check_of(values: Sequence[Grad], grads: Grads) -> Check:
    """Returns the check of new values, which are applied as they are.

    A float8 layer bounds its gradients, so an infinity is often left in its history of
    magnitudes only.

    Args:
      values: The new values. None stands for a gradient.
      grads: The gradients. None stands for a new value. The worst numbers are those of
        both.
    """
    every: Grads = [g if v is None else v for v, g in zip(values, grads)]
    groups = groups_of_one(len(every))
    return checked(values)._replace(worst=lambda: worst_of_each(every, groups))
