"""The presets: the table, what it asks for, how it is taken."""

from __future__ import annotations

import re

import numpy as np
import pytest
from driving import run
from installed import ROOT

import lossscale
from lossscale import DynamicLossScale
from lossscale.presets import PRESETS

TINY = float(np.finfo(np.float32).tiny)
MAX = float(np.finfo(np.float32).max)
ASKED = {"initial_loss_scale": 4096.0, "increment_period": 7, "hysteresis": 3}

#: initial, period, up, down (None: divide by up), hysteresis, reset, floor, ceiling.
#: Without hysteresis what resets it makes no difference. `...`: the caller says.
TABLE = {
    "tensorflow": (2.0**15, 2000, 2, None, 1, None, 1, None),
    "keras3": (2.0**15, 2000, 2, 0.5, 1, None, TINY, None),
    "torch": (2.0**16, 2000, 2, 0.5, 1, None, TINY, None),
    "jmp": (..., 2000, 2, None, 1, None, 1, None),
    "flax": (2.0**16, 2001, 2, 0.5, 1, None, TINY, MAX),
    "apex": (2.0**16, 2000, 2, 0.5, 1, None, TINY, 2.0**24),
    "apex_hysteresis": (..., ..., 2, 0.5, ..., {"good"}, TINY, None),
    "deepspeed": (2.0**16, 1000, 2, None, 2, {"growth"}, 1, None),
    "deepspeed_consecutive": (2.0**16, 1000, 2, None, 2, {"good"}, 1, None),
    "megatron": (2.0**32, 1000, 2, 0.5, 2, {"growth"}, 1, None),
    "colossalai": (2.0**16, 1000, 2, 0.5, 2, {"growth"}, 1, 2.0**32),
    "paddle": (2.0**16, 2000, 2, 0.5, 1, {"good", "backoff"}, TINY, None),
    "contrib": (..., ..., 2, 0.8, 2, {"growth", "backoff"}, 1, None),
    "openseq2seq": (2.0**24, 2000, 2, None, 1, None, 1, 2.0**24),
    "mindspore": (2.0**24, 2000, 2, None, 1, None, 1, None),
    "oneflow": (2.0**16, 2000, 2, None, 1, None, 1, MAX),
    "paddle_static": (2.0**15, 1000, 2, 0.8, 2, {"good", "backoff"}, 1, None),
    "guided_diffusion": (2.0**20, 1, 2**0.001, 0.5, 1, None, TINY, None),
    "nemo": (2.0**16, 2000, 2, 0.5, ..., {"good"}, TINY, None),
    "mpx": (..., 2000, 2, None, 1, None, 1, 65504),
    "mmcv": (2.0**32, 1000, 2, None, 1, None, 1, None),
    "fairseq": (2.0**15, 2000, 2, None, 1, None, 2.0**-13, None),
    "chainer": (1, 1000, 2, 0.5, 1, None, 1, 65504),
    "stylegan2": (2.0**64, 1, 2**0.0005, 0.5, 1, None, TINY, None),
    "director": (1e4, 1001, 2, 0.5, 1, None, 1e-4, 1e4),
    "dalle": (2.0**13, 1, 2**0.001, 2**-0.5, 1, None, 2.0**7, 2.0**24),
}
#: What the page writes as a power of two, though it is no whole one, or as it is.
POWERS = {
    ("guided_diffusion", "multiplier"): "2^0.001",
    ("stylegan2", "multiplier"): "2^0.0005",
    ("dalle", "multiplier"): "2^0.001",
    ("dalle", "backoff_factor"): "2^-0.5",
    ("director", "initial_loss_scale"): "10000",
    ("director", "min_loss_scale"): "0.0001",
    ("director", "max_loss_scale"): "10000",
}
#: For how many steps it does not back off again.
BACKOFF_COOLDOWN = {"dalle": 125}
#: What it is until the first bad step, where it is another.
SEARCH_PERIOD = {"chainer": 1}
COLUMNS = (
    "initial_loss_scale",
    "increment_period",
    "multiplier",
    "backoff_factor",
    "hysteresis",
    "hysteresis_reset",
    "min_loss_scale",
    "max_loss_scale",
)


def asked_by(name):
    return {argument: ASKED[argument] for argument in PRESETS[name].asks_for}


def test_there_is_no_other():
    assert set(PRESETS) == {*TABLE, "dynamic"}
    assert PRESETS["dynamic"] is PRESETS["tensorflow"]


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name):
    row = dict(zip(COLUMNS, TABLE[name]))
    asks_for = [column for column in COLUMNS if row[column] is ...]
    assert list(PRESETS[name].asks_for) == asks_for
    config = DynamicLossScale.from_preset(name, **asked_by(name)).get_config()
    assert config.get("search_period") == SEARCH_PERIOD.get(name)
    assert config.get("backoff_cooldown") == BACKOFF_COOLDOWN.get(name)
    for column, value in row.items():
        if value is ...:
            assert config[column] == ASKED[column]
        elif column != "hysteresis_reset":
            assert config[column] == value, column
        elif value is not None:
            assert set(config[column]) == value


