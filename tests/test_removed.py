"""What 3.0 removed says in which release it last was, and what to write instead."""

from __future__ import annotations

import importlib
import importlib.util

import golden
import pytest
from installed import families
from limits import TENSORFLOW

import lossscale
from lossscale import removed

NAMES = [name for name in removed.REMOVED if name.isidentifier()]
FILES = sorted((golden.DATA / "lossscale-2.1.0" / "removed").iterdir())


def told(name):
    return rf"^`{name}` was removed in lossscale 3\.0\. \w"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_to_write(name):
    with pytest.raises(AttributeError, match=told(name)):
        getattr(lossscale, name)
    with pytest.raises(ImportError, match=told(name)):
        __import__("lossscale", fromlist=[name])  # from lossscale import name
    assert not hasattr(lossscale, name)
    assert name not in lossscale.__all__


@pytest.mark.parametrize("module", removed._MODULES)
def test_a_module_says_what_to_write(module):
    with pytest.raises(ImportError, match=told(removed._MODULES[module])):
        importlib.import_module(module)


@pytest.mark.parametrize("module", [*removed._MODULES, "lossscale.never"])
def test_whether_there_is_such_a_module_is_answered(module):
    assert importlib.util.find_spec(module) is None
    assert removed._Finder().find_spec(module) is None


def test_a_name_that_never_was_is_missing_as_in_any_module():
    with pytest.raises(AttributeError, match=r"'lossscale' has no attribute 'Scaled'"):
        lossscale.Scaled  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lossscale.scaled")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_of_2_1_that_names_one_says_it_too(path):
    if TENSORFLOW < (2, 15):
        pytest.skip("TensorFlow 2.15 wrote these files, or a newer one")
    what, _, kind = path.stem.partition("-")
    name = {"block": "ScaledBlock", "scale": "LogNormalLossScale"}[what]
    for family in families():
        if family.name.partition("-")[0] == kind:
            with pytest.raises(ValueError, match=told(name)[1:]):
                family.keras.models.load_model(str(path))


def test_a_config_that_names_one_says_it_too():
    config = {"class_name": "lossscale>LogNormalLossScale", "config": {}}
    for call in (lossscale.get, lossscale.deserialize):
        with pytest.raises(ValueError, match=told("LogNormalLossScale")):
            call(config)
