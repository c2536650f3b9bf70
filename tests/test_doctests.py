"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import lossscale

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(lossscale.__path__, "lossscale.")
    if not module.name.endswith(("keras2", "keras3"))
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    modules = map(importlib.import_module, MODULES)
    examples = [e for m in modules for test in finder.find(m) for e in test.examples]
    assert len(examples) >= 12
