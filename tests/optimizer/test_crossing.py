"""What another kind of optimizer saved, ours goes on from; and the other way round.

All runs are finite and all scales are powers of two, so that an optimizer without loss
scaling comes to the same bits. Files of older versions are in test_old_files.py.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from exact import heard
from limits import skip_without
from models import assert_same, checkpoint_of, data, regression, training_state

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer


def adam(family):
    return family.optimizers.Adam(0.05)


def model_of(family, optimizer):
    return regression(family, optimizer, run_eagerly=True)


def fit(model, first, last):
    """Trains for some epochs of five batches."""
    x, y = data(np.random.default_rng(7), 40)
    epochs = {"initial_epoch": first, "epochs": last}
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **epochs)


def own(family):
    wrapper = family.keras.mixed_precision.LossScaleOptimizer
    return wrapper(adam(family), initial_scale=2.0**5, dynamic_growth_steps=4)


def scale_of(optimizer):
    """Returns the scale and the good steps of our wrapper, or of Keras's own."""
    names = ("loss_scale", "dynamic_counter")  # Keras 2's
    if hasattr(optimizer, "dynamic_scale"):  # Keras 3's, and ours
        names = ("dynamic_scale", "step_counter")
    return [float(getattr(optimizer, name).numpy()) for name in names]


def dynamic(family):
    return LossScaleOptimizer(adam(family), DynamicLossScale(2.0**5, 4))


def fixed(family):
    return LossScaleOptimizer(adam(family), FixedLossScale(2.0**6, skip_nonfinite=True))


#: Name -> (who saves, who goes on). Bare ones are in test_persistence.py.
CROSSINGS = {
    "Keras's own to ours": (own, dynamic),
    "ours to Keras's own": (dynamic, own),
    "fixed to dynamic": (fixed, dynamic),
    "dynamic to fixed": (dynamic, fixed),
}


def after_an_epoch(family, make):
    model = model_of(family, make(family))
    fit(model, 0, 1)
    return model


@pytest.fixture
def end(family):
    """Returns the state at the end of a run without loss scaling."""
    model = after_an_epoch(family, adam)
    fit(model, 1, 2)
    return training_state(model)


@pytest.mark.slow
@pytest.mark.peer_defect(11)
def test_a_checkpoint(family, end, tmp_path):
    path = str(tmp_path / "checkpoint")
    models = {make: after_an_epoch(family, make) for make in (dynamic, own, fixed)}
    for name, (first, second) in CROSSINGS.items():
        model, other = models[first], model_of(family, second(family))
        if second is own:  # Keras 3's own loses a scale that is read before it is built
            fit(other, 0, 1)
        checkpoint_of(other).read(checkpoint_of(model).write(path)).expect_partial()
        fit(other, 1, 2)
        assert_same(training_state(other), end)
        if own in (first, second):  # 10 steps, and the scale grew at each fourth
            assert scale_of(other.optimizer) == [2.0**7, 2], name


@pytest.mark.peer_defect(11)
def test_a_bare_checkpoint_in_the_wrong_place_is_told(family, tmp_path):
    skip_without("optimizers that hide the inner one", family)
    model, other = after_an_epoch(family, adam), model_of(family, dynamic(family))
    path = checkpoint_of(model).write(str(tmp_path / "checkpoint"))
    checkpoint_of(other).read(path).expect_partial()
    with heard() as told:
        for _ in range(2):
            fit(other, 1, 2)
    (message,) = told  # once is enough
    assert "into `optimizer.inner_optimizer`" in message


@pytest.mark.peer_defect(11)
@pytest.mark.parametrize("first", [adam, own], ids=["bare", "Keras's own"])
def test_a_file_of_weights(family, end, tmp_path, first):
    skip_without("an optimizer in a .weights.h5 file", family)
    path = str(tmp_path / "model.weights.h5")
    after_an_epoch(family, first).save_weights(path)
    other = model_of(family, dynamic(family))
    other.optimizer.build(other.trainable_variables)
    with warnings.catch_warnings():
        # Keras 3 looks for a group of the inner optimizer, which a bare one's has not.
        warnings.simplefilter("ignore")
        other.load_weights(path)
    fit(other, 1, 2)
    assert_same(training_state(other), end)
    if first is own and family.name == "keras3":  # Keras 2's own does not write it
        assert scale_of(other.optimizer) == [2.0**7, 2]
