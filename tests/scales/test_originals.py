"""The presets against the systems they are named after, as PyPI installs them.

`pip install ".[reference]"` brings torch, jmp, flax, mpx and Paddle; Keras and tf_keras
are there anyway. What is not installed is skipped. Every run draws its parameters.

"Bit for bit" is `==` on float32. It holds for factors that float32 holds exactly; torch
multiplies by others in float64, and the last bit may differ.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import originals
import pytest
import tensorflow as tf
from driving import run
from installed import families

from lossscale import DynamicLossScale
from lossscale.presets import PRESETS

RUNS = 25
STEPS = 14
FLOAT32_TINY = float(np.finfo(np.float32).tiny)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class TensorFlow:
    """tf.compat.v1.mixed_precision.DynamicLossScale."""

    def __init__(self, scale=2.0**15, growth=2.0, period=2000):
        self.cls = tf.compat.v1.mixed_precision.DynamicLossScale
        self.scaler = self.cls(scale, period, growth)

    def step(self, is_finite):
        self.scaler.update([tf.constant(1.0 if is_finite else np.inf)])
        return float(self.scaler())

    def defaults(self):
        return originals.arguments_of(self.cls)


class Keras2:
    """Keras 2's LossScaleOptimizer."""

    def __init__(self, scale=2.0**15, period=2000):
        keras = next(f.keras for f in families() if f.name.startswith("keras2"))
        self.cls = keras.mixed_precision.LossScaleOptimizer
        self.optimizer = self.cls(
            keras.optimizers.SGD(0.0), initial_scale=scale, dynamic_growth_steps=period
        )
        self.weight = tf.Variable(0.0)

    def step(self, is_finite):
        grad = tf.constant(1.0 if is_finite else np.inf)
        self.optimizer.apply_gradients([(grad, self.weight)])
        return float(self.optimizer.loss_scale)

    def defaults(self):
        module = sys.modules[self.cls.__module__]
        return {
            "initial_loss_scale": module._DEFAULT_INITIAL_SCALE,
            "increment_period": module._DEFAULT_GROWTH_STEPS,
        }


class Keras3:
    """Keras 3's LossScaleOptimizer."""

    def __init__(self, scale=2.0**15, period=2000):
        keras = next(f.keras for f in families() if f.name == "keras3")
        self.cls = keras.optimizers.LossScaleOptimizer
        self.weight = keras.Variable(0.0)
        self.optimizer = self.cls(
            keras.optimizers.SGD(0.0), initial_scale=scale, dynamic_growth_steps=period
        )
        self.optimizer.build([self.weight])

    def step(self, is_finite):
        grad = tf.constant(1.0 if is_finite else np.inf)
        self.optimizer.apply([grad], [self.weight])
        return float(self.optimizer.dynamic_scale.numpy())

    def defaults(self):
        found = originals.arguments_of(self.cls)
        return {
            "initial_loss_scale": found["initial_scale"],
            "increment_period": found["dynamic_growth_steps"],
        }


LOCAL = {"tensorflow": TensorFlow, "tf_keras": Keras2, "keras3": Keras3}
NAMES = [*originals.ORIGINALS, *LOCAL]


def is_here(name):
    if name in ("keras3", "tf_keras"):
        start = name.replace("tf_keras", "keras2")
        return any(family.name.startswith(start) for family in families())
    if name in LOCAL:
        return True
    return importlib.util.find_spec(name) is not None


