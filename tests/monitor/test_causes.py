"""Each cause that the monitor names can be true of the model that it watches.

This holds `diagnosis.py` and `texts.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from faulty import told_of
from models import FEATURES, data, policy_of, regression

from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleMonitor,
    LossScaleOptimizer,
)
from lossscale.monitor.diagnosis import computes_in_float16


def optimizer_of(family, scale=None, rate=1e-3):
    return LossScaleOptimizer(
        family.optimizers.SGD(rate), scale or DynamicLossScale(8.0)
    )


def monitor(**arguments):
    return LossScaleMonitor(**{"patience": 3, "verbose": 0, **arguments})


def test_a_model_in_float32_that_dies_of_its_learning_rate(family, rng):
    """float16 is not to blame where no layer computes in it."""
    model = regression(family, optimizer_of(family, rate=1e6))
    messages, _ = told_of(model, *data(rng, 256), monitor())
    said = "\n".join(messages)
    assert "a learning rate that is too high; a logarithm of zero" in said
    assert "float16" not in said
    assert 'dtype="float32"' not in said


@pytest.mark.parametrize("scale", [1.0, "fixed", "floor"])
def test_gradients_in_float32_that_no_loss_scale_made_infinite(family, rng, scale):
    """A lower loss scale or a lower floor would not help."""
    scales = {
        "fixed": FixedLossScale(2.0**15, skip_nonfinite=True),
        "floor": DynamicLossScale(2.0, min_loss_scale=2.0),
    }
    optimizer = optimizer_of(family, scales.get(scale) or DynamicLossScale(scale))
    model = regression(family, optimizer)
    weights = model.get_weights()
    model.set_weights([*weights[:2], *map(np.zeros_like, weights[2:])])
    x, y = data(rng)
    x[:], y[:] = 1e22, 1e18  # the gradient is infinite, the loss is not
    messages, _ = told_of(model, x, y, monitor())
    (said,) = [each for each in messages if "in a row" in each]
    assert "No layer computes in float16, so a loss scale of" in said
    assert "too large for float32, which ends at 3.4e38" in said
    for unsaid in ("learning rate", "Most likely", "min_loss_scale", "65504"):
        assert unsaid not in said


def test_before_the_first_step_no_learning_rate_is_to_blame(family, rng):
    x, y = data(rng)
    y[:] = np.nan
    model = regression(family, optimizer_of(family), "mixed_float16")
    messages, _ = told_of(model, x, y, monitor())
    assert any(
        "Likeliest first: inf or NaN in the data; activations" in m for m in messages
    )
    assert "learning rate" not in "".join(messages)


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("last", ["float32", "float16"])
def test_the_last_layer_needs_float32_only_if_it_has_not(family, rng, last, is_own):
    keras = family.keras
    dense = keras.layers.Dense

    class Own(keras.Model):
        def __init__(self):
            super().__init__(dtype="float32" if last == "float32" else None)
            self.hidden, self.last = made()

        def call(self, x):
            return self.last(self.hidden(x))

    def made():
        dtype = "float32" if last == "float32" else None
        return dense(4, name="hidden"), dense(1, dtype=dtype, name="last")

    with policy_of(keras, "mixed_float16"):
        model = (
            Own() if is_own else keras.Sequential([keras.Input([FEATURES]), *made()])
        )
        model.compile(optimizer_of(family), loss="mse")
    x, y = data(rng)
    y[:] = np.nan
    messages, _ = told_of(model, x, y, monitor())
    (said,) = [each for each in messages if "Likeliest first" in each]
    assert ("their layer, and the last one, need" in said) == (last == "float16")
    assert ("their layer needs" in said) == (last == "float32")


@pytest.mark.slow
def test_gradients_in_float32_do_not_underflow(family, rng):
    for policy, is_told in (("float32", False), ("mixed_float16", True)):
        optimizer = optimizer_of(family, DynamicLossScale(1.0))
        model = regression(family, optimizer, policy, loss_weights=2.0**-25)
        x, y = data(rng)
        watching = monitor(patience=2, check_underflow=True)
        messages, _ = told_of(model, x, y, watching, epochs=3)
        assert any("may underflow" in each for each in messages) == is_told


def test_gradients_that_are_added_up_in_float16_are_in_float16(family):
    optimizer = LossScaleOptimizer(
        family.optimizers.SGD(1e-3), DynamicLossScale(), communication_dtype="float16"
    )
    assert computes_in_float16(optimizer, regression(family, optimizer))
    bare = optimizer_of(family)
    assert not computes_in_float16(bare, regression(family, bare))
    assert computes_in_float16(bare, regression(family, bare, "mixed_float16"))
    assert not computes_in_float16(bare, regression(family, bare, "mixed_bfloat16"))
