"""LossScaleOptimizer in `compile` and `fit`, on every Keras."""

import numpy as np
import pytest
import tensorflow as tf
from exact import Trained
from models import assert_same, data, differ, regression, training_state, with_infinity

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer

QUIET = {"batch_size": 16, "verbose": 0, "shuffle": False}


@pytest.mark.peer_defect(27)
@pytest.mark.each_version
def test_it_converges_under_mixed_float16_and_an_infinite_batch_changes_nothing(
    family, rng
):
    x, y = data(rng)
    scale = DynamicLossScale(2.0**10, 20)
    optimizer = LossScaleOptimizer(family.optimizers.Adam(0.05), scale)
    model = regression(family, optimizer, "mixed_float16")
    assert model.optimizer is optimizer  # not wrapped once more
    assert model.layers[0].compute_dtype == "float16"
    losses = model.fit(x, y, epochs=30, **QUIET).history["loss"]
    assert losses[-1] < losses[0] / 20
    steps = int(optimizer.iterations.numpy())
    assert steps + scale.skipped_steps.numpy() == 120
    assert float(scale) > 2.0**10  # it grew on the way
    before, last = training_state(model), float(scale)
    model.fit(with_infinity(x[:16]), y[:16], **QUIET)
    assert_same(training_state(model), before)
    assert float(scale) == last / 2
    model.fit(x[:16], y[:16], **QUIET)
    assert differ(training_state(model), before)
    assert int(optimizer.iterations.numpy()) == steps + 1


@pytest.mark.peer_defect(3)
@pytest.mark.peer_defect(4)
@pytest.mark.parametrize(
    ("start", "factor", "end"),
    [(2.0**15, np.inf, (1.0, 0, 60)), (2.0**100, 1.0, (2.0**127, 0, 0))],
    ids=["bad", "good"],
)
def test_after_any_number_of_steps_the_scale_is_finite_and_a_clean_batch_trains(
    family, start, factor, end
):
    trained = Trained(family, DynamicLossScale(start, 1))
    step = tf.function(lambda factor: trained.apply(trained.scaled(factor)))
    for _ in range(60):
        step(tf.constant(factor))
    assert trained.state() == end
    before = trained.subtracted()
    step(tf.constant(0.5))
    assert trained.subtracted() == before + 0.5


@pytest.mark.peer_defect(31)
@pytest.mark.parametrize("checks", [True, False])
def test_the_end_of_data_of_unknown_size_is_no_step(family, checks):
    """`fit` begins a step without data there, of which a bare optimizer runs a part."""
    decay = {} if family.name == "keras2-legacy" else {"weight_decay": 0.5}
    try:
        inner = family.optimizers.SGD(0.5, **decay)
    except TypeError:  # TensorFlow 2.10's has no weight decay
        decay, inner = {}, family.optimizers.SGD(0.5)
    scale = FixedLossScale(8.0, skip_nonfinite=checks)
    model = family.keras.Sequential(
        [family.keras.Input((2,)), family.keras.layers.Dense(1)]
    )
    model.set_weights([np.ones([2, 1]), np.zeros([1])])
    model.compile(LossScaleOptimizer(inner, scale), "mse")

    # All gradients of the kernel are 0: weight decay alone changes it.
    rows = tf.data.Dataset.from_tensor_slices((np.zeros([12, 2]), np.zeros([12, 1])))
    model.fit(rows.batch(4).filter(lambda *_: True), epochs=2, verbose=0)
    steps = int(model.optimizer.iterations.numpy())
    kernel, factor = model.get_weights()[0], 0.75 if decay else 1.0
    np.testing.assert_allclose(kernel, np.full([2, 1], factor**steps), rtol=1e-5)
    if checks:
        assert steps == 6
        assert int(scale.skipped_steps.numpy()) == 0
    else:
        assert steps >= 6  # 8 on Keras 3.15, 7 on Keras 2, as a bare optimizer's
