"""The tests that need an environment of their own: `nox --list` shows them.

`nox` runs what runs at each change, `nox -s weekly` what takes long and rarely fails.
CONTRIBUTING.md has the table of both. The tests run from a copy outside of the
checkout, on an installed lossscale: on the wheel that LOSSSCALE_WHEEL names, or else on
one that is built from the checkout.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
from pathlib import Path
from types import MappingProxyType
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = "CI" in os.environ

# uv compiles nothing, and without this each process of the tests would: ten seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if shutil.which("pyenv"):  # it hides every Python that is not chosen
    _names = subprocess.run(
        ["pyenv", "versions", "--bare"],  # noqa: S607 - the user's own, on PATH
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    os.environ.setdefault("PYENV_VERSION", ":".join(_names))


class Version(NamedTuple):
    """A version of TensorFlow, and what runs on it.

    Attributes:
      python: The Python to run on.
      pins: What is installed before anything else is chosen.
      tests: The tests that run. Empty: all of them.
      env: Environment variables of the tests.
    """

    python: str
    pins: List[str]
    tests: Tuple[str, ...] = ()
    env: Mapping[str, str] = MappingProxyType({})


#: What a version can change: the tables that run every loss scale, every optimizer and
#: every route to disk, and what reads TensorFlow's graphs.
CONFORMANCE = (
    "tests/scales/test_every_loss_scale.py",
    "tests/optimizer/test_loops_in_every_mode.py",
    *("tests/optimizer/test_routes.py", "tests/optimizer/test_persistence.py"),
)

#: What can differ if the same TensorFlow and Keras are only installed in another way:
#: how a Keras is found, and what is looked up by its names.
INSTALLED = (
    *CONFORMANCE,
    *("tests/runtime", "tests/test_public_api.py"),
    *("tests/optimizer/test_forwarding.py", "tests/optimizer/test_keras_arguments.py"),
)

#: What a TensorFlow can change that is between two others which run more. The rest is
#: arithmetic of our own on operations that are as old as TensorFlow 2, or text.
BETWEEN = (
    *CONFORMANCE,
    *("tests/runtime", "tests/provenance", "tests/test_public_api.py"),
    "tests/optimizer/test_pending.py",
    "tests/optimizer/test_overflows.py",
    "tests/optimizer/test_strategies.py",
)

#: Where Keras 2 ends and Keras 3 begins: also what reads what only one of them has.
KERAS = (
    *BETWEEN,
    *("tests/monitor/test_callback.py", "tests/test_examples.py"),
    *("tests/test_pages.py", "tests/optimizer/test_composition.py"),
    *("tests/optimizer/test_keras2.py", "tests/optimizer/test_keras_arguments.py"),
    "tests/optimizer/test_keras_calls.py",
)

# NumPy 2 came after TensorFlow 2.15, and the protobuf of today after 2.8.
_OLDEST = ["tensorflow-cpu==2.4.*", "protobuf<3.21"]

#: What runs at each change, beside README's command: that has the newest TensorFlow.
EACH_CHANGE = {
    "2.4": Version("3.8", _OLDEST, CONFORMANCE),
    "2.15": Version("3.11", ["tensorflow-cpu==2.15.*", "numpy<2"], KERAS),
}

#: What runs each week and before a release.
WEEKLY = {
    "2.4-all": Version("3.8", _OLDEST, ("tests", "--ignore=tests/ranges")),
    "2.8": Version(
        "3.8", ["tensorflow-cpu==2.8.*", "protobuf<3.21", "numpy<2"], BETWEEN
    ),
    "2.10": Version("3.10", ["tensorflow-cpu==2.10.*", "numpy<2"], BETWEEN),
    "2.11": Version("3.10", ["tensorflow-cpu==2.11.*", "numpy<2"], BETWEEN),
    "2.13": Version("3.10", ["tensorflow-cpu==2.13.*", "numpy<2"], BETWEEN),
    "2.16": Version(
        "3.12",
        ["tensorflow-cpu==2.16.*", "keras==3.3.*"],
        (*KERAS, "tests/ranges"),
    ),
    "2.18": Version("3.12", ["tensorflow-cpu==2.18.*", "keras==3.6.*"], BETWEEN),
    "newest": Version("3.13", ["tensorflow-cpu"], INSTALLED),
    # With Keras 2 beside TensorFlow's Keras 3, and in its place.
    "newest-tf_keras": Version("3.13", ["tensorflow-cpu", "tf_keras"]),
    "newest-legacy": Version(
        "3.13",
        ["tensorflow-cpu", "tf_keras"],
        INSTALLED,
        {"TF_USE_LEGACY_KERAS": "1"},
    ),
}


#: What runs on each version: tests/conftest.py says what these marks mean.
QUICK = ["-m", "not slow or each_version"]

#: The heart: the modules that the mutation tool changes, and the tests that see it.
HEART = {
    "lossscale/scales/dynamic.py": (
        "tests/scales/test_dynamic.py",
        "tests/scales/test_reference.py",
        "tests/test_bad_input.py",
        "tests/test_public_api.py",
    ),
    "lossscale/optimizer/reduction.py": (
        "tests/optimizer/test_reduction.py",
        "tests/optimizer/test_looking.py",
        "tests/optimizer/test_strategies.py",
        "tests/optimizer/test_loops_in_every_mode.py",
    ),
    "lossscale/optimizer/step.py": (
        "tests/optimizer/test_loops_in_every_mode.py",
        "tests/optimizer/test_step.py",
        "tests/optimizer/test_overflows.py",
        "tests/optimizer/test_guards.py",
        "tests/optimizer/test_fault_record.py",
        "tests/optimizer/test_strategies.py",
        "tests/scales/test_own.py",
    ),
}

#: What cosmic-ray is told. It changes a comparison to the next one, a sign, a
#: condition, a number, but no operator to each other one: dozens would show the same.
MUTANTS = """
[cosmic-ray]
module-path = ["{file}"]
timeout = 120.0
excluded-modules = []
test-command = "python -m pytest -n 0 -x -q -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
[cosmic-ray.filters.operators-filter]
exclude-operators = [
    "core/ReplaceBinaryOperator_(?!Add_Sub|Sub_Add|Mul_Div|Div_Mul)",
    "core/ReplaceComparisonOperator_(?!Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq)",
    "core/ReplaceUnaryOperator",
    "core/ExceptionReplacer",
    "core/RemoveDecorator",
]
"""

#: What the tests read, the package excepted.
BESIDE = [
    *("tests", "docs", "examples", "benchmarks"),
    *("README.md", "CONTRIBUTING.md", "pyproject.toml", "noxfile.py"),
    *("CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "LICENSE", "SECURITY.md"),
]


def _install(session: nox.Session, pins: List[str], *extras: str) -> None:
    """Installs lossscale, and what some of its extras name, beside what is pinned."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    wanted = [
        each for name in extras for each in project["optional-dependencies"][name]
    ]
    # Keras 2 follows the version of TensorFlow: where it is wanted, it is pinned.
    others = [line for line in wanted if not line.startswith(("tf-keras", "lossscale"))]
    session.install(*pins, *others)
    # Without what it asks for: that is tensorflow, not tensorflow-cpu.
    session.install("--no-deps", os.environ.get("LOSSSCALE_WHEEL", "."))


