"""Gradients that the user aggregates across replicas, before a step is decided on."""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

import tensorflow as tf

from lossscale.gradients import faults
from lossscale.gradients.packing import as_they_are
from lossscale.optimizer.provenance.resolve import HandedIn
from lossscale.optimizer.unscaling import unscale_and_check
from lossscale.scales.base import LossScale


def aggregated(
    loss_scale: LossScale,
    handed: HandedIn,
    variables: Any,
    aggregate: Callable[[List[Any]], Any],
) -> Tuple[HandedIn, List[Any]]:
    """Returns gradients as the user's function aggregates them, and their variables.

    They were finite before, or the step is skipped whatever it returns. It is called
    with unscaled gradients, as Keras does, and at every step: it may wait for others.

    Args:
      loss_scale: What they are unscaled by.
      handed: The gradients that were handed in.
      variables: What they are to be applied to.
      aggregate: Takes a list of `(gradient, variable)` pairs, and returns pairs.
    """
    given = as_they_are(handed.grads)
    grads, check = unscale_and_check(loss_scale, given, handed.divisors)
    pairs = [(g, v) for g, v in zip(grads, variables) if g is not None]
    pairs = list(aggregate(pairs))
    found, trained = [g for g, _ in pairs], [v for _, v in pairs]
    earlier = faults.combine(handed.earlier, check)
    if earlier is not None:
        of_all = earlier.codes
        earlier = earlier._replace(
            codes=lambda: _codes_of(trained, of_all(), variables)
        )
    return HandedIn(found, [None] * len(found), earlier, False, handed.losses), trained


def _codes_of(trained: List[Any], codes: Any, variables: List[Any]) -> Any:
    """Returns the fault codes of those variables that came back."""
    positions = {id(variable): i for i, variable in enumerate(variables)}
    of_others = len(variables)  # which were not there before, and had no fault
    found = [positions.get(id(variable), of_others) for variable in trained]
    return tf.gather(tf.pad(codes, [[0, 1]], constant_values=faults.FINITE), found)
