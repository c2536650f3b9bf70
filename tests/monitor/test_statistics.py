"""restore_statistics: what a bad batch leaves in a model is put back, on each Keras."""

import numpy as np
import pytest
import tensorflow as tf
from exact import heard
from faulty import ROWS, Faulty, batches, told_of
from strategies import scope_of

from lossscale import DynamicLossScale, LossScaleMonitor, LossScaleOptimizer
from lossscale.runtime import keras_versions

#: The third batch is bad in its last row alone, so on the last replica.
RUN = [None, None, "data", None, None]
WITHOUT = [None] * 4


def monitor(**kwargs):
    return LossScaleMonitor(restore_statistics=True, **{"verbose": 0, **kwargs})


def statistics(model):
    local = model.distribute_strategy.experimental_local_results
    return [
        part.numpy()
        for variable in keras_versions.statistics_of(model)
        for part in local(keras_versions.tensor_of(variable))
    ]


def finite(model):
    return all(np.isfinite(each).all() for each in statistics(model))


def test_they_are_as_if_the_bad_batch_had_not_been(anywhere, capsys):
    faulty = anywhere
    with heard() as messages:
        faulty.fit(RUN, monitor(verbose=1), epochs=2)
    mended = statistics(faulty.model)
    assert int(faulty.scale.skipped_steps.numpy()) == 2
    assert not [each for each in messages if "Non-trainable" in each]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Batches after which statistics were put back: 2."

    x, y = batches(RUN)
    kept = [row for row in range(len(x)) if row // ROWS != RUN.index("data")]
    faulty.reset()
    model = faulty.model
    model.fit(x[kept], y[kept], ROWS, 2, verbose=0, shuffle=False)
    for one, other in zip(mended, statistics(model)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("bad", [0, 4])
def test_a_test_within_fit_sees_numbers(faulty, bad):
    """If the first batch is bad, and if the last one before the test is."""
    run = [None] * 5
    run[bad] = "data"
    model, tested = faulty.model, {"validation_data": batches(WITHOUT)}
    _, history = told_of(model, *batches(run), monitor(), ROWS, epochs=2, **tested)
    assert np.isfinite(history["val_loss"]).all()
    assert finite(model)


@pytest.mark.slow
def test_several_steps_in_one_call_and_a_loop_of_your_own(family):
    faulty = Faulty(family)
    faulty.model.compile(faulty.optimizer, "mse", steps_per_execution=5)
    faulty.fit(RUN * 2, monitor())
    assert finite(faulty.model)

    faulty = Faulty(family)
    watching = monitor()
    watching.set_model(faulty.model)
    watching.on_epoch_begin(0)
    for step, (x, y) in enumerate(zip(*(np.split(v, 5) for v in batches(RUN)))):
        watching.on_train_batch_begin(step)
        faulty.model.train_on_batch(x, y)
    watching.on_epoch_end(0)
    assert finite(faulty.model)


@pytest.mark.slow
@pytest.mark.peer_defect(26)
def test_statistics_of_every_kind(place):
    """In a model within a model, summed over replicas, of a norm, and those frozen.

    A number that is infinite on purpose stays so, and nothing is said of it.
    """
    family, strategy = place
    keras = family.keras
    layers = keras.layers

    class Own(layers.Layer):
        """Has variables of its own, a seed and a metric."""

        def build(self, shape):
            def scalar(name, value):
                start = keras.initializers.Constant(value)
                options = {"initializer": start, "trainable": False}
                return self.add_weight(name=name, shape=(), **options)

            self.largest, self.least = scalar("largest", 0.0), scalar("least", np.inf)
            self.drop = layers.Dropout(0.5, seed=3)
            self.mean = keras.metrics.Mean()
            super().build(shape)

        def call(self, x, training=None):
            if training:
                self.largest.assign(tf.reduce_max(tf.abs(tf.cast(x, tf.float32))))
                self.mean.update_state(x)
            return self.drop(x, training=training)

    with scope_of(strategy):
        frozen = layers.BatchNormalization(trainable=False, name="frozen")
        sync = layers.BatchNormalization(synchronized=True, name="sync")
        inner = keras.Sequential([keras.Input((3,)), layers.Dense(4), sync, frozen])
        # A norm that is trained within a model that is not.
        outer = keras.Sequential([keras.Input((4,)), layers.BatchNormalization()])
        outer.trainable, outer.layers[-1].trainable = False, True
        parts = [keras.Input((3,)), inner, outer, Own(), layers.Dense(1)]
        if family.name == "keras3":  # that of tf_keras does not work beside Keras 3
            parts.insert(2, layers.SpectralNormalization(layers.Dense(4)))
        model = keras.Sequential(parts)
        scale = DynamicLossScale(2.0**10)
        optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-8), scale)
        model.compile(optimizer, "mse")
    messages, _ = told_of(model, *batches(RUN), monitor(), ROWS, epochs=2)
    assert not [each for each in messages if "Non-trainable" in each]
    assert int(scale.skipped_steps.numpy()) == 2
    bad = [each for each in statistics(model) if not np.isfinite(each).all()]
    assert {float(each) for each in bad} == {np.inf}  # `least`
    (own,) = [each for each in keras_versions.layers_of(model) if isinstance(each, Own)]
    assert np.isnan(own.mean.result().numpy())  # a metric tells what happened
    x, y = batches(WITHOUT)
    assert np.isfinite(np.ravel(model.evaluate(x, y, verbose=0))[0])
    assert np.isfinite(model.predict(x, verbose=0)).all()


def test_what_was_nan_before_is_told_and_the_others_are_put_back(faulty):
    bad, good = map(
        keras_versions.tensor_of, keras_versions.statistics_of(faulty.model)
    )
    bad.assign(np.full(bad.shape, np.nan, np.float32))
    with heard() as messages:
        faulty.fit([None, "data", None], monitor())
    assert np.isfinite(good.numpy()).all()
    (told,) = [each for each in messages if "Non-trainable" in each]
    assert "moving_mean (NaN). " in told
    assert "There is no good copy to put back." in told


@pytest.mark.parametrize("bad", [0, 1])
def test_a_model_that_its_first_batch_builds(family, bad):
    """If that batch is bad, there is no copy, and it says what to do."""
    layers = family.keras.layers
    model = family.keras.Sequential([layers.BatchNormalization(), layers.Dense(1)])
    optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-8))
    model.compile(optimizer, "mse", run_eagerly=True)
    run = [None] * 3
    run[bad] = "data"
    messages, _ = told_of(model, *batches(run), monitor(), ROWS)
    is_told = any("call it on a batch before `fit`: model(x)" in m for m in messages)
    assert is_told == (bad == 0) != finite(model)
