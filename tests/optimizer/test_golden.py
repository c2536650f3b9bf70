"""Every version trains to the same bits, and goes on from what older versions saved."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest
import tensorflow as tf
from installed import families
from limits import TENSORFLOW
from models import checkpoint_of
from routes import read_file

import lossscale

RUN = json.loads((golden.DATA / "run.json").read_text())
#: What versions of TensorFlow wrote, before there were versions of lossscale.
FOLDERS = [
    golden.DATA / "tensorflow-2.4" / "keras2-legacy",
    golden.DATA / "tensorflow-2.15" / "keras2-legacy",
    golden.DATA / "tensorflow-2.15" / "keras2-new",
    golden.DATA / "tensorflow-2.16" / "keras3",
]
#: What versions of lossscale wrote, on the newest TensorFlow that each Keras has.
VERSIONS = [
    golden.DATA / f"lossscale-{version}" / kind
    for version in ("0.1.0", "1.0.0", "1.1.0", "2.0.0", "2.1.0", "3.0.0")
    for kind in golden.MODEL_FILES
]


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


def readable(folders):
    """Yields a family, each of its folders, and what that holds.

    An older Keras need not read what a newer one wrote of its own optimizer.
    """
    for family in families():
        for folder in folders:
            expected = expected_of(folder)
            told = expected.get("tensorflow")
            version = told or folder.parent.name.partition("-")[2].split(".")
            is_older = tuple(map(int, version)) <= TENSORFLOW
            if folder.name == family.name and is_older:
                yield family, folder, expected


def case(family, path, *values):
    """Returns a parameter. Quick tests read files of the first and the last version."""
    folder = path.parts[-3].partition("-")[2]
    marks = [pytest.mark.each_version] * (
        folder in ("1.0.0", "1.1.0", "2.0.0", "2.1.0")
    )
    return pytest.param(
        family, path, *values, id="-".join(path.parts[-3:]), marks=marks
    )


CHECKPOINTS = [
    *(
        case(family, folder / name, half, end)
        for family, folder, expected in readable(FOLDERS)
        for name, (half, end) in expected.items()
    ),
    *(
        case(family, folder / "checkpoint", expected["half"], expected["end"])
        for family, folder, expected in readable(VERSIONS)
    ),
]
FILES = [
    case(family, folder / name, expected["half"], expected["end"])
    for family, folder, expected in readable(VERSIONS)
    for name in golden.MODEL_FILES[family.name]
]
CONFIGS = [
    case(family, folder) for family, folder, _ in readable([*FOLDERS, *VERSIONS])
]


def assert_goes_on(model, half, end):
    def state():
        counters = golden.counters(model.optimizer.loss_scale)
        return golden.state(model, counters[: len(half["scale"])])

    assert state() == half
    golden.fit(model, golden.STEPS // 2, golden.STEPS)
    assert state() == end


@pytest.mark.parametrize(("family", "path", "half", "end"), CHECKPOINTS)
def test_a_checkpoint_of_an_older_version_goes_on(family, path, half, end):
    rule = golden.RULE
    if path.name == "keras":  # its own rule, and its own arguments
        rule = {"increment_period": 4}
    scale = lossscale.DynamicLossScale(2.0, **rule)
    optimizer = lossscale.LossScaleOptimizer(golden.sgd(family), scale)
    model = golden.compiled_model(family, optimizer)
    # It is read before the build, which is the harder way.
    checkpoint_of(model).read(str(path)).expect_partial()
    optimizer.build(model.trainable_variables)
    assert_goes_on(model, half, end)


@pytest.mark.each_version
@pytest.mark.parametrize(("family", "path", "half", "end"), FILES)
def test_a_file_of_an_older_lossscale_goes_on(family, path, half, end):
    model = golden.compiled_model(family, golden.wrapped(family))
    model.optimizer.build(model.trainable_variables)
    assert_goes_on(read_file(family, path, model), half, end)


@pytest.mark.parametrize(("family", "folder"), CONFIGS)
def test_a_config_of_an_older_version_is_understood_and_written(family, folder):
    config = expected_of(folder).get("config")
    config = config or json.loads((folder / "config.json").read_text())
    optimizer = lossscale.LossScaleOptimizer.from_config(config)
    assert isinstance(optimizer, type(golden.wrapped(family)))
    inner = optimizer.inner_optimizer.get_config()
    assert (float(inner["learning_rate"]), inner["momentum"]) == (0.25, 0.5)
    now = json.loads(json.dumps(optimizer.get_config()))
    assert sorted(now) == sorted(config) == ["inner_optimizer", "loss_scale", "name"]
    assert now["name"] == config["name"]
    assert now["loss_scale"] == config["loss_scale"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: "-".join(path.parts[-2:]))
@pytest.mark.parametrize("name", ["lossscale", "keras"])
def test_the_scale_alone_is_restored_by_every_keras(folder, name):
    half, _ = expected_of(folder)[name]
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


@pytest.mark.parametrize("tensorflow", ["2.4", "2.15", "2.16"])
def test_a_checkpoint_of_tensorflows_loss_scale_is_restored(tensorflow):
    scale = lossscale.DynamicLossScale(8.0, 5)
    path = str(golden.DATA / f"tensorflow-{tensorflow}" / "loss_scale")
    tf.train.Checkpoint(scale=scale).read(path).expect_partial()
    assert golden.counters(scale) == [32.0, 2, 0, 0]


def test_a_run_that_lossscale_1_0_0_recorded():
    run = np.load(golden.DATA / "lossscale-1.0.0" / "run.npz")
    assert np.array_equal(run["is_finite"], np.isfinite(golden.specials()))
    scale = lossscale.FixedLossScale(8.0, skip_nonfinite=True)
    found = lossscale.simulate(scale, is_finite=run["is_finite"])
    assert np.array_equal(found.loss_scale, run["loss_scale"])
