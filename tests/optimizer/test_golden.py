"""Every version trains to the same bits, and goes on from what older versions saved."""

from __future__ import annotations

import json
import zipfile

import golden
import pytest
import tensorflow as tf
from installed import families
from limits import TENSORFLOW
from models import checkpoint_of, scale_state
from routes import read_file

import lossscale

RUN = json.loads((golden.DATA / "run.json").read_text())
#: Checkpoints of Keras's own wrappers, by the version of TensorFlow that wrote them.
FOLDERS = [
    golden.DATA / "tensorflow-2.4" / "keras2-legacy",
    golden.DATA / "tensorflow-2.15" / "keras2-legacy",
    golden.DATA / "tensorflow-2.15" / "keras2-new",
    golden.DATA / "tensorflow-2.16" / "keras3",
]
RELEASE = golden.DATA / "lossscale-3.1.0"


@pytest.mark.parametrize(
    ("dtype", "mode"),
    # XLA may keep float16 results in float32, so they have other bits there.
    [
        ("float32", "graph"),
        pytest.param("float32", "xla", marks=pytest.mark.each_version),
        ("float16", "eager"),
    ],
)
def test_the_golden_run(family, dtype, mode):
    record = golden.loop(family, dtype, mode)
    expected = RUN[dtype]
    for step, (seen, right) in enumerate(zip(record["steps"], expected["steps"])):
        assert seen == right, f"step {step}"
    assert record == expected


def expected_of(folder):
    return json.loads((folder / "expected.json").read_text())


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
def test_a_checkpoint_of_keras_own_wrapper_goes_on(family, folder):
    half, end = expected_of(folder)["keras"]
    scale = lossscale.DynamicLossScale(2.0, increment_period=4)
    optimizer = lossscale.LossScaleOptimizer(golden.sgd(family), scale)
    model = golden.compiled_model(family, optimizer)
    # It is read before the build, which is the harder way.
    checkpoint_of(model).read(str(folder / "keras")).expect_partial()
    optimizer.build(model.trainable_variables)
    assert golden.state(model, golden.counters(scale)[:2]) == half
    golden.fit(model, golden.STEPS // 2, golden.STEPS)
    assert golden.state(model, golden.counters(scale)[:2]) == end


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: "-".join(path.parts[-2:]))
def test_the_scale_alone_is_restored_by_every_keras(folder):
    half, _ = expected_of(folder)["keras"]
    scale = lossscale.DynamicLossScale(2.0, **golden.RULE)
    holder = tf.train.Checkpoint(loss_scale=scale)
    if folder.name == "keras3":  # Keras 3's names, at the top of its wrapper
        holder = tf.train.Checkpoint(
            dynamic_scale=scale.current_loss_scale, step_counter=scale.good_steps
        )
    path = str(folder / "keras")
    tf.train.Checkpoint(optimizer=holder).read(path).expect_partial()
    assert golden.counters(scale)[:2] == half["scale"]


@pytest.mark.parametrize("tensorflow", ["2.4", "2.15", "2.16"])
def test_a_checkpoint_of_tensorflows_loss_scale_is_restored(tensorflow):
    scale = lossscale.DynamicLossScale(8.0, 5)
    path = str(golden.DATA / f"tensorflow-{tensorflow}" / "loss_scale")
    tf.train.Checkpoint(scale=scale).read(path).expect_partial()
    assert golden.counters(scale) == [32.0, 2, 0, 0]


# What 3.1.0 has written, on TensorFlow 2.21: an older Keras need not read its files.

#: How a file is read.
ROUTES = ["checkpoint", "config", "model", "weights"]


def read(family, route, kind, make, folder):
    """Returns a model with what 3.1.0 wrote, or skips the test."""
    home = RELEASE / f"{family.name}-{kind}"
    file = home / golden.MODEL_FILES[family.name]
    if route == "config":
        config = expected_of(home)["config"]
        optimizer = lossscale.LossScaleOptimizer.from_config(config)
        return golden.compiled_model(family, optimizer)
    model = golden.compiled_model(family, make(family))
    if route == "checkpoint":  # before the build
        return read_file(family, home / route, model)
    if TENSORFLOW < (2, 21):
        pytest.skip("a file of a newer Keras")
    if route == "model":
        return family.keras.models.load_model(str(file))
    if file.suffix != ".keras":
        pytest.skip("such files hold nothing of legacy optimizers")
    model.optimizer.build(model.trainable_variables)
    with zipfile.ZipFile(file) as whole:
        whole.extract("model.weights.h5", folder)
    before = scale_state(model.optimizer)
    try:
        model.load_weights(str(folder / "model.weights.h5"))
    except ValueError:
        assert scale_state(model.optimizer) == before
        raise
    return model


@pytest.mark.every
@pytest.mark.parametrize("route", ROUTES)
def test_what_3_1_0_wrote_goes_on(family, tmp_path, route):
    expected = expected_of(RELEASE / f"{family.name}-skip")
    model = read(family, route, "skip", golden.wrapped, tmp_path)
    config = json.loads(json.dumps(model.optimizer.get_config()))
    assert config["loss_scale"] == expected["config"]["loss_scale"]
    assert config["nonfinite_loss"] == "skip"
    if route == "config":
        return
    model.optimizer.build(model.trainable_variables)
    assert golden.state(model) == expected["half"]
    golden.fit(model, golden.STEPS // 2, golden.STEPS)
    assert golden.state(model) == expected["end"]


def guarded(family):
    guard = lossscale.SpikeGuard(window=3)
    scale = golden.rule(search_period=1)
    return lossscale.LossScaleOptimizer(golden.sgd(family), scale, guard=guard)


@pytest.mark.every
@pytest.mark.parametrize("make", [guarded, golden.wrapped])
@pytest.mark.parametrize("route", ROUTES)
def test_a_loss_scale_that_held_another_one_is_refused(family, tmp_path, route, make):
    told = r"3\.1\.0 with a loss scale that held another(.|\n)*guard="
    with pytest.raises(ValueError, match=told):
        read(family, route, "guard", make, tmp_path)


def test_a_refused_checkpoint_changes_nothing(family):
    path = str(RELEASE / f"{family.name}-guard" / "checkpoint")
    model = golden.compiled_model(family, guarded(family))
    model.optimizer.build(model.trainable_variables)
    golden.fit(model, 0, 9)
    before = golden.state(model)
    # Of one more: its parts are looked at as soon as TensorFlow reaches them.
    for holder in (
        checkpoint_of(model),
        tf.train.Checkpoint(
            optimizer=tf.train.Checkpoint(loss_scale=model.optimizer.guard)
        ),
    ):
        with pytest.raises(ValueError, match="held another one"):
            holder.read(path)
    after = golden.state(model)
    if TENSORFLOW < (2, 11):  # 2.4 restores a legacy optimizer's slots before the rest
        after.pop("momentum"), before.pop("momentum")
    assert after == before