def _leave_checkout(session: nox.Session, *others: str) -> None:
    """Goes to a copy of the tests, so that only what was installed is imported.

    Args:
      session: The session.
      *others: What is copied besides: with the package, that is imported from there.
    """
    folder = Path(session.create_tmp()) / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in (*BESIDE, *others):
        if Path(name).is_dir():  # the documentation may be built at the same time
            built = shutil.ignore_patterns("__pycache__", "_build")
            shutil.copytree(name, folder / name, ignore=built)
        else:
            shutil.copy(name, folder / name)
    session.chdir(folder)
    if "lossscale" in others:
        return
    # This compiles TensorFlow and Keras, too: once, not in each process of the tests.
    find = "import lossscale; print(lossscale.__file__)"
    found = str(session.run("python", "-c", find, silent=True)).splitlines()[-1]
    if "site-packages" not in found:
        session.error(f"lossscale must be the installed one, got {found}")


def _make_session(name: str, version: Version, **options: Any) -> None:
    @nox.session(name=f"tests-{name}", python=version.python, **options)
    def tests(session: nox.Session) -> None:
        """Runs the tests on one version of TensorFlow."""
        _install(session, version.pins, "test")
        _leave_checkout(session)
        arguments = session.posargs or ["-q", *QUICK]
        session.run("pytest", *arguments, *version.tests, env=dict(version.env))


