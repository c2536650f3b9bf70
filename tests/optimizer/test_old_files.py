"""Runs go on from what 3.1.0 has saved, and Keras's and TensorFlow's loss scales.

Their numbers are so simple that no order of summation can change a bit.

* tests/data/lossscale-3.1.0/ was written by 3.1.0 on TensorFlow 2.21, with Keras 3.15,
  after the first half of `fit`: of a run with nonfinite_loss="skip", and of one with
  its SpikeGuard, which held a loss scale.
* tests/data/tensorflow-X.Y/ holds checkpoints of Keras's own wrappers at that step, and
  of TensorFlow's loss scale, written by TensorFlow 2.4, 2.15 and, with Keras 3.3, 2.16.
"""

import json
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from installed import ROOT, families
from limits import TENSORFLOW
from models import checkpoint_of, optimizer_state

from lossscale import DynamicLossScale, LossScaleOptimizer, SpikeGuard

DATA = ROOT / "tests" / "data"
STEPS = 60
#: The steps at which a gradient is infinite on purpose, and one at which it is NaN.
BAD = {7: np.inf, 8: -np.inf, 20: np.nan, **dict.fromkeys(range(33, 39), np.inf)}
RULE = {
    "increment_period": 4,
    "multiplier": 4.0,
    "backoff_factor": 0.5,
    "hysteresis": 2,
    "hysteresis_reset": ["growth", "backoff"],
    "min_loss_scale": 2.0,
    "max_loss_scale": 2.0**18,
}


def model_of(family, optimizer):
    """Returns a model of one weight."""
    keras = family.keras
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(optimizer, loss=keras.losses.MeanSquaredError())
    return model


def wrapped(family, loss_scale, **options):
    inner = family.optimizers.SGD(0.25, momentum=0.5)
    return LossScaleOptimizer(inner, loss_scale, **options)


def as_in_3_1_0(family, **options):
    """Returns a model with the optimizer whose state the files of 3.1.0 hold."""
    scale = DynamicLossScale(2.0**5, **RULE, search_period=1)
    return model_of(family, wrapped(family, scale, name="mine", **options))


def fit(model, first, last):
    """Trains on the batches of some steps, of one row each."""
    specials = np.float32([BAD.get(step, 1.0) for step in range(STEPS)])
    x = np.full([STEPS, 1], 0.5, np.float32) * specials[:, None]
    y = ((np.arange(STEPS)[:, None] * 37) % 64 - 32).astype(np.float32) / 16
    model.fit(x[first:last], y[first:last], batch_size=1, shuffle=False, verbose=0)


def listed(value):
    return np.asarray(value, np.float64).ravel().tolist()


def state(model, *of_the_scale):
    """Returns all that must be as it was, or of the loss scale what is named."""
    weights, engine = model.trainable_variables[0], model.optimizer.engine
    own = [*engine.loss_scale.variables, *engine._saved().values()]
    scale = {v.name.split(":")[0]: listed(v.numpy()) for v in own}
    *_, momentum = optimizer_state(model.optimizer, [weights])
    if of_the_scale:
        scale = [scale[name][0] for name in of_the_scale]
    weights, momentum = listed(weights.numpy()), listed(momentum)
    return {"scale": scale, "weights": weights, "momentum": momentum}


def expected_of(folder):
    return json.loads((folder / "expected.json").read_text())


# Checkpoints of Keras and TensorFlow.

FOLDERS = [
    DATA / "tensorflow-2.4" / "keras2-legacy",
    DATA / "tensorflow-2.15" / "keras2-legacy",
    DATA / "tensorflow-2.15" / "keras2-new",
    DATA / "tensorflow-2.16" / "keras3",
]
SCALE = ("current_loss_scale", "good_steps")


def readable():
    """Yields each family and a folder of its kind of optimizers.

    An older Keras need not read what a newer one wrote of its own optimizer.
    """
    for family in families():
        for folder in FOLDERS:
            version = folder.parent.name.partition("-")[2].split(".")
            is_older = tuple(map(int, version)) <= TENSORFLOW
            if folder.name == family.name and is_older:
                yield pytest.param(family, folder, id="-".join(folder.parts[-2:]))


