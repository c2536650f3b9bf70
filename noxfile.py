"""The whole test suite on every TensorFlow from 2.4 to the newest: `nox`.

They run from a copy outside of the checkout, on an installed lossscale: on the wheel
that LOSSSCALE_WHEEL names, or else on one that is built from the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import MappingProxyType
from typing import List, Mapping, NamedTuple, Tuple

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
    """One column of the matrix.

    Attributes:
      python: The Python to run on.
      pins: What is installed before anything else is chosen.
      tests: What is run of the tests. Empty: all of them.
      env: Environment variables of the tests.
    """

    python: str
    pins: List[str]
    tests: Tuple[str, ...] = ()
    env: Mapping[str, str] = MappingProxyType({})


#: What can differ where the same versions of TensorFlow and Keras are only arranged
#: otherwise: how a Keras is found, and what is looked up by its names.
#: "newest-tf_keras" runs all.
ARRANGED = (
    *("tests/runtime", "tests/test_public_api.py", "tests/test_examples.py"),
    *(
        f"tests/optimizer/test_{name}.py"
        for name in ("fit", "forwarding", "keras_arguments", "persistence")
    ),
)

#: What a TensorFlow between two others that run all can change. The rest is arithmetic
#: of our own on operations that are as old as TensorFlow 2, or text.
BETWEEN = (
    *("tests/runtime", "tests/provenance", "tests/test_public_api.py"),
    *(
        f"tests/optimizer/test_{name}.py"
        for name in (
            *("fit", "golden", "overflows", "pending", "persistence"),
            "strategies",
        )
    ),
)

#: Where Keras 2 ends and Keras 3 begins: also what reads what only one of them has.
KERAS = (
    *BETWEEN,
    *("tests/monitor/test_callback.py", "tests/test_examples.py"),
    "tests/test_pages.py",
    *(
        f"tests/optimizer/test_{name}.py"
        for name in ("composition", "keras2", "keras_arguments", "keras_calls")
    ),
)

# The names are also the rows of the table in docs/reliability.md. NumPy 2 came after
# TensorFlow 2.15, and the protobuf of today after 2.8.
MATRIX = {
    "2.4": Version(
        "3.8",
        ["tensorflow-cpu==2.4.*", "protobuf<3.21"],
        # The advice of reports is about layers: 2.16 and the newest try it.
        ("tests", "--ignore=tests/ranges/test_advice.py"),
    ),
    "2.8": Version(
        "3.8", ["tensorflow-cpu==2.8.*", "protobuf<3.21", "numpy<2"], BETWEEN
    ),
    "2.10": Version("3.10", ["tensorflow-cpu==2.10.*", "numpy<2"], BETWEEN),
    "2.11": Version("3.10", ["tensorflow-cpu==2.11.*", "numpy<2"], BETWEEN),
    "2.13": Version("3.10", ["tensorflow-cpu==2.13.*", "numpy<2"], BETWEEN),
    "2.15": Version("3.11", ["tensorflow-cpu==2.15.*", "numpy<2"], KERAS),
    "2.16": Version(
        "3.12",
        ["tensorflow-cpu==2.16.*", "keras==3.3.*"],
        (*KERAS, "tests/ranges"),
    ),
    "2.18": Version("3.12", ["tensorflow-cpu==2.18.*", "keras==3.6.*"], BETWEEN),
    "newest": Version("3.13", ["tensorflow-cpu"], ARRANGED),
    # With Keras 2 beside TensorFlow's Keras 3, and in its place.
    "newest-tf_keras": Version("3.13", ["tensorflow-cpu", "tf_keras"]),
    "newest-legacy": Version(
        "3.13",
        ["tensorflow-cpu", "tf_keras"],
        ARRANGED,
        {"TF_USE_LEGACY_KERAS": "1"},
    ),
}


#: What runs on each version: tests/conftest.py says what these marks mean.
QUICK = ["-m", "not slow or each_version"]

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


def _leave_checkout(session: nox.Session) -> None:
    """Goes to a copy of the tests, so that only what was installed is imported."""
    folder = Path(session.create_tmp()) / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in BESIDE:
        if Path(name).is_dir():  # the documentation may be built at the same time
            built = shutil.ignore_patterns("__pycache__", "_build")
            shutil.copytree(name, folder / name, ignore=built)
        else:
            shutil.copy(name, folder / name)
    session.chdir(folder)
    # This compiles TensorFlow and Keras, too: once, not in each process of the tests.
    find = "import lossscale; print(lossscale.__file__)"
    found = str(session.run("python", "-c", find, silent=True)).splitlines()[-1]
    if "site-packages" not in found:
        session.error(f"lossscale must be the installed one, got {found}")


def _make_session(name: str, version: Version, default: bool = True) -> None:
    @nox.session(name=f"tests-{name}", python=version.python, default=default)
    def tests(session: nox.Session) -> None:
        """Runs the test suite on one version of TensorFlow."""
        _install(session, version.pins, "test")
        _leave_checkout(session)
        arguments = session.posargs or ["-q", *QUICK]
        session.run("pytest", *arguments, *version.tests, env=dict(version.env))


@nox.session(python="3.11", default=False)
def coverage(session: nox.Session) -> None:
    """Says which lines the quick tests run, with each Keras: `nox -s coverage`."""
    session.install("coverage[toml]", ".[test]")
    project, data = Path("pyproject.toml").resolve(), session.create_tmp()
    # With these every Python that starts counts the lines of lossscale that it runs.
    env = {
        "COVERAGE_FILE": str(Path(data).resolve() / "data"),
        "COVERAGE_PROCESS_START": str(project),
    }
    every_keras = ["-m", "not slow or each_version or other_keras"]
    session.run("pytest", *every_keras, *session.posargs, env=env)
    del env["COVERAGE_PROCESS_START"]
    session.run("coverage", "combine", "--quiet", env=env)
    session.run("coverage", "report", env=env)


@nox.session(python="3.11")
def trackers(session: nox.Session) -> None:
    """Tests what trackers of experiments store of the monitor's logs."""
    _install(session, ["tensorflow-cpu"], "test", "trackers")
    _leave_checkout(session)
    # A test skips a tracker that cannot be imported: here each of them can.
    names = ("wandb.integration.keras", "mlflow.keras", "dvclive.keras", "aim.keras")
    session.run("python", "-c", f"import {', '.join(names)}")
    tests = "tests/monitor/test_trackers.py"
    session.run("pytest", "-q", "-n", "0", "-m", "slow", *session.posargs, tests)


for _name, _version in MATRIX.items():
    _make_session(_name, _version)
# What is to come. Run it now and then: `nox -s tests-nightly`.
_make_session("nightly", Version("3.13", ["tf-nightly-cpu"]), default=False)


@nox.session(python="3.10", default=False)
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