for _name, _version in EACH_CHANGE.items():
    _make_session(_name, _version)
for _name, _version in WEEKLY.items():
    _make_session(_name, _version, default=False, tags=["weekly"])
# What is to come. Run it now and then: `nox -s tests-nightly`.
_make_session("nightly", Version("3.13", ["tf-nightly-cpu"]), default=False)


def _run_slow(session: nox.Session, tests: str, pins: List[str], extra: str) -> None:
    """Runs the slow ones of some tests, beside what an extra names."""
    _install(session, pins, "test", extra)
    _leave_checkout(session)
    session.run("pytest", "-q", "-n", "0", "-rs", "-m", "slow", tests)


@nox.session(python="3.11", default=False, tags=["weekly"])
def slow(session: nox.Session) -> None:
    """Runs the slow tests on the newest TensorFlow."""
    _install(session, ["tensorflow-cpu", "tf_keras"], "test")
    _leave_checkout(session)
    session.run("pytest", "-q", "-m", "slow", *session.posargs)


@nox.session(python="3.13", default=False, tags=["weekly"])
def browser(session: nox.Session) -> None:
    """Builds the pages, and looks at each in Chromium."""
    _run_slow(session, "tests/test_browser.py", ["tensorflow-cpu"], "docs")


@nox.session(python="3.11", default=False, tags=["weekly"])
def clients(session: nox.Session) -> None:
    """Trains with other people's programs."""
    _run_slow(session, "tests/clients", ["tensorflow-cpu", "tf_keras"], "clients")


@nox.session(python="3.11", default=False, tags=["weekly"])
def trackers(session: nox.Session) -> None:
    """Tests what trackers of experiments store of the monitor's logs."""
    _install(session, ["tensorflow-cpu"], "test", "trackers")
    _leave_checkout(session)
    # A test skips a tracker that cannot be imported: here each of them can.
    names = ("wandb.integration.keras", "mlflow.keras", "dvclive.keras", "aim.keras")
    session.run("python", "-c", f"import {', '.join(names)}")
    tests = "tests/monitor/test_trackers.py"
    session.run("pytest", "-q", "-n", "0", "-m", "slow", *session.posargs, tests)


@nox.session(python="3.11", default=False, tags=["weekly"])
def originals(session: nox.Session) -> None:
    """Compares the presets with the systems that they are named after."""
    tests = "tests/scales/test_originals.py"
    _run_slow(session, tests, ["tensorflow-cpu"], "reference")


