"""The table of deaths: what kills a run, what is said, and that the advice helps."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
from faulty import told_of
from models import FEATURES, data, policy_of

from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleMonitor,
    LossScaleOptimizer,
    find_nonfinite,
)

ROWS, BAD = 4, slice(24, 28)  # the rows of batch 6 of 16


def relu(x):
    """A relu that makes 0 of NaN, as TensorFlow's does where it is fused."""
    return tf.where(x > 0, x, tf.zeros_like(x))


def network(
    family,
    *,
    loss="mse",
    scale=None,
    rate=1e-3,
    activation="tanh",
    hidden=None,
    heads=("head",),
    **arguments,
):
    """Returns a model of a layer in float16 and heads in float32, compiled."""
    keras, dense = family.keras, family.keras.layers.Dense
    with policy_of(keras, "mixed_float16"):
        given = keras.Input((FEATURES,))
        layer = dense(8, activation, name="hidden", dtype=hidden, **arguments)(given)
        outputs = [dense(1, name=name, dtype="float32")(layer) for name in heads]
        model = keras.Model(given, outputs if len(heads) > 1 else outputs[0])
    rng = np.random.default_rng(3)
    model.set_weights([rng.normal(size=w.shape) / 4 for w in model.get_weights()])
    inner = family.optimizers.SGD(rate)
    optimizer = LossScaleOptimizer(inner, scale or DynamicLossScale(2.0**10))
    losses = dict.fromkeys(heads, loss) if len(heads) > 1 else loss
    model.compile(optimizer, loss=losses)
    return model


def with_rows(is_cured, name, value):
    """Returns data of which the rows of batch 6 are bad, or left out."""
    found = dict(zip("xy", data(np.random.default_rng(5))))
    if is_cured:
        found = {key: np.delete(each, BAD, 0) for key, each in found.items()}
    else:
        found[name][BAD.stop - 1] = value
    return found["x"], found["y"]


def nan_in_the_data(family, is_cured):
    return network(family), *with_rows(is_cured, "x", np.nan)


def nan_hidden_by_relu(family, is_cured):
    return network(family, activation=relu), *with_rows(is_cured, "x", np.nan)


def infinite_target_of_one_output(family, is_cured):
    x, bad = with_rows(is_cured, "y", np.inf)
    _, good = with_rows(is_cured, "x", 0.0)
    return network(family, heads=("a", "b")), x, {"a": good, "b": bad}


def learning_rate(family, is_cured):
    model = network(family, rate=1e-3 if is_cured else 1e3, activation=None)
    return model, *data(np.random.default_rng(5), 256)


def logarithm_of_zero(family, is_cured):
    small = 1e-3 if is_cured else 0.0

    def loss(y, outputs):
        return -tf.math.log(small + 0.0 * outputs + 0.0 * y) * outputs**2

    return network(family, loss=loss), *data(np.random.default_rng(5))


def activation_beyond_float16(family, is_cured):
    large = family.keras.initializers.Constant(3e4)
    model = network(
        family,
        hidden="float32" if is_cured else None,
        activation=None,
        rate=2.0**-40,
        bias_initializer=large,
    )
    weights = model.get_weights()
    model.set_weights([weights[0] * 0, weights[1] * 0 + 3e4 * 3, *weights[2:]])
    return model, *data(np.random.default_rng(5))


def fixed_too_high(family, is_cured):
    scale = FixedLossScale(2.0**24, skip_nonfinite=True)
    model = network(family, scale=DynamicLossScale() if is_cured else scale)
    return model, *data(np.random.default_rng(5), 256)


def fixed_and_unchecked(family, is_cured):
    scale = FixedLossScale(2.0**24, skip_nonfinite=is_cured)
    scale = DynamicLossScale() if is_cured else scale
    return network(family, scale=scale), *data(np.random.default_rng(5), 256)


def floor_too_high(family, is_cured):
    least = 1.0 if is_cured else 2.0**20
    scale = DynamicLossScale(2.0**20, min_loss_scale=least)
    return network(family, scale=scale), *data(np.random.default_rng(5), 256)


def infinite_derivative(family, is_cured):
    small = 1e-3 if is_cured else 0.0

    def loss(y, outputs):
        return tf.sqrt(small + (outputs * y) ** 2)

    model = network(family, loss=loss, scale=DynamicLossScale(4.0))
    x, y = data(np.random.default_rng(5))
    return model, x, y * 0


def seam_of_float32(family, is_cured):
    def loss(y, outputs):
        return 2.0**21 * (y - outputs) ** 2

    hidden = "float32" if is_cured else None
    scale = DynamicLossScale(4.0)
    model = network(family, loss=loss, hidden=hidden, rate=1e-12, scale=scale)
    return model, *data(np.random.default_rng(5))


def gradient_beyond_float16(family, is_cured):
    def loss(y, outputs):
        return 2.0**21 * (y - outputs) ** 2

    least = 2.0**-24 if is_cured else 1.0
    scale = DynamicLossScale(4.0, min_loss_scale=least)
    model = network(family, loss=loss, rate=1e-12, scale=scale)
    return model, *data(np.random.default_rng(5), 256)


def weights_that_are_nan(family, is_cured):
    model = network(family)
    if not is_cured:
        first, *others = model.get_weights()
        model.set_weights([first * np.nan, *others])
    return model, *data(np.random.default_rng(5))


