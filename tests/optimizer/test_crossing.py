"""What another kind of optimizer saved, ours goes on from; and the other way round.

All runs are finite and all scales are powers of two, so that an optimizer without loss
scaling comes to the same bits. Files of older versions are in test_old_files.py.
"""

import numpy as np
import pytest
from exact import heard
from limits import skip_without
from models import assert_same, checkpoint_of, data, regression, training_state

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer


def adam(family):
    return family.optimizers.Adam(0.05)


def train(model):
    """Trains for five steps."""
    x, y = data(np.random.default_rng(7), 40)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)


def model_of(family, make, fits=0):
    """Returns a model with the optimizer that a function makes, after some fits."""
    model = regression(family, make(family), run_eagerly=True)
    for _ in range(fits):
        train(model)
    return model


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


#: Who saves, and who goes on. Bare ones are in test_persistence.py.
CROSSINGS = [(own, dynamic), (dynamic, own), (fixed, dynamic), (dynamic, fixed)]


@pytest.fixture
def end(family):
    """Returns the state at the end of a run without loss scaling."""
    return training_state(model_of(family, adam, 2))


@pytest.mark.slow
@pytest.mark.peer_defect(11)
def test_a_checkpoint(family, end, tmp_path):
    path = str(tmp_path / "checkpoint")
    for first, second in CROSSINGS:
        # Keras 3's own loses a scale that is read before it is built.
        model, other = (
            model_of(family, first, 1),
            model_of(family, second, second is own),
        )
        checkpoint_of(other).read(checkpoint_of(model).write(path)).expect_partial()
        train(other)
        assert_same(training_state(other), end)
        if own in (first, second):  # 10 steps, and the scale grew at each fourth
            assert scale_of(other.optimizer) == [2.0**7, 2]


@pytest.mark.peer_defect(11)
def test_a_bare_checkpoint_in_the_wrong_place_is_told(family, tmp_path):
    skip_without("optimizers that hide the inner one", family)
    model, other = model_of(family, adam, 1), model_of(family, dynamic)
    path = checkpoint_of(model).write(str(tmp_path / "checkpoint"))
    checkpoint_of(other).read(path).expect_partial()
    with heard() as told:
        for _ in range(2):
            train(other)
    (message,) = told  # once is enough
    assert "into `optimizer.inner_optimizer`" in message


@pytest.mark.peer_defect(11)
def test_a_file_of_weights_of_kerass_own(family, end, tmp_path):
    """That of a bare optimizer is in test_persistence.py."""
    skip_without("an optimizer in a .weights.h5 file", family)
    path = str(tmp_path / "model.weights.h5")
    model_of(family, own, 1).save_weights(path)
    other = model_of(family, dynamic)
    other.optimizer.build(other.trainable_variables)
    other.load_weights(path)
    train(other)
    assert_same(training_state(other), end)
    if family.name == "keras3":  # Keras 2's own does not write it
        assert scale_of(other.optimizer) == [2.0**7, 2]