@nox.session(python="3.11", default=False, tags=["weekly"])
def mutants(session: nox.Session) -> None:
    """Changes an operator or a number at a time: do the tests of `HEART` see it?

    Without arguments it makes 8 changes in each file, each week others. With files as
    arguments it makes all that there are, which takes ten seconds each.
    """
    _install(session, ["tensorflow-cpu", "tf_keras", "cosmic-ray"], "test")
    _leave_checkout(session, "lossscale")
    chosen = session.posargs or list(HEART)
    env = {"PYTHONPATH": os.getcwd(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    unseen = []
    for number, file in enumerate(chosen):
        tests = " ".join(HEART[file])
        config, found = Path(f"mutants{number}.toml"), f"mutants{number}.sqlite"
        config.write_text(MUTANTS.format(file=file, tests=tests))
        session.run("cosmic-ray", "init", str(config), found)
        session.run("cr-filter-operators", found, str(config))
        if not session.posargs:
            _keep_some(found, 8)
        session.run("cosmic-ray", "baseline", str(config), env=env)
        session.run("cosmic-ray", "exec", str(config), found, env=env)
        session.run("cr-report", "--surviving-only", "--show-diff", found)
        # A change that makes no difference lives: one in four may.
        rate = session.run("cr-rate", found, silent=True)
        if float(str(rate).split()[-1]) > 25.0:
            unseen.append(file)
    if unseen:
        session.error(f"the tests saw too few of the changes: {', '.join(unseen)}")


def _keep_some(path: str, count: int) -> None:
    """Leaves so many changes in a session of cosmic-ray, chosen by chance."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        left = "SELECT job_id FROM work_items EXCEPT SELECT job_id FROM work_results"
        jobs = sorted(job for (job,) in database.execute(left))
        kept = random.sample(jobs, min(count, len(jobs)))
        marks = ", ".join("?" * len(kept))
        for table in ("work_results", "mutation_specs", "work_items"):
            command = f"DELETE FROM {table} WHERE job_id NOT IN ({marks})"  # noqa: S608
            database.execute(command, kept)


@nox.session(default=False)
def weekly(session: nox.Session) -> None:
    """Runs all that is tagged "weekly", one after the other."""
    listed = subprocess.run(
        ["nox", "--list-sessions", "--json", "-t", "weekly"],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for each in json.loads(listed):
        session.notify(each["session"], posargs=())


@nox.session(python="3.11", default=False)
def coverage(session: nox.Session) -> None:
    """Says which lines the quick tests run, with each Keras.

    It writes coverage.json. With another such file as the argument it fails if a file
    of the package is covered less than there, by more than a point.
    """
    session.install("coverage[toml]", ".[test]")
    project, data = Path("pyproject.toml").resolve(), session.create_tmp()
    # With these every Python that starts counts the lines of lossscale that it runs.
    env = {
        "COVERAGE_FILE": str(Path(data).resolve() / "data"),
        "COVERAGE_PROCESS_START": str(project),
    }
    every_keras = "not slow or each_version or other_keras"
    session.run("pytest", "-q", "-m", every_keras, env=env)
    del env["COVERAGE_PROCESS_START"]
    session.run("coverage", "combine", "--quiet", env=env)
    session.run("coverage", "json", "-q", "-o", "coverage.json", env=env)
    session.run("coverage", "report", env=env)
    if session.posargs:
        old, new = map(_percents, (session.posargs[0], "coverage.json"))
        for file in sorted(old.keys() & new.keys()):
            session.log(f"{file}: {old[file]:.1f} % before, {new[file]:.1f} % now")
        lower = [file for file in old.keys() & new.keys() if new[file] < old[file] - 1]
        if lower:
            session.error(f"covered less: {', '.join(sorted(lower))}")


def _percents(path: str) -> Dict[str, float]:
    """Returns how much of each module is covered, by its path within the package."""
    files = json.loads(Path(path).read_text())["files"]
    return {
        name.rpartition("lossscale/")[2]: each["summary"]["percent_covered"]
        for name, each in files.items()
    }


@nox.session(python="3.10", default=False, tags=["weekly"])
def horovod(session: nox.Session) -> None:
    """Builds Horovod, for ten minutes, and tests two ranks of it: before a release."""
    _install(session, ["tensorflow-cpu==2.11.*", "numpy<2"], "test")
    # Its build needs these, and CMake below version 4, which it calls.
    needed = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi", "cmake<4")
    session.install("setuptools<75", "wheel", *needed)
    use = {f"HOROVOD_WITH_{name}": "1" for name in ("GLOO", "TENSORFLOW")}
    use.update({f"HOROVOD_WITHOUT_{n}": "1" for n in ("MPI", "PYTORCH", "MXNET")})
    without = ("--no-build-isolation", "--no-deps", "--no-binary", "horovod")
    session.install(*without, "horovod==0.28.1", env=use)
    _leave_checkout(session)
    marks = ("-n", "0", "-m", "slow or not slow")
    session.run("pytest", "-q", *marks, *session.posargs, "tests/test_horovod.py")