ALL = ("infinite derivative", "learning rate", "fixed", "min_loss_scale", "checkpoint")
#: What kills a run -> what the monitor says, what find_nonfinite says, None: it is not
#: asked, and which of `ALL` must not be said.
DEATHS = {
    nan_in_the_data: (
        r"1 step was skipped because the loss was NaN .* at batch 6, counted from 0: l",
        None,
        ALL,
    ),
    nan_hidden_by_relu: (
        r"hidden/kernel is NaN, .*hidden/bias is finite\. So the input .* at batch 6, ",
        None,
        ALL,
    ),
    infinite_target_of_one_output: (
        r"because the loss of output b was inf .* at batch 6, counted from 0: look",
        None,
        ALL,
    ),
    learning_rate: (
        r"too large for float16, as they become where the learning rate is too high",
        None,
        ("infinite derivative", "fixed", "min_loss_scale"),
    ),
    logarithm_of_zero: (
        r"The loss itself \(loss\) is .* a logarithm of zero",
        r"The loss itself is .* in Log, .* a logarithm of zero",
        ("infinite derivative", "fixed", "min_loss_scale", "checkpoint"),
    ),
    activation_beyond_float16: (
        r"The loss itself \(mse\) .*find_nonfinite.* names the layer",
        r"(?s)hidden \(Dense, float16\).*Dense\(..., dtype=\"float32\", name='hidden'",
        ("infinite derivative", "fixed", "min_loss_scale", "checkpoint"),
    ),
    fixed_too_high: (
        r"Most likely the loss scale, which is fixed, is too high.* DynamicLossScale",
        r"no layer is at fault, the loss scale is too high",
        ("learning rate", "min_loss_scale", "checkpoint"),
    ),
    fixed_and_unchecked: (
        r"^Weights that hold inf or NaN: .* checks no gradient.* DynamicLossScale",
        None,
        ("infinite derivative", "learning rate", "min_loss_scale"),
    ),
    floor_too_high: (
        r"Most likely `min_loss_scale` is too high: .* floor, 2\*\*20, .* default is 1",
        r"no layer is at fault, the loss scale is too high",
        ("learning rate", "fixed", "checkpoint"),
    ),
    infinite_derivative: (
        r"The loss scale is 1: .* Either a derivative is infinite, .*find_nonfinite",
        r"Look in the loss for an infinite derivative.* small number to its argument",
        ("fixed", "min_loss_scale", "checkpoint"),
    ),
    seam_of_float32: (
        r"The loss scale is 1: .* too large for float16, .*lossscale\.find_nonfinite",
        r"(?s)hidden \(Dense, float16\): the gradient at its output.*name='hidden'\)",
        ("fixed", "min_loss_scale", "checkpoint"),
    ),
    gradient_beyond_float16: (
        r"The loss scale is 1: .* too large for float16, .*lossscale\.find_nonfinite",
        r"DynamicLossScale\(min_loss_scale=2\.0\*\*-24\)",
        ("fixed", "checkpoint"),
    ),
    weights_that_are_nan: (
        r"Weights that hold inf or NaN: .*hidden/kernel \(NaN\).* No step repairs them",
        r"its weights hold NaN",
        ("infinite derivative", "learning rate", "fixed", "min_loss_scale"),
    ),
}


#: The others' causes are told apart in the same way: they are slow.
QUICK = (nan_in_the_data, infinite_derivative)


def ends_well(model, x, y):
    """Tells whether a fit applies most of its steps, and ends with finite numbers."""
    _, history = told_of(model, x, y, LossScaleMonitor(verbose=0), ROWS)
    steps = len(x) // ROWS
    return (
        history["skipped_steps"][-1] <= steps / 3
        and np.isfinite(history["loss"]).all()
        and all(np.isfinite(weight).all() for weight in model.get_weights())
    )


@pytest.mark.parametrize(
    "death",
    [pytest.param(d, marks=[pytest.mark.slow] * (d not in QUICK)) for d in DEATHS],
    ids=lambda death: death.__name__,
)
def test_the_message_is_true_and_its_advice_helps(family, death):
    says, finds, unsaid = DEATHS[death]
    model, x, y = death(family, is_cured=False)
    monitor = LossScaleMonitor(patience=3, verbose=0)
    messages, _ = told_of(model, x, y, monitor, ROWS)
    found = [each for each in messages if re.search(says, each, re.DOTALL)]
    assert len(found) == 1, messages
    (said,) = found
    first_advice = said.split("If steps are still skipped")[0]
    assert not [text for text in unsaid if text in first_advice]
    assert len(messages) <= 2  # a stall, and the batches with a loss that is not finite
    if finds is not None:
        assert re.search(finds, str(find_nonfinite(model, x[:ROWS], y[:ROWS])))
    assert ends_well(*death(family, is_cured=True))


def test_the_weights_that_failed_are_still_there(family):
    """What shows the layer: raise, and ask with the batch that was named."""
    x, y = data(np.random.default_rng(5))
    model = network(family, activation=None, rate=0.0)
    weights = model.get_weights()
    model.set_weights([weights[0] * 0 + 2.0**12, *weights[1:]])
    x[:] = 1.0
    x[40:] = 8.0  # from batch 10 on
    monitor = LossScaleMonitor(patience=4, on_stall="raise", verbose=0)
    with pytest.raises(FloatingPointError) as stalled:
        told_of(model, x, y, monitor, ROWS)
    batch = int(re.search("the last at batch ([0-9]+),", str(stalled.value))[1])
    rows = slice(ROWS * batch, ROWS * (batch + 1))
    found = find_nonfinite(model, x[rows], y[rows])
    assert 10 <= batch < 16
    assert (found.where, found.layer, found.kind) == ("forward", "hidden", "inf")