class Original:
    """Asks one original, in this process or in one of its own."""

    def __init__(self, name):
        self.name = name
        self.process = None
        if name not in LOCAL:
            script = Path(originals.__file__)
            self.process = subprocess.Popen(
                [sys.executable, str(script), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    def ask(self, parameters, flags=()):
        request = {"parameters": parameters, "flags": list(flags)}
        if self.process is None:
            return originals.answer(LOCAL[self.name], request)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run(self, parameters, flags):
        return self.ask(parameters, flags)["scales"]

    def close(self):
        if self.process is not None:
            self.process.communicate()  # its input ends, and so does it


@pytest.fixture(scope="module")
def ask():
    """Returns an original by its name, or skips."""
    started = {}

    def find(name):
        if not is_here(name):
            pytest.skip(f'{name} is not installed: pip install ".[reference]"')
        if name not in started:
            started[name] = Original(name)
        return started[name]

    yield find
    for original in started.values():
        original.close()


def preset_of(name):
    return "tensorflow" if name == "tf_keras" else name


def draw(rng, name):
    """Returns an original's parameters and our arguments, drawn, and a run of flags."""
    growth, backoff = np.float32(rng.uniform(1.1, 5)), np.float32(rng.uniform(0.05, 1))
    theirs = {"scale": float(2.0 ** rng.integers(5, 30)), "growth": float(growth)}
    theirs["period"] = int(rng.integers(1, 5))
    ours = {"initial_loss_scale": theirs["scale"], "multiplier": theirs["growth"]}
    ours["increment_period"] = theirs["period"]
    if name in ("torch", "paddle", "flax"):
        theirs["backoff"] = ours["backoff_factor"] = float(backoff)
    if name == "paddle":
        theirs["bad"] = ours["hysteresis"] = int(rng.integers(1, 4))
    if name == "flax":
        ours["increment_period"] += 1
    if name == "mpx":  # it ends at 65504
        theirs["scale"] = ours["initial_loss_scale"] = float(2.0 ** rng.integers(5, 16))
    if name in ("jmp", "mpx"):
        theirs["growth"] = ours["multiplier"] = int(rng.integers(2, 6))
        theirs["floor"] = ours["min_loss_scale"] = float(2.0 ** rng.integers(-3, 5))
    if name in ("keras3", "tf_keras"):
        del theirs["growth"], ours["multiplier"]
    flags = (rng.random(STEPS) < rng.uniform(0.3, 0.95)).tolist()
    return theirs, ours, flags


@pytest.mark.parametrize("name", NAMES)
def test_every_run_is_the_originals_bit_for_bit(name, ask):
    original, rng = ask(name), np.random.default_rng(11)
    for _ in range(RUNS):
        parameters, arguments, flags = draw(rng, name)
        ours = DynamicLossScale.from_preset(preset_of(name), **arguments)
        expected = original.run(parameters, flags)
        assert run(ours, flags) == expected, (parameters, flags)


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults_are_the_originals(name, ask):
    asked = dict.fromkeys(PRESETS[preset_of(name)].asks_for, 8.0)
    config = DynamicLossScale.from_preset(preset_of(name), **asked).get_config()
    defaults = ask(name).ask({})["defaults"]
    assert len(defaults) >= 2
    assert {argument: config[argument] for argument in defaults} == defaults


class TestDocumentedDifferences:
    """Where a preset leaves its original, as `presets` says."""

    def test_torch_multiplies_in_float64(self, ask):
        # By factors that float32 does not hold: one step is at most one last bit off.
        original, rng, differ = ask("torch"), np.random.default_rng(13), 0
        for _ in range(RUNS):
            scale = float(np.float32(rng.uniform(1, 2**20)))
            growth = float(rng.uniform(1.1, 5))
            parameters = {"scale": scale, "growth": growth, "period": 1}
            (theirs,) = original.run(parameters, [True])
            ours = DynamicLossScale.from_preset(
                "torch", initial_loss_scale=scale, multiplier=growth, increment_period=1
            )
            (found,) = run(ours, [True])
            assert abs(found - theirs) <= np.spacing(np.float32(theirs))
            differ += found != theirs
        assert 0 < differ < RUNS

    @pytest.mark.parametrize(
        ("name", "scale", "flags"),
        [
            ("torch", 2.0**126, [True] * 4),
            ("jmp", 2.0**126, [True] * 4),
            ("flax", 2.0**126, [True] * 4 + [False] * 270),
        ],
    )
    def test_both_stay_within_the_same_bounds(self, name, scale, flags, ask):
        parameters = {"scale": scale, "period": 0 if name == "flax" else 1}
        ours = DynamicLossScale.from_preset(
            name, initial_loss_scale=scale, increment_period=1, backoff_factor=0.5
        )
        assert run(ours, flags) == ask(name).run(parameters, flags)

    @pytest.mark.parametrize(
        ("name", "scale", "flag", "theirs", "ours"),
        [
            ("torch", 2.0**-125, False, 0.0, FLOAT32_TINY),
            ("paddle", 2.0**-125, False, 0.0, FLOAT32_TINY),
            ("keras3", 2.0**-125, False, 0.0, FLOAT32_TINY),
            ("paddle", 2.0**126, True, np.inf, 2.0**127),
            ("keras3", 2.0**126, True, np.inf, 2.0**127),
        ],
    )
    def test_theirs_has_no_bound(self, name, scale, flag, theirs, ours, ask):
        parameters = {"scale": scale, "period": 1}
        assert ask(name).run(parameters, [flag] * 30)[-1] == theirs
        loss_scale = DynamicLossScale.from_preset(
            name, initial_loss_scale=scale, increment_period=1
        )
        assert run(loss_scale, [flag] * 30)[-1] == ours
