"""What is done as soon as somebody imports a package, tf_keras above all."""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

import pytest
from installed import families
from models import data, regression
from processes import printed

import lossscale
from lossscale.runtime import keras_versions
from lossscale.runtime.keras_versions import when_imported

ROOT = Path(lossscale.__file__).parents[1]

#: Reads files that tf_keras has written, in a process that did not know of it before.
READER = """
import sys
import keras, lossscale
from lossscale.runtime import keras_versions

assert "tf_keras" not in sys.modules
before = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1))
assert before.get_config() and keras_versions.installed() == [keras]
monitor = lossscale.LossScaleMonitor(verbose=0)
try:
    keras.optimizers.deserialize({"class_name": "unheard", "config": {}})
except ValueError:
    pass
assert "tf_keras" not in sys.modules

import numpy as np, tf_keras

for path in sys.argv[1:]:
    model = tf_keras.models.load_model(path)
    optimizer = model.optimizer
    assert isinstance(optimizer, lossscale.LossScaleOptimizer), path
    assert float(optimizer.loss_scale) == 128.0, path
    x, y = np.ones([32, 6]), np.ones([32, 1])
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[monitor])
    assert int(optimizer.iterations.numpy()) == 6, path
assert isinstance(monitor, tf_keras.callbacks.Callback)
assert type(lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1))) is type(before)
print("read all")
"""


@pytest.mark.slow
def test_files_of_tf_keras_load_whichever_comes_first(tmp_path, rng):
    names = [family.name for family in families()]
    if names != ["keras3", "keras2-legacy", "keras2-new"]:
        pytest.skip("tf_keras is not installed beside Keras 3")
    family, paths = families()[2], []
    x, y = data(rng)
    scale = lossscale.DynamicLossScale(64.0, increment_period=4)
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.Adam(2.0**-4), scale)
    model = regression(family, optimizer)
    model.fit(x, y, batch_size=16, verbose=0)
    for ending in ("keras", "h5"):
        paths.append(str(tmp_path / f"model.{ending}"))
        model.save(paths[-1])
    told = printed("-c", READER, *paths, PYTHONPATH=str(ROOT))
    assert told.endswith("read all\n")


def test_all_that_wait_are_called_once_at_the_end(tmp_path, monkeypatch):
    """At the end of an import that succeeds: a failed one is none."""
    package, broken = "a_package_that_comes_late", tmp_path / "broken"
    (tmp_path / f"{package}.py").write_text(
        f"import os.path\nif os.path.exists({str(broken)!r}):\n"
        "    raise ImportError('broken')\ndone = True\n"
    )
    broken.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    called, before = [], list(sys.meta_path)
    for number in range(3):
        when_imported(
            package, lambda n=number: called.append((n, sys.modules[package].done))
        )
    assert package not in sys.modules
    assert importlib.util.find_spec(package) is not None  # only asked for
    with pytest.raises(ImportError, match="broken"):
        importlib.import_module(package)
    assert called == []
    broken.unlink()
    importlib.import_module(package)
    assert called == [(0, True), (1, True), (2, True)]
    assert sys.meta_path == before  # nothing is left behind
    importlib.reload(sys.modules[package])
    assert len(called) == 3


def test_a_package_that_is_missing_stays_missing(monkeypatch):
    asked = []

    class Asked(importlib.abc.MetaPathFinder):
        def find_spec(self, name, *_):
            asked.append(name)

    monkeypatch.setattr(sys, "meta_path", [Asked(), *sys.meta_path])
    for _ in range(12):  # each asking the others would take hours
        when_imported("no_such_package_anywhere", pytest.fail)
    assert importlib.util.find_spec("no_such_package_anywhere") is None
    assert asked == ["no_such_package_anywhere"] * 2


def test_a_users_subclass_of_kerass_own_wrapper_is_no_generation(family):
    if family.name == "keras3":
        pytest.skip("Keras 3 has one generation")
    before = keras_versions.generations(family.keras)

    class Own(family.keras.mixed_precision.LossScaleOptimizer):
        pass

    assert keras_versions.generations(family.keras) == before
