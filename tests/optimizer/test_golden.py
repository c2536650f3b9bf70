"""Every version trains to the same bits, and goes on from what older versions saved."""

from __future__ import annotations

import itertools
import json

import golden
import numpy as np
import pytest
import tensorflow as tf
from installed import families
from limits import TENSORFLOW

import lossscale

RUN = json.loads((golden.DATA / "run.json").read_text())
EXPECTED = sorted(golden.DATA.glob("tensorflow-*/*/expected.json"))
#: A folder per version and family.
FOLDERS = [path.parent for path in EXPECTED]
SCALES = sorted(golden.DATA.glob("*/loss_scale.index"))


def folder_id(folder):
    return f"{folder.parent.name}-{folder.name}"


@pytest.mark.parametrize(
    ("dtype", "mode"),
    # XLA may keep float16 results in float32, so they have other bits there.
    [("float32", "graph"), ("float32", "xla"), ("float16", "eager")],
)
def test_the_golden_run(family, dtype, mode):
    record = golden.loop(family, dtype, mode)
    expected = RUN[dtype]
    for step, (seen, right) in enumerate(zip(record["steps"], expected["steps"])):
        assert seen == right, f"step {step}"
    assert record == expected


def families_and_their_files():
    """Returns the pairs of a family and a folder: state is of one family only."""
    return [
        pytest.param(family, folder, id=folder_id(folder))
        for family in families()
        for folder in FOLDERS
        if folder.name == family.name and version(folder) <= TENSORFLOW
    ]


def version(folder):
    """Returns the TensorFlow that wrote a folder, as limits.TENSORFLOW."""
    return tuple(int(part) for part in folder.parent.name.split("-")[1].split("."))


with_its_files = pytest.mark.parametrize(
    ("family", "folder"), families_and_their_files()
)


def restored(family, folder, name, optimizer):
    """Returns a model with the state of a checkpoint that was read before its build."""
    model = golden.compiled_model(family, optimizer)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.read(str(folder / name)).expect_partial()
    optimizer.build(model.trainable_variables)
    return model


