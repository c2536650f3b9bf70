"""Gradients that the user aggregates across replicas, before a step is decided on."""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

import tensorflow as tf

from lossscale.optimizer.bundle import Bundle
from lossscale.optimizer.checking import unscale_and_check
from lossscale.runtime.aliases import Tensor, Variable


def aggregated(
    bundle: Bundle, variables: Any, aggregate: Callable[[List[Any]], Any]
) -> Tuple[Bundle, List[Any]]:
    """Returns gradients as the user's function aggregates them, and their variables.

    They were finite before, or the step is skipped whatever it returns. It is called
    with unscaled gradients, as Keras does, and at every step: it may wait for others.

    Args:
      bundle: The gradients that were handed in.
      variables: What they are to be applied to.
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
    trained: List[Variable], worst: Tensor, variables: List[Variable]
) -> Tensor:
    """Returns the worst numbers of the variables that the user's function returned."""
    positions = {id(variable): i for i, variable in enumerate(variables)}
    of_others = len(variables)  # which were not there before, and had no fault
    found = [positions.get(id(variable), of_others) for variable in trained]
    return tf.gather(tf.pad(worst, [[0, 1]]), found)
