"""The fixtures of all tests: one strategy, every Keras that is installed, numbers."""

import gc
import itertools
import runpy
import zlib
from collections import defaultdict

import numpy as np
import pytest
from _pytest.mark import deselect_by_keyword
from combinations import covering
from installed import families, make_strategy
from limits import skip_without
from models import seed_all

from lossscale.runtime import op_callbacks

FIRST = families()[0]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at them
def pytest_cmdline_main(config):
    """Runs the tests in a process for each core, if pytest-xdist is here.

    Each takes seconds to start, and a gigabyte. `-n 0` runs all of them in this one, as
    smoke tests are: to start a second process takes as long as half of them.
    """
    option = config.option
    is_worker = hasattr(config, "workerinput")
    if is_worker or not hasattr(option, "numprocesses") or option.dist != "no":
        return
    if option.numprocesses is None:
        is_one = option.usepdb or option.collectonly or option.markexpr == "smoke"
        option.numprocesses = 0 if is_one else "auto"
        option.maxprocesses = option.maxprocesses or 8
    if option.numprocesses:
        option.dist = "worksteal"


def pytest_ignore_collect(collection_path, config):
    """Does not even import files without smoke tests, if only those are to run."""
    if config.option.markexpr == "smoke" and collection_path.suffix == ".py":
        return "mark.smoke" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config, items):
    """Chooses combinations of each test's parameters, and when they run.

    Quick tests have each value of each parameter once, with the first Keras. Slow ones
    have so many more that any two values meet, and one combination with another Keras,
    in turn. `every` keeps all combinations, and to `each_keras` a Keras is a parameter
    like others. XLA compiles no smoke test: it takes long.

    A slow test runs, too, if the command line names it: by an id, or a file and -k.
    """
    firsts = {}
    for item in items:
        if _is_of_first_keras(item):
            firsts.setdefault(_test_of(item), _family_of(item))
    if config.option.keyword:
        # Not public. pytest itself looks at -k after this hook.
        deselect_by_keyword(items, config)
    functions, chosen = defaultdict(list), set()
    for item in items:
        if item.get_closest_marker("each_version"):
            item.add_marker(pytest.mark.slow)
        is_first = firsts.get(_test_of(item)) == _family_of(item)
        is_first = is_first or item.get_closest_marker("each_keras") is not None
        functions[_test_of(item), is_first].append(item)
    for (name, is_first), tests in functions.items():
        few = tests
        quick = [test for test in tests if not test.get_closest_marker("slow")]
        if not tests[0].get_closest_marker("every"):
            quick = covering(quick, 1)
            turn = zlib.crc32(name.encode()) % len(tests)
            few = covering(tests, 2, quick) if is_first else [tests[turn]]
        chosen.update(few)
        for test in few:
            is_quick = is_first and test in quick
            if not is_first:
                test.add_marker(pytest.mark.other_keras)
            if not is_quick:
                test.add_marker(pytest.mark.slow)
            if not is_quick or "xla" in test.name:
                test.own_markers[:] = [m for m in test.own_markers if m.name != "smoke"]
    names = "::" if not config.option.keyword else ".py"
    if config.option.markexpr == "not slow" and any(names in a for a in config.args):
        config.option.markexpr = ""
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _test_of(item):
    return item.nodeid.partition("[")[0]


def _family_of(item):
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return given.get("family", FIRST)


def _is_of_first_keras(item):
    """Whether a test runs with the first Keras, whichever of its optimizers it takes.

    Those that take one kind for each Keras take the new ones of Keras 2.
    """
    return getattr(_family_of(item), "keras", None) is FIRST.keras


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