@pytest.mark.parametrize(("family", "folder"), [*readable()])
def test_a_run_goes_on_from_a_checkpoint_of_keras_own_wrapper(family, folder):
    half, end = expected_of(folder)["keras"]
    model = model_of(family, wrapped(family, DynamicLossScale(2.0, 4)))
    # It is read before the build, which is the harder way.
    checkpoint_of(model).read(str(folder / "keras")).expect_partial()
    model.optimizer.build(model.trainable_variables)
    assert state(model, *SCALE) == half
    fit(model, STEPS // 2, STEPS)
    assert state(model, *SCALE) == end


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: "-".join(path.parts[-2:]))
def test_every_loss_scale_in_a_checkpoint_is_restored_by_every_keras(folder):
    """Keras's, and TensorFlow's in the folder above."""
    keras, tensorflow = DynamicLossScale(2.0, 4), DynamicLossScale(8.0, 5)
    holder = tf.train.Checkpoint(loss_scale=keras)
    if folder.name == "keras3":  # Keras 3's names, at the top of its wrapper
        names = {"dynamic_scale": keras.current_loss_scale}
        holder = tf.train.Checkpoint(**names, step_counter=keras.good_steps)
    for name, held in (
        ("keras", {"optimizer": holder}),
        ("../loss_scale", {"scale": tensorflow}),
    ):
        tf.train.Checkpoint(**held).read(str(folder / name)).expect_partial()
    state_of = lambda s: [float(s), int(s.good_steps.numpy())]  # noqa: E731
    assert state_of(keras) == expected_of(folder)["keras"][0]["scale"]
    assert state_of(tensorflow) == [32.0, 2]


# Files of 3.1.0. An older Keras need not read those of a newer one.


def read(family, route, kind, model, folder):
    """Returns a model with what 3.1.0 wrote, or skips the test."""
    home = DATA / "lossscale-3.1.0" / f"{family.name}-{kind}"
    file = home / ("model.h5" if family.name == "keras2-legacy" else "model.keras")
    if route == "checkpoint":  # before the build
        checkpoint_of(model).read(str(home / route)).expect_partial()
        return model
    if route == "config":
        return LossScaleOptimizer.from_config(expected_of(home)["config"])
    if TENSORFLOW < (2, 21):
        pytest.skip("a file of a newer Keras")
    if route == "model":
        return family.keras.models.load_model(str(file))
    if file.suffix != ".keras":
        pytest.skip("such files hold nothing of legacy optimizers")
    model.optimizer.build(model.trainable_variables)
    with zipfile.ZipFile(file) as whole:
        whole.extract("model.weights.h5", folder)
    model.load_weights(str(folder / "model.weights.h5"))
    return model


@pytest.mark.every
@pytest.mark.parametrize("route", ["checkpoint", "model"])
def test_a_run_goes_on_from_what_3_1_0_wrote(family, tmp_path, route):
    expected = expected_of(DATA / "lossscale-3.1.0" / f"{family.name}-skip")
    model = as_in_3_1_0(family, nonfinite_loss="skip")
    model = read(family, route, "skip", model, tmp_path)
    config = json.loads(json.dumps(model.optimizer.get_config()))
    assert config["loss_scale"] == expected["config"]["loss_scale"]
    assert config["nonfinite_loss"] == "skip"
    model.optimizer.build(model.trainable_variables)
    assert state(model) == expected["half"]
    fit(model, STEPS // 2, STEPS)
    assert state(model) == expected["end"]


@pytest.mark.parametrize("has_guard", [True, False], ids=["guard", "none"])
@pytest.mark.parametrize("route", ["checkpoint", "config", "model", "weights"])
def test_what_3_1_0_wrote_of_a_loss_scale_that_held_another_one_is_refused(
    family, tmp_path, route, has_guard
):
    model = as_in_3_1_0(family, guard=SpikeGuard(window=3) if has_guard else None)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.loss_scale.adjust(False)
    before = state(model)
    told = r"3\.1\.0 with a loss scale that held another(.|\n)*guard="
    with pytest.raises(ValueError, match=told):
        read(family, route, "guard", model, tmp_path)
    after = state(model)
    if route == "weights" or TENSORFLOW < (2, 11):
        # Keras reads the layers' weights first, and 2.4 the slots of legacy optimizers.
        before, after = before["scale"], after["scale"]
    assert after == before
