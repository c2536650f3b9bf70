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
#: What the table shows: its columns are in the order of the arguments.
COLUMNS = [*DynamicLossScale().get_config()]


def page():
    """Returns preset -> its cells in docs/choosing.md, by argument."""
    text = (ROOT / "docs" / "choosing.md").read_text()
    lines = re.findall(r"^\| `(\w+)`[^|]*\| (.*) \|$", text, flags=re.MULTILINE)
    rows = [(name, re.split(r" *\| *", line)) for name, line in lines]
    return {n: dict(zip(COLUMNS, c)) for n, c in rows if len(c) == len(COLUMNS)}


TABLE = page()
#: For how many steps it does not back off again, which the table does not say.
BACKOFF_COOLDOWN = {"dalle": 125}


def asked_by(name):
    return {argument: ASKED[argument] for argument in PRESETS[name].asks_for}


def test_there_is_no_other():
    assert set(PRESETS) == {*TABLE, "dynamic"}
    assert PRESETS["dynamic"] is PRESETS["tensorflow"]


def number(cell):
    base, _, power = cell.partition("^")
    return float(base) ** float(power or 1)


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name):
    row = TABLE[name]
    asks_for = [column for column in COLUMNS if row[column] == "yours"]
    assert list(PRESETS[name].asks_for) == asks_for
    config = DynamicLossScale.from_preset(name, **asked_by(name)).get_config()
    if not asks_for:
        assert lossscale.get(name).get_config() == config
    assert config.get("backoff_cooldown") == BACKOFF_COOLDOWN.get(name)
    searched, _, row["increment_period"] = row["increment_period"].rpartition(", then ")
    assert config.get("search_period") == (number(searched) if searched else None)
    for column, cell in row.items():
        value = config[column]
        if cell == "yours":
            assert value == ASKED[column]
        elif column == "hysteresis_reset":  # without hysteresis it makes no difference
            assert cell == "-" or set(value) == set(cell.split(", "))
        elif cell in ("1/2", "none", "-"):
            expected = {"1/2": [None], "none": [TINY], "-": [None, MAX]}
            assert value in expected[cell], column
        else:
            assert value == number(cell), column


@pytest.mark.parametrize("name", [n for n in PRESETS if PRESETS[n].asks_for])
def test_what_is_the_callers_is_asked_for(name):
    first = PRESETS[name].asks_for[0]
    for make in (DynamicLossScale.from_preset, lossscale.get):
        with pytest.raises(TypeError, match=f"`{first}` must be given.*{name}.*Write"):
            make(name)


def test_nobody_changes_the_table():
    with pytest.raises(TypeError):
        PRESETS["torch"] = PRESETS["flax"]
    with pytest.raises(TypeError):
        PRESETS["torch"].arguments["hysteresis"] = 2


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
