"""The fixtures of all tests: one strategy, every Keras that is installed, numbers."""

from __future__ import annotations

import gc
import itertools
import runpy
import zlib
from pathlib import Path

import numpy as np
import pytest
from combinations import beyond_pairs, function_of, is_slow, left_over, rules, words_of
from installed import families, make_strategy
from limits import IS_NEWEST, TENSORFLOW, skip_without
from models import seed_all

from lossscale.runtime import op_callbacks

HERE = Path(__file__).parent
_FAMILIES = [family.name for family in families()]
#: Where a test takes the kind of Keras 2's optimizers that it does not take elsewhere.
OTHER_KIND = [(2, 11), (2, 15)]


def pytest_addoption(parser):
    text = "take for quick what is quick on any version of TensorFlow, not only on this"
    parser.addoption("--quick-on-any", action="store_true", help=text)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at them
def pytest_cmdline_main(config):
    """Runs the tests in a process for each core, if pytest-xdist is here.

    Each takes seconds to start, and a gigabyte. `-n 0` runs all of them in this one.
    """
    option = config.option
    is_worker = hasattr(config, "workerinput")
    if is_worker or not hasattr(option, "numprocesses") or option.dist != "no":
        return
    if option.numprocesses is None:
        option.numprocesses = 0 if option.usepdb or option.collectonly else "auto"
        option.maxprocesses = option.maxprocesses or 8
    if option.numprocesses:
        option.dist = "worksteal"


def pytest_ignore_collect(collection_path, config):
    """Does not even import files without smoke tests, if only those are to run."""
    if config.option.markexpr == "smoke" and collection_path.suffix == ".py":
        said = rules().get(collection_path.relative_to(HERE).as_posix(), ())
        return not any("smoke" in words for _, words in said) or None
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config, items):
    """Leaves to the slow tests what only combines anew what quick ones have.

    Which combinations run where: combinations.py.
    """
    kinds = {}
    for item in items:
        kinds.setdefault(function_of(item), set()).add(_family(item))
    turns = {item: _turn(item, kinds[function_of(item)]) for item in items}
    elsewhere = {item for item in items if turns[item] == 1}
    elsewhere |= {*left_over(item for item in items if turns[item] == 0)}
    elsewhere |= {*filter(_is_compiled_elsewhere, items)}
    config.hook.pytest_deselected(items=list(elsewhere))
    items[:] = [item for item in items if item not in elsewhere]
    slow = {*left_over(item for item in items if turns[item] is None)}
    if IS_NEWEST and not config.getoption("--quick-on-any"):
        is_late = "slow-on-newest"
        slow |= {i for i in items if turns[i] == 0 or is_late in words_of(i)}
    for item in items:
        if item in slow and not is_slow(item):
            item.add_marker(pytest.mark.slow)
        elif "smoke" in words_of(item) and not is_slow(item):
            item.add_marker(pytest.mark.smoke)
    beyond = {*beyond_pairs(items)}
    config.hook.pytest_deselected(items=list(beyond))
    items[:] = [item for item in items if item not in beyond]


_FINISHED = itertools.count(1)


def pytest_collection_finish():
    """Leaves what is imported by now out of each search for garbage: a tenth of all."""
    gc.set_threshold(20_000, 20, 20)
    _freeze()


def pytest_runtest_logfinish():
    """Leaves out what TensorFlow and Keras keep of each 50 tests that have ended, too.

    They keep so much that at the end of all tests one search takes half a second, and
    some tests search twice.
    """
    if next(_FINISHED) % 50 == 0:
        _freeze()


def _freeze():
    gc.collect()
    gc.freeze()


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def _family(item):
    """Returns the name of the kind of optimizers that a test takes, None for none."""
    return getattr(_parameters(item).get("family"), "name", None)


def _is_compiled_elsewhere(item):
    """Tells whether XLA compiles this of another Keras, and that is enough."""
    is_compiled = _parameters(item).get("mode") == "xla"
    is_of_the_first = _family(item) in (None, _FAMILIES[0])
    return "one-xla" in words_of(item) and is_compiled and not is_of_the_first


def _turn(item, kinds):
    """Returns 0 for Keras 2's kind of optimizers that a test takes, 1 for the other.

    None: it is of none, or they are as any: where Keras 2 has one kind, and in a slow
    test. Other tests take one kind, of those that the test has (`kinds`): not the same
    on all versions. Beside Keras 3 that is slow on the newest one. Where nothing asks
    for the kind (`one-keras2`), beside Keras 3 a quick test takes none, and a slow
    test takes one.
    """
    names, family = [name for name in _FAMILIES if name != "keras3"], _family(item)
    if len(names) < 2 or family not in names:
        return None
    words, is_either = words_of(item), "one-keras2" in words_of(item)
    if "every" in words or (is_slow(item) and not is_either):
        return None
    if is_either and not is_slow(item) and "keras3" in _FAMILIES:
        return 1
    there = [name for name in names if name in kinds]
    number = zlib.crc32(function_of(item).encode()) + (TENSORFLOW in OTHER_KIND)
    return int(family != there[number % len(there)])


@pytest.fixture(scope="session")
def mirrored():
    """MirroredStrategy on two CPUs: one for all, a second breaks its collectives.

    Or what LOSSSCALE_TESTS_ON says: "mirrored:4", "central:2".
    """
    return make_strategy()


@pytest.fixture(params=families(), ids=lambda family: family.name)
def family(request):
    """Keras 3, Keras 2's new optimizers, Keras 2's legacy ones: each that is here."""
    yield request.param
    request.param.keras.mixed_precision.set_global_policy("float32")


@pytest.fixture(params=["eager", "graph", "xla"])
def mode(request):
    """How TensorFlow runs what `models.compiled` is given."""
    return request.param


@pytest.fixture
def run(family, tmp_path, monkeypatch):
    """Returns a function that runs a page's program with a Keras: its names come back.

    What it writes is in a folder of its own.
    """
    skip_without("the pages", family)
    monkeypatch.chdir(tmp_path)

    def run(program, **names):
        path = tmp_path / "program.py"  # AutoGraph reads the source of a file
        path.write_text(program.replace("import keras\n", ""))
        seed_all(family.keras)
        return runpy.run_path(str(path), {"keras": family.keras, **names})

    return run


@pytest.fixture(autouse=True)
def _listens_no_longer():
    """Ends what listens to eager mode: garbage does, until it is collected."""
    yield
    op_callbacks._listening.clear()


@pytest.fixture
def rng():
    return np.random.default_rng(7)
