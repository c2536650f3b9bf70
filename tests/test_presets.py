"""The presets: the table, what it asks for, how it is taken."""

import re

import numpy as np
import pytest
from installed import ROOT

import lossscale
from lossscale import DynamicLossScale
from lossscale.presets import PRESETS

TINY = float(np.finfo(np.float32).tiny)
MAX = float(np.finfo(np.float32).max)
ASKED = {"initial_loss_scale": 4096.0, "increment_period": 7, "hysteresis": 3}
#: The arguments that a row may name, in their order, and its words for them.
COLUMNS = [*DynamicLossScale().get_config()]
NAMES = "start period up down hysteresis cleared floor ceiling"
WORDS = dict(zip(NAMES.split(), COLUMNS))


def page():
    """Returns preset -> what docs/choosing.md says of it, by argument."""
    text = (ROOT / "docs" / "choosing.md").read_text()
    section = text.split("| preset |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)`[^|]*\| (.*) \|$", section, flags=re.MULTILINE)
    return {name: dict(map(difference, cell.split(", "))) for name, cell in rows}


def difference(words):
    """Returns the argument that a part of a row is about, and what the row says."""
    if words == "nothing":
        return "", None
    if words == "no floor":
        return "min_loss_scale", TINY
    first, _, rest = words.replace("cleared ", "").partition(" ")
    if first == "your":
        return WORDS[rest], "yours"
    if first == "at":
        return WORDS["cleared"], set(rest.replace(" steps", "").split(" and "))
    return WORDS[first], rest


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
    asks_for = [column for column in COLUMNS if row.get(column) == "yours"]
    assert list(PRESETS[name].asks_for) == asks_for
    config = DynamicLossScale.from_preset(name, **asked_by(name)).get_config()
    if not asks_for:
        assert lossscale.get(name).get_config() == config
    assert config.get("backoff_cooldown") == BACKOFF_COOLDOWN.get(name)
    searched, _, period = row.get("increment_period", "2000").rpartition(" then ")
    assert config.get("search_period") == (number(searched) if searched else None)
    default = {**DynamicLossScale().get_config(), "increment_period": period}
    default["backoff_factor"] = 1 / config["multiplier"]
    for column in COLUMNS:
        value = config[column]
        said = row.get(column, default[column])
        if column == "increment_period":
            said = period
        if column == "backoff_factor" and value is None:
            value = 1 / config["multiplier"]
        if column == "max_loss_scale" and value == MAX:
            value = None
        if said == "yours":
            assert value == ASKED[column]
        elif column == "hysteresis_reset":  # without hysteresis it makes no difference
            assert config["hysteresis"] == 1 or set(value) == set(said)
        else:
            assert value == (number(said) if isinstance(said, str) else said), column


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


def test_the_migration_row_of_torch_has_its_arguments_and_no_floor():
    page = (ROOT / "docs" / "coming-from" / "pytorch.md").read_text()
    (row,) = re.findall(r"(?m)^\| `GradScaler\(init_scale=S, .*?\)` \| `(.*?)`", page)
    names = {**vars(lossscale), "S": 0.25, "G": 4.0, "B": 0.125, "N": 3}
    config = eval(row, names).get_config()  # noqa: S307 - our own page
    expected = {"initial_loss_scale": 0.25, "multiplier": 4.0, "backoff_factor": 0.125}
    expected.update(increment_period=3, min_loss_scale=TINY)
    assert {**config, **expected} == config