@pytest.mark.parametrize("name", PRESETS)
def test_each_names_its_source(name):
    source = PRESETS[name].source
    assert re.search(r"\d", source), "a version"
    assert re.search(r"[\w/]+\.(py|cu)\b|arXiv \d+\.\d+", source), "a file or a paper"


@pytest.mark.parametrize("name", [n for n in PRESETS if not PRESETS[n].asks_for])
def test_get_takes_a_presets_name(name):
    found = lossscale.get(name).get_config()
    assert found == DynamicLossScale.from_preset(name).get_config()


@pytest.mark.parametrize("name", [n for n in PRESETS if PRESETS[n].asks_for])
def test_what_is_the_callers_is_asked_for(name):
    first = PRESETS[name].asks_for[0]
    for make in (DynamicLossScale.from_preset, lossscale.get):
        with pytest.raises(TypeError, match=f"`{first}` must be given.*{name}.*Write"):
            make(name)


def test_every_argument_can_be_overridden():
    given = {
        "initial_loss_scale": 64.0,
        "increment_period": 3,
        "multiplier": 4.0,
        "backoff_factor": 0.25,
        "hysteresis": 5,
        "hysteresis_reset": ["good"],
        "min_loss_scale": 2.0,
        "max_loss_scale": 128.0,
        "search_period": 9,
        "backoff_cooldown": 8,
        "overflow_tolerance": 0.25,
    }
    for name in PRESETS:
        assert DynamicLossScale.from_preset(name, **given).get_config() == given


def test_an_optimizer_takes_a_presets_name(family):
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(0.1), "megatron")
    assert float(optimizer.loss_scale) == 2.0**32
    assert optimizer.loss_scale.hysteresis == 2


def test_dynamic_is_the_default():
    assert lossscale.get("dynamic").get_config() == DynamicLossScale().get_config()


@pytest.mark.parametrize("name", ["pytorch", "", "Torch"])
def test_unknown_names_are_refused_with_the_known_ones(name):
    with pytest.raises(
        ValueError, match=f"`name` must be one of.*'torch'.*got '{name}'"
    ):
        DynamicLossScale.from_preset(name)
    with pytest.raises(ValueError, match=r"`loss_scale` must be.*'torch'.*got"):
        lossscale.get(name)


def test_a_name_is_a_string():
    with pytest.raises(TypeError, match="`name` must be the name of a preset, got 3"):
        DynamicLossScale.from_preset(3)


def test_nobody_changes_the_table():
    with pytest.raises(TypeError):
        PRESETS["torch"] = PRESETS["flax"]
    with pytest.raises(TypeError):
        PRESETS["torch"].arguments["hysteresis"] = 2


def test_the_page_shows_the_table():
    page = (ROOT / "docs" / "choosing.md").read_text()
    lines = re.findall(r"^\| `(\w+)`[^|]*\| (.*) \|$", page, flags=re.MULTILINE)
    split = [(name, [cell.strip() for cell in line.split("|")]) for name, line in lines]
    rows = [(name, cells) for name, cells in split if len(cells) == len(COLUMNS)]
    assert rows == [
        (name, [shown(name, column) for column in COLUMNS]) for name in TABLE
    ]


def shown(name, column):
    """Returns a cell as the page writes it."""
    value = dict(zip(COLUMNS, TABLE[name]))[column]
    if column == "increment_period" and name in SEARCH_PERIOD:
        return f"{SEARCH_PERIOD[name]}, then {value}"
    if column == "backoff_factor" and value is None:
        return "1/2"
    if isinstance(value, set):
        return ", ".join(n for n in ("good", "growth", "backoff") if n in value)
    if isinstance(value, float) and (name, column) in POWERS:
        return POWERS[name, column]
    words = {...: "yours", None: "-", TINY: "none", MAX: "-", 65504: "65504"}
    if value in words:
        return words[value]
    exact = 0.1 <= value < 2**15
    return f"{value:g}" if exact else f"2^{int(np.log2(value))}"


def torch_rule(scale, period, growth, backoff, flags):
    """Yields torch's scale after each step: `_amp_update_scale_`, torch 2."""
    good = 0
    for flag in flags:
        good = good + 1 if flag else 0
        if not flag:
            scale *= backoff
        elif good == period:
            scale, good = scale * growth, 0
        yield scale


@pytest.mark.parametrize("start", [2.0**16, 1.0, 0.25])
def test_the_migration_row_of_torch_is_equal_below_one_too(start):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    rows = re.findall(
        r"(?m)^\| `GradScaler\(init_scale=S, .*?\)` \| `(.*?)`",
        "".join(page.read_text() for page in pages if "_build" not in page.parts),
    )
    names = {"S": start, "G": 4.0, "B": 0.25, "N": 3}
    flags = [False, False, True, True, True, True, False] * 3
    expected = list(torch_rule(start, 3, 4.0, 0.25, flags))
    assert rows
    for row in rows:
        written = eval(row, {**vars(lossscale), **names})  # noqa: S307 - our own page
        assert run(written, flags) == expected
