"""The examples in docstrings do what they show."""

import doctest
import importlib
import pkgutil

import lossscale

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(lossscale.__path__, "lossscale.")
    if not module.name.endswith(("keras2", "keras3"))
)


def test_the_examples_of_docstrings_do_what_they_show():
    done = {name: doctest.testmod(importlib.import_module(name)) for name in MODULES}
    assert not [name for name, result in done.items() if result.failed]
    assert sum(result.attempted for result in done.values()) >= 12
