"""Gradients that the user's own function aggregates, before the step is decided."""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

import tensorflow as tf

from lossscale.optimizer.bundle import Bundle
from lossscale.optimizer.checking import unscale_and_check
from lossscale.runtime.aliases import PerGradient, Variable


def aggregated(
    bundle: Bundle,
    variables: List[Variable],
    aggregate: Callable[[List[Any]], Any],
) -> Tuple[Bundle, List[Variable]]:
    """Returns gradients as the user's function aggregates them, and their variables.

    If a gradient was not finite before, the step is skipped, whatever the function
    returns. As in Keras, the function gets unscaled gradients. It may wait for the
    other replicas, so it is called at every step.

    Args:
      bundle: The gradients that were passed to the wrapper.
      variables: The variables of these gradients.
      aggregate: Takes a list of `(gradient, variable)` pairs, and returns pairs.
    """
    grads, now = unscale_and_check(bundle)
    pairs = [(g, v) for g, v in zip(grads, variables) if g is not None]
    pairs = list(aggregate(pairs))
    found, trained = [g for g, _ in pairs], [v for _, v in pairs]
    check = bundle.check & now
    of_all = check.worst
    if of_all is not None:
        check = check._replace(worst=lambda: _worst_of(trained, of_all(), variables))
    nothing = [None] * len(found)
    unscaled = Bundle(bundle.loss_scale, found, nothing, check, losses=bundle.losses)
    return unscaled, trained


def _worst_of(
    trained: List[Variable], worst: PerGradient, variables: List[Variable]
) -> PerGradient:
    """Returns the worst numbers of the variables that the user's function returned.

    Args:
      trained: The variables that the function returned.
      worst: For each of `variables`, the worst number in its gradient.
      variables: The variables that the function was called with.
    """
    positions = {id(variable): i for i, variable in enumerate(variables)}
    # A variable that only the function returned had no gradient, and so no fault.
    of_others = len(variables)
    found = [positions.get(id(variable), of_others) for variable in trained]
    return tf.gather(tf.pad(worst, [[0, 1]]), found)
