"""The presets against the systems they are named after, as PyPI installs them.

`pip install ".[reference]"` brings torch, jmp, flax, mpx and Paddle; Keras and tf_keras
are there anyway. What is not installed is skipped.

"Bit for bit" is `==` on float32. It holds for factors that float32 holds exactly; torch
multiplies by others in float64, and the last bit may differ.
"""

import importlib.util
import json
import os
import sys

import numpy as np
import pytest
from driving import run
from installed import families
from originals import ORIGINALS
from processes import SUPPORT, printed

from lossscale import DynamicLossScale
from lossscale.presets import PRESETS

RUNS = 25
STEPS = 14
FLOAT32_TINY = float(np.finfo(np.float32).tiny)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def is_here(name):
    if name in ("keras3", "tf_keras"):
        start = name.replace("tf_keras", "keras2")
        return any(family.name.startswith(start) for family in families())
    return importlib.util.find_spec(name) is not None


def ask(name, *requests):
    """Returns an original's answers to requests, of parameters and flags, or skips."""
    if not is_here(name):
        pytest.skip(f'{name} is not installed: pip install ".[reference]"')
    asked = json.dumps([{"parameters": p, "flags": flags} for p, flags in requests])
    path = os.pathsep.join(sys.path)
    return json.loads(printed(SUPPORT / "originals.py", name, asked, PYTHONPATH=path))


def preset_of(name, **arguments):
    preset = "tensorflow" if name == "tf_keras" else name
    asked = dict.fromkeys(PRESETS[preset].asks_for, 8.0)
    return DynamicLossScale.from_preset(preset, **{**asked, **arguments})


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


@pytest.mark.parametrize("name", ORIGINALS)
def test_defaults_and_every_run_are_the_originals_bit_for_bit(name):
    rng = np.random.default_rng(11)
    drawn = [draw(rng, name) for _ in range(RUNS)]
    first, *answers = ask(name, ({}, []), *((theirs, f) for theirs, _, f in drawn))
    config, defaults = preset_of(name).get_config(), first["defaults"]
    assert len(defaults) >= 2
    assert {argument: config[argument] for argument in defaults} == defaults
    for (theirs, ours, flags), answer in zip(drawn, answers):
        found = run(preset_of(name, **ours), flags)
        assert found == answer["scales"], (theirs, flags)


# Where a preset leaves its original, as `presets` says


#: A run that leads out of float32: the original, where it begins, the flags, and where
#: theirs and ours end; None if both are the same all the way.
BOUNDS = [
    ("torch", 2.0**126, [True] * 4, None),
    ("jmp", 2.0**126, [True] * 4, None),
    ("flax", 2.0**126, [True] * 4 + [False] * 270, None),
    ("torch", 2.0**-125, [False] * 30, (0.0, FLOAT32_TINY)),
    ("paddle", 2.0**-125, [False] * 30, (0.0, FLOAT32_TINY)),
    ("keras3", 2.0**-125, [False] * 30, (0.0, FLOAT32_TINY)),
    ("paddle", 2.0**126, [True] * 30, (np.inf, 2.0**127)),
    ("keras3", 2.0**126, [True] * 30, (np.inf, 2.0**127)),
]


@pytest.mark.parametrize(("name", "scale", "flags", "ends"), BOUNDS)
def test_where_theirs_has_no_bound_ours_has_one(name, scale, flags, ends):
    period = 0 if name == "flax" else 1
    (answer,) = ask(name, ({"scale": scale, "period": period}, flags))
    ours = {"initial_loss_scale": scale, "increment_period": 1, "backoff_factor": 0.5}
    found, theirs = run(preset_of(name, **ours), flags), answer["scales"]
    assert found == theirs if ends is None else (theirs[-1], found[-1]) == ends
