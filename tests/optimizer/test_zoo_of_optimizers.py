"""Every optimizer of every Keras with each setting, when a batch in `fit` overflows.

`test_composition.py` gives every optimizer its gradients, and one of them all settings.
Here each has some, in `compile` and `fit`: its state is the bare optimizer's that saw
the other five batches. For each with each:

    LOSSSCALE_SETTINGS=1 pytest -m slow tests/optimizer/test_zoo_of_optimizers.py
"""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
from limits import LIMITS, TENSORFLOW
from models import assert_same, data, differ, regression, training_state
from test_composition import MADE_WITH, SETTINGS, every_optimizer

from lossscale import DynamicLossScale, LossScaleOptimizer

#: How a model is compiled.
MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},
}
#: Bare, weights of 0 are what Keras begins with if a graph builds it.
BUILT_FIRST = {"ScheduleFreeAdamW"}
SIZE, BAD = 16, 2
#: Whether each optimizer is tried with each setting: for a quarter of an hour.
EXPLORED = bool(os.environ.get("LOSSSCALE_SETTINGS"))
PLAIN = "plain"


def optimizer_of(family, name, setting):
    """Returns an optimizer with a setting, None if its class lacks it."""
    optimizer_class = getattr(family.optimizers, name)
    if setting == PLAIN:
        return optimizer_class(**MADE_WITH.get(name, lambda _: {})(family.optimizers))
    arguments, _ = SETTINGS[setting]
    try:
        return optimizer_class(**{"learning_rate": 0.05, **arguments(family.keras)})
    except ValueError:  # Keras 2's legacy Nadam takes no schedule
        return None


def fitted(family, optimizer, mode, x, y):
    """Returns the state after `fit`."""
    how = MODES[mode]
    if TENSORFLOW < (2, 9):
        how = {key: value for key, value in how.items() if key != "jit_compile"}
    model = regression(family, optimizer, **how)
    if type(optimizer).__name__ in BUILT_FIRST:
        optimizer.build(model.trainable_variables)
    before = training_state(model)
    model.fit(x, y, batch_size=SIZE, shuffle=False, verbose=0)
    state = training_state(model)
    assert differ(state, before)
    return state


def assert_one_batch_changes_nothing(family, name, setting, mode):
    bare = optimizer_of(family, name, setting)
    if bare is None:
        pytest.skip(f"{name} has no {setting}")
    x, y = data(np.random.default_rng(7), 6 * SIZE)
    good = np.arange(len(x)) // SIZE != BAD
    expected = fitted(family, bare, mode, x[good], y[good])
    loss_scale = DynamicLossScale(2.0**12, 2)  # it grows on the way
    optimizer = LossScaleOptimizer(optimizer_of(family, name, setting), loss_scale)
    y[BAD * SIZE + 3] = np.inf
    state = fitted(family, optimizer, mode, x, y)
    assert loss_scale.skipped_steps.numpy() == 1
    assert_same(state, expected)
    gc.collect()  # an optimizer that is alive listens to all that is eager


def settings_of(family, name):
    """Returns what there is for an optimizer: one that is made of others has none."""
    features = {setting: feature for setting, (_, feature) in SETTINGS.items()}
    there = [s for s, feature in features.items() if is_there(feature, family)]
    return [PLAIN, *([] if name in MADE_WITH else there)]


def is_there(feature, family):
    return feature is None or not LIMITS[feature][0](family)


def every_setting():
    """Returns parameters: each third optimizer and a setting, in turn, in a graph.

    They are slow. Quick ones, on all versions but the newest, have one setting of every
    fifth, in eager mode.
    """
    found = []
    for turn, parameter in enumerate(every_optimizer()):
        family, name = parameter.values
        settings = settings_of(family, name)
        in_turn = settings[turn % len(settings)]
        chosen = settings if EXPLORED else [in_turn] if turn % 3 == 0 else []
        ways = [(setting, "graph", [pytest.mark.slow]) for setting in chosen]
        is_quick = turn % 5 == 0 and TENSORFLOW < (2, 21)  # which has the slow ones
        if EXPLORED or is_quick:
            ways.append((in_turn, "eager", [] if is_quick else [pytest.mark.slow]))
        found.extend(
            pytest.param(
                *(family, name, setting, mode),
                id=f"{parameter.id}-{setting}-{mode}",
                marks=marks,
            )
            for setting, mode, marks in ways
        )
    return found


@pytest.mark.parametrize(("family", "name", "setting", "mode"), every_setting())
def test_a_batch_that_overflows_is_as_if_never_seen(family, name, setting, mode):
    assert_one_batch_changes_nothing(family, name, setting, mode)
