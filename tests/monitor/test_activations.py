"""LossScaleMonitor(check_activations=True): the layer that overflows, in `fit`.

It measures on the device, and reads it when the monitor speaks.
"""

from __future__ import annotations

import numpy as np
import pytest
from faulty import scaled_gradients, told_of
from impossible import why_not
from installed import STRATEGY
from limits import skip_without
from models import compiled_by, policy_of

from lossscale import DynamicLossScale, LossScaleMonitor, LossScaleOptimizer


def told(model, x, y, **kwargs):
    """Returns what a monitor said in a fit."""
    kwargs = {"patience": 2, "verbose": 0, "check_activations": True, **kwargs}
    messages, _ = told_of(model, x, y, LossScaleMonitor(**kwargs), epochs=3)
    return "\n".join(messages)


def named(message):
    """Returns what follows "the first layer ..." in a message."""
    return message.split("not finite at the last step: ")[1].split(". ")[0]


def network(family, model_class=None, **compile_arguments):
    """Returns a model of which the layer "encoder/hot" doubles 2**15 to inf."""
    keras = family.keras
    ones = keras.initializers.Ones()

    def dense(name, **kwargs):
        return keras.layers.Dense(
            2, use_bias=False, kernel_initializer=ones, name=name, **kwargs
        )

    with policy_of(keras, "mixed_float16"):
        encoder = keras.Sequential([dense("cool"), dense("hot")], name="encoder")
        given = keras.Input((2,))
        output = dense("head", dtype="float32")(encoder(given))
        model = (model_class or keras.Model)(given, output)
    inner = family.optimizers.SGD(2.0**-60)
    optimizer = LossScaleOptimizer(inner, DynamicLossScale(1.0))
    model.compile(optimizer, loss="mse", **compile_arguments)
    return model


def growing(steps, finite=1):
    """Returns data of which the steps after the first ones overflow in `hot`."""
    x = np.full([steps * 4, 2], 2.0**14, np.float32)
    x[: finite * 4] = 2.0**12
    return x, np.full([steps * 4, 2], 2.0**15, np.float32)


@pytest.mark.parametrize("mode", ["graph", "eager", "xla"])
def test_the_first_layer_is_named_with_what_it_was_before(family, mode):
    if mode == "xla":
        skip_without("compile(jit_compile=...)", family)
        skip_without("the end of float16 under XLA", family)
    model = network(family, **compiled_by(mode))
    message = told(model, *growing(6))
    assert named(message) == "encoder/hot: inf, after 2**14.0; its inputs were finite"
    assert "find_nonfinite" not in message


@pytest.mark.slow
def test_on_two_replicas_with_the_fault_on_the_last(family, mirrored):
    if why_not(STRATEGY, family.name, "fit"):
        pytest.skip("impossible, see impossible.py")
    with mirrored.scope():
        model = network(family)
    x, y = growing(6)
    x.reshape([6, 4, 2])[:, :2] = 2.0**11  # the first replica's part
    message = told(model, x, y)
    assert named(message) == "encoder/hot: inf, after 2**14.0; its inputs were finite"


def test_a_custom_step_with_check_underflow(family):
    class Custom(family.keras.Model):
        def train_step(self, batch):
            loss, grads = scaled_gradients(self, batch)
            grads = self.optimizer.get_unscaled_gradients(grads)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
            return {"loss": loss}

    model = network(family, Custom)
    message = told(model, *growing(6), check_underflow=True)
    assert named(message).startswith("encoder/hot: inf, after 2**14.0")
    assert model.optimizer.loss_scale.last_largest is not None


@pytest.mark.slow
def test_nothing_stays_and_nothing_is_measured_unasked(family):
    model = network(family)
    x, y = growing(6)
    message = told(model, x, y, check_activations=False)
    assert "LossScaleMonitor(check_activations=True)" in message
    assert "not finite at the last step" not in message
    told(model, x, y)
    assert not {"train_step", "make_train_function"} & set(vars(model))
    assert model.train_function is None
    with pytest.raises(FloatingPointError, match="encoder/hot: inf"):
        told(model, x, y, on_stall="raise")
    assert "train_step" not in vars(model)
    layers = [model, *model.layers]
    assert not [layer for layer in layers if "call" in vars(layer)]


@pytest.mark.slow
def test_the_next_fit_puts_back_what_an_error_left(family):
    class Ends(family.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            del batch, logs
            raise KeyError("somebody else's")

    model = network(family)
    x, y = growing(2)
    monitor = LossScaleMonitor(verbose=0, check_activations=True)
    with pytest.raises(KeyError):
        model.fit(x, y, verbose=0, callbacks=[monitor, Ends()])
    model.fit(x[:4], y[:4], verbose=0)
    assert not {"train_step", "make_train_function"} & set(vars(model))


@pytest.mark.slow
def test_finite_outputs_are_told_of(family):
    model = network(family)
    x, y = growing(6, finite=6)
    y[:] = np.inf
    message = told(model, x, y)
    assert "The outputs of all layers were finite at the last step." in message
    assert "The largest was that of functional" in message or "2**15.0" in message


@pytest.mark.slow
def test_data_that_are_not_finite(family):
    x, y = growing(6, finite=6)
    x[:] = np.nan
    message = told(network(family), x, y)
    assert named(message) == "encoder/cool: NaN; its inputs were not"
