"""`python -m lossscale`: what it says, also where a Keras is missing or broken."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from models import policy_of
from processes import printed

import lossscale
from lossscale.__main__ import main, report, versions
from lossscale.runtime import keras_versions

ROOT = Path(lossscale.__file__).parent.parent


def lines_of(text):
    return dict(line.split(":", 1) for line in text.strip().splitlines() if ":" in line)


def test_it_names_what_is_here_and_each_kerass_policy():
    first, lines = keras_versions.installed()[0], lines_of(report())
    assert lines["lossscale"].strip() == lossscale.__version__
    assert lines["TensorFlow"].strip().startswith(tf.__version__)
    assert lines["NumPy"].strip() == np.__version__
    assert sys.version.split()[0] in lines["Python"]
    assert f"{os.cpu_count()} cores" in lines["CPU"]  # CPU:0
    version = getattr(first, "__version__", None) or versions()["keras"].split()[1]
    assert f"Keras {version.rstrip(',')}" in lines["tf.keras"]
    assert "policy float32" in lines["tf.keras"]
    is_keras3 = keras_versions.is_keras3(first)
    assert ("backend tensorflow" in lines["tf.keras"]) == is_keras3
    with policy_of(first, "mixed_float16"):
        assert "policy mixed_float16" in lines_of(report())["tf.keras"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packages", "error"),
    [(["tf_keras"], AttributeError), (["keras", "tf_keras"], ImportError)],
    ids=["a Keras", "all"],
)
def test_as_a_program_where_a_keras_is_broken(packages, error, tmp_path):
    for name in packages:
        (tmp_path / name).mkdir()
        text = f"raise {error.__name__}('too old')"
        (tmp_path / name / "__init__.py").write_text(text)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    text = printed("-m", "lossscale", PYTHONPATH=path)
    assert all(re.match(r"[\w.]+(:\d)?: +\S", line) for line in text.splitlines())
    lines = lines_of(text)
    assert lines["lossscale"].strip() == lossscale.__version__
    assert lines["CPU"]
    failed = f"cannot be imported: {error.__name__}"
    for name in packages:
        assert lines[name].strip() == f"{failed}: too old"
    assert (failed if "keras" in packages else "Keras") in lines["tf.keras"]


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ([], 0, "TensorFlow:"),
        (["--help"], 0, "bug report"),
        (["--version"], 0, f"lossscale {lossscale.__version__}"),
        (["--bogus"], 2, "unrecognized arguments: --bogus"),
        (["bogus"], 2, "unrecognized arguments: bogus"),
    ],
)
def test_what_is_asked_for_and_what_is_not_known(given, code, says, capsys):
    try:
        found = main(given)
    except SystemExit as error:
        found = error.code
    assert found == code
    printed = capsys.readouterr()
    assert says in (printed.err if code else printed.out)
    assert ("TensorFlow:" in printed.out) == (given == [])


def test_the_page_on_the_command_line_shows_each_line():
    text = (Path(__file__).parents[1] / "docs" / "command-line.md").read_text()
    shown = lines_of(re.search(r"(?ms)^```text\n(.*?)^```", text)[1])
    found = [name for name in lines_of(report()) if not name.startswith("GPU")]
    assert [name for name in shown if not name.startswith("GPU")] == found
    for command in ("python -m lossscale --version", "or: lossscale"):
        assert command in text
