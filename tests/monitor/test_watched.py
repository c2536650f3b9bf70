"""A model with several optimizers: each is watched, under its own name."""

import re

import numpy as np
import pytest
import tensorflow as tf
from exact import heard
from models import FEATURES, data, policy_of, regression

from lossscale import DynamicLossScale, LossScaleMonitor, LossScaleOptimizer
from lossscale.runtime.keras_versions import tensor_of


def wrapped(inner):
    return LossScaleOptimizer(inner, DynamicLossScale(2.0**10))


def two_optimizers(family, wrap):
    """Returns a model like a GAN: its `compile` takes two optimizers, and its own none.

    The gradients of the second are infinite where an input is.
    """
    keras = family.keras

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(1), keras.layers.Dense(1)

        def compile(self, optimizers):
            super().compile()
            self.d_optimizer, self.g_optimizer = self.both = optimizers

        def call(self, x):
            return self.first(x) + self.second(x)

        def train_step(self, batch):
            x = batch[0] if isinstance(batch, tuple) else batch
            inputs = (tf.ones_like(x), x)
            for layer, optimizer, x in zip(self.layers, self.both, inputs):
                with tf.GradientTape() as tape:
                    scaled_loss = optimizer.scale_loss(tf.reduce_mean(layer(x) ** 2))
                variables = layer.trainable_variables
                grads = tape.gradient(scaled_loss, [*map(tensor_of, variables)])
                optimizer.apply_gradients(zip(grads, variables))
            return {"loss": tf.constant(0.0)}

    model = Gan()
    model(tf.ones([1, FEATURES]))
    model.compile([wrap(family.optimizers.SGD(2.0**-9)) for _ in range(2)])
    return model


def inputs(*bad):
    """Returns six batches of four rows, of which some are infinite."""
    x = np.ones([24, FEATURES], np.float32)
    for batch in bad:
        x[batch * 4] = np.inf
    return x


@pytest.fixture
def gan(family):
    """Under mixed_float16 `compile` makes a wrapper of Keras's own by default."""
    with policy_of(family.keras, "mixed_float16"):
        return two_optimizers(family, wrapped)


def fit_with_bad_batches(model, monitor, *bad, **kwargs):
    kwargs = {"verbose": 0, "shuffle": False, "batch_size": 4, **kwargs}
    history = model.fit(inputs(*bad), callbacks=[monitor], **kwargs).history
    return {name: values for name, values in history.items() if name != "loss"}


def test_the_optimizers_of_a_gan_are_found(gan, capsys):
    history = fit_with_bad_batches(gan, LossScaleMonitor(), 1, 2, epochs=2)
    assert history == {
        "d_optimizer_loss_scale": [2.0**10, 2.0**10],
        "d_optimizer_skipped_steps": [0, 0],
        "d_optimizer_nonfinite_losses": [0, 0],
        "g_optimizer_loss_scale": [2.0**8, 2.0**6],
        "g_optimizer_skipped_steps": [2, 4],
        "g_optimizer_nonfinite_losses": [2, 4],
    }
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Loss scale of d_optimizer: 12 steps applied, 0 skipped ")
    assert second.startswith("Loss scale of g_optimizer: 8 steps applied, 4 skipped ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "names"),
    [
        (lambda first, second: {"D": first, "G": second}, ["D_", "G_"]),
        (lambda first, second: [first, second], ["optimizer_0_", "optimizer_1_"]),
        (lambda _, second: second, [""]),
        (lambda _, second: {"G": second}, ["G_"]),
    ],
    ids=["dict", "list", "one", "dict of one"],
)
def test_those_that_are_given_are_watched(gan, given, names):
    monitor = LossScaleMonitor(verbose=0, optimizers=given(*gan.both))
    history = fit_with_bad_batches(gan, monitor, 1)
    figures = ("loss_scale", "skipped_steps", "nonfinite_losses")
    assert list(history) == [name + what for name in names for what in figures]
    assert history[f"{names[-1]}skipped_steps"] == [1]
    monitor.optimizers = None  # another model may have another name for one
    history = fit_with_bad_batches(gan, monitor)
    assert [*history][::3] == ["d_optimizer_loss_scale", "g_optimizer_loss_scale"]


def test_an_optimizer_that_the_user_never_made_is_not_named(family):
    model = two_optimizers(family, lambda inner: inner)
    monitor = LossScaleMonitor()
    monitor.set_model(model)
    with pytest.raises(TypeError) as caught:
        monitor.on_train_begin()
    message = str(caught.value)
    assert re.search(r"got model\.d_optimizer = .*, model\.g_optimizer = ", message)
    assert "RMSprop" not in message.partition("Write")[0]
    assert "optimizers={" in message


def test_an_optimizer_beside_the_one_that_is_compiled(family, rng):
    model = regression(family, wrapped(family.optimizers.SGD(2.0**-9)))
    model.spare = wrapped(family.optimizers.SGD(2.0**-9))
    model.same = model.optimizer
    x, y = data(rng)
    monitor = LossScaleMonitor(verbose=0)
    history = model.fit(x, y, verbose=0, callbacks=[monitor]).history
    names = {"optimizer_loss_scale", "spare_loss_scale"}
    assert {name for name in history if name.endswith("loss_scale")} == names


def test_who_shares_a_loss_scale_answers_for_its_own_steps(family, capsys):
    scale = DynamicLossScale(2.0**10)
    with policy_of(family.keras, "mixed_float16"):
        sharing = two_optimizers(family, lambda inner: LossScaleOptimizer(inner, scale))
    history = fit_with_bad_batches(sharing, LossScaleMonitor(100), 1, 2, 4)
    assert history == {
        "d_optimizer_loss_scale": [2.0**7],
        "d_optimizer_skipped_steps": [0],
        "d_optimizer_nonfinite_losses": [0],
        "g_optimizer_loss_scale": [2.0**7],
        "g_optimizer_skipped_steps": [3],
        "g_optimizer_nonfinite_losses": [3],
    }
    healthy, other = capsys.readouterr().out.splitlines()
    assert healthy == (
        "Loss scale of d_optimizer: 6 steps applied, 0 skipped in this fit; shared, "
        "with 3 steps skipped for all; it is 128, and was read between 128 and 2**10."
    )
    assert other.startswith("Loss scale of g_optimizer: 3 steps applied, 3 skipped ")
    monitor = LossScaleMonitor(3, every=1, verbose=0)
    with heard() as messages:
        fit_with_bad_batches(sharing, monitor, 1, 2, 3, 4, 5)
    of_batches, message = messages
    assert of_batches.startswith("g_optimizer: Epoch 1: 1 step was skipped")
    assert message.startswith("g_optimizer: 3 steps in a row were skipped")