@with_its_files
@pytest.mark.parametrize("name", ["lossscale", "keras"])
def test_a_checkpoint_of_an_older_version_goes_on(family, folder, name):
    half, end = json.loads((folder / "expected.json").read_text())[name]
    if name == "lossscale":
        scale = lossscale.DynamicLossScale(2.0, **golden.RULE)
    else:  # Keras's own rule, and its own arguments
        scale = lossscale.DynamicLossScale(8.0, 4)
    optimizer = lossscale.LossScaleOptimizer(golden.sgd(family), scale)
    model = restored(family, folder, name, optimizer)

    def read():
        return golden.counters(scale)[: len(half["scale"])]

    assert golden.state(model, read()) == half
    golden.fit(model, golden.STEPS // 2, golden.STEPS)
    assert golden.state(model, read()) == end


@with_its_files
def test_a_config_of_an_older_version_is_understood(family, folder):
    config = json.loads((folder / "config.json").read_text())
    optimizer = lossscale.LossScaleOptimizer.from_config(config)
    current = lossscale.LossScaleOptimizer(
        golden.sgd(family),
        lossscale.DynamicLossScale(2.0**5, **golden.RULE),
        name="mine",
    )
    assert isinstance(optimizer, type(current))
    assert optimizer.name == "mine"
    assert optimizer.loss_scale.get_config() == current.loss_scale.get_config()
    inner = optimizer.inner_optimizer.get_config()
    assert (float(inner["learning_rate"]), inner["momentum"]) == (0.25, 0.5)


@pytest.mark.parametrize("folder", FOLDERS, ids=folder_id)
@pytest.mark.parametrize("name", ["lossscale", "keras"])
def test_the_scale_alone_is_restored_by_every_keras(folder, name):
    half, _ = json.loads((folder / "expected.json").read_text())[name]
    scale = lossscale.DynamicLossScale(2.0, **golden.RULE)
    holder = tf.train.Checkpoint(loss_scale=scale)
    if name == "keras" and folder.name == "keras3":
        # Keras 3's names, at the top of its wrapper.
        holder = tf.train.Checkpoint(
            dynamic_scale=scale.current_loss_scale, step_counter=scale.good_steps
        )
    path = str(folder / name)
    tf.train.Checkpoint(optimizer=holder).read(path).expect_partial()
    assert golden.counters(scale)[: len(half["scale"])] == half["scale"]


@pytest.mark.parametrize("index", SCALES, ids=lambda path: path.parent.name)
def test_a_checkpoint_of_tensorflows_loss_scale_is_restored(index):
    scale = lossscale.DynamicLossScale(8.0, 5)
    path = str(index.with_suffix(""))
    tf.train.Checkpoint(scale=scale).read(path).expect_partial()
    assert golden.counters(scale) == [32.0, 2, 0, 0]


def test_files_of_2_4_and_of_2_15_are_here():
    kept = {folder_id(folder) for folder in FOLDERS}
    assert kept == {
        "tensorflow-2.4-keras2-legacy",
        "tensorflow-2.15-keras2-legacy",
        "tensorflow-2.15-keras2-new",
        "tensorflow-2.16-keras3",
    }


#: Of each version of lossscale a folder per family.
VERSIONS = ("0.1.0", "1.0.0", "1.1.0")


def written():
    """Yields each family's folders that can be read here, and what they must hold."""
    for version, family in itertools.product(VERSIONS, families()):
        folder = golden.DATA / f"lossscale-{version}" / family.name
        expected = json.loads((folder / "expected.json").read_text())
        # An older Keras need not read what a newer one wrote of its own optimizer.
        if tuple(map(int, expected["tensorflow"])) <= TENSORFLOW:
            yield family, folder, expected


with_what_was_written = pytest.mark.parametrize(
    ("family", "folder", "expected"),
    [
        pytest.param(*case, id=f"{case[1].parent.name}-{case[0].name}")
        for case in written()
    ],
)


def written_files():
    """Returns each file of a model with an optimizer that can be read here."""
    found = []
    for family, folder, expected in written():
        names = golden.MODEL_FILES[family.name]
        for name in [*names, *golden.WEIGHTS_FILES.get(family.name, [])]:
            case_id = f"{folder.parent.name}-{family.name}-{name}"
            found.append(pytest.param(family, expected, folder / name, id=case_id))
    return found


def read_file(family, path):
    """Returns a model as a file left it."""
    if ".weights." not in path.name:
        return family.keras.models.load_model(str(path))
    scale = lossscale.DynamicLossScale(2.0**5, **golden.RULE)
    optimizer = lossscale.LossScaleOptimizer(golden.sgd(family), scale)
    model = golden.compiled_model(family, optimizer)
    optimizer.build(model.trainable_variables)
    model.load_weights(str(path))
    return model


@pytest.mark.slow_on_the_newest
@pytest.mark.parametrize(("family", "expected", "path"), written_files())
def test_a_file_of_an_older_lossscale_goes_on(family, expected, path):
    model = read_file(family, path)
    scale = model.optimizer.loss_scale
    assert golden.state(model, golden.counters(scale)) == expected["half"]
    golden.fit(model, golden.STEPS // 2, golden.STEPS)
    assert golden.state(model, golden.counters(scale)) == expected["end"]


@with_what_was_written
def test_a_checkpoint_of_an_older_lossscale_goes_on(family, folder, expected):
    scale = lossscale.DynamicLossScale(2.0, **golden.RULE)
    optimizer = lossscale.LossScaleOptimizer(golden.sgd(family), scale)
    model = restored(family, folder, "checkpoint", optimizer)
    assert golden.state(model, golden.counters(scale)) == expected["half"]
    golden.fit(model, golden.STEPS // 2, golden.STEPS)
    assert golden.state(model, golden.counters(scale)) == expected["end"]


@with_what_was_written
def test_configs_are_those_of_an_older_lossscale(family, folder, expected):
    del folder
    config = expected["config"]
    optimizer = lossscale.LossScaleOptimizer.from_config(config)
    assert type(optimizer) is type(lossscale.LossScaleOptimizer(golden.sgd(family)))
    now = json.loads(json.dumps(optimizer.get_config()))
    assert now["loss_scale"] == config["loss_scale"]
    assert sorted(now) == sorted(config) == ["inner_optimizer", "loss_scale", "name"]


def test_a_run_that_lossscale_1_0_0_recorded():
    run = lossscale.load_run(golden.DATA / "lossscale-1.0.0" / "run.npz")
    assert np.array_equal(run.is_finite, np.isfinite(golden.specials()))
    assert np.array_equal(run.loss_scale, np.full([golden.STEPS], 8.0))
