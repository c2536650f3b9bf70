"""The examples: the parts of digits.py quickly, the whole slowly, and the others."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from installed import ROOT, families
from limits import skip_without

from lossscale import Run

PATH = ROOT / "examples" / "digits.py"


@pytest.fixture
def digits(monkeypatch):
    skip_without("compile(jit_compile=...)", families()[0])
    spec = importlib.util.spec_from_file_location("digits", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "EPOCHS", 2)
    return module


def test_the_picture_is_drawn(digits, tmp_path):
    run = Run(np.array([True, False, True]), 2.0 ** np.array([15, 16, 15]))
    digits.draw(run, np.linspace(-40, -20, 100), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_whole_example(tmp_path):
    skip_without("compile(jit_compile=...)", families()[0])
    answer = subprocess.run(
        [sys.executable, str(PATH), "--output", str(tmp_path / "digits.png")],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    accuracy = {
        title: float(percent)
        for title, percent in re.findall(
            r"^(float.*?) {2,}([\d.]+)%", answer.stdout, re.M
        )
    }
    assert accuracy["float32"] >= 97
    assert accuracy["float16, dynamic loss scale"] >= 97
    assert accuracy["float16, no loss scaling"] < 90
    assert answer.stdout.count("equal: True") == 2
    # The result is in sight: no progress bars, and it is on the last lines.
    assert len(answer.stdout.splitlines()) < 50
    assert all(len(line) < 120 for line in answer.stdout.splitlines())
    assert "float32" in "".join(answer.stdout.splitlines()[-8:])
    assert "since the run has only 440" in answer.stdout
    assert (tmp_path / "digits.png").is_file()


def test_the_picture_goes_where_the_readme_shows_it(digits):
    assert str(PATH.with_suffix(".png")) == digits.PICTURE


MULTI_WORKER = PATH.with_name("multi_worker.py")


def run_multi_worker(*arguments, **environment):
    answer = subprocess.run(
        [sys.executable, str(MULTI_WORKER), "--steps", "40", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return answer.stdout.splitlines()


@pytest.mark.slow
def test_two_workers_end_with_equal_weights():
    options = ["--communication-dtype", "float16"]
    lines = run_multi_worker(*options, TF_USE_LEGACY_KERAS="1")
    assert lines[-1] == "Both workers end with equal weights: True"
    for worker in (0, 1):
        mine = [line[10:] for line in lines if line.startswith(f"worker {worker}: ")]
        assert mine[:2] == [
            "step 5 is skipped, the loss scale is 512",
            "step 9 is skipped, the loss scale is 256",
        ]
        assert mine[3] == "skipped: 2"
        assert float(re.search(r"accuracy: ([\d.]+)%", mine[2])[1]) > 80


def printed_by(name, folder, monkeypatch, capsys, others=()):
    """Runs an example that draws a picture, and returns it and what it printed."""
    monkeypatch.syspath_prepend(str(PATH.parent))  # one imports digits
    path = PATH.with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    picture = folder / "picture.png"
    arguments = [str(path), "--output", str(picture), *others]
    monkeypatch.setattr(sys, "argv", arguments)
    example.main()
    assert picture.stat().st_size > 10_000
    return example, capsys.readouterr().out


@pytest.mark.slow
def test_the_comparison_of_schedules(tmp_path, monkeypatch, capsys):
    given = (tmp_path, monkeypatch, capsys)
    example, printed = printed_by("compare_schedules", *given)
    rows = dict(re.findall(r"^(\S.*?) {2,}(\d+) +\d+ +[\d.]+$", printed, re.M))
    assert set(rows) == set(example.schedules())
    page = (ROOT / "docs" / "examples" / "compare-schedules.md").read_text()
    for name, lost in rows.items():
        assert f"| {name} | {lost} |" in page
    drawn = re.search(r"picture\.png, of (.*)\.", printed).group(1).split(", ")
    assert len(drawn) == 5
    assert {"tensorflow", "fixed at 2**10"} <= set(drawn) <= set(rows)


def test_twenty_blocks(tmp_path, monkeypatch, capsys):
    skip_without("the pages", families()[0])
    _, printed = printed_by("twenty_blocks", tmp_path, monkeypatch, capsys)
    counts = dict(re.findall(r"^(.*): (\d+) of 20 blocks", printed, re.M))
    assert counts == {
        "float32": "20",
        "float16, ScaledBlock": "20",
        "float16, loss scale 2**15": "9",
        "float16, loss scale 1": "5",
    }


@pytest.mark.slow
def test_blocks_draw_the_digits_as_float32_does(tmp_path, monkeypatch, capsys):
    skip_without("the pages", families()[0])
    given = ["--epochs", "3", "--depth", "2", "--weights", str(2.0**-40)]
    _, printed = printed_by("scaled_blocks", tmp_path, monkeypatch, capsys, given)
    lines = re.findall(r"(?m)^2\*\*-40 +(\S.*?) +([\d.]+)$", printed)
    errors = {run: float(error) for run, error in lines}
    assert errors["float16, blocks"] < 1.1 * errors["float32"]
    assert errors["float16, the best single loss scale"] > 1.1 * errors["float32"]


@pytest.mark.slow
@pytest.mark.usefixtures("digits")  # which skips where it cannot run
def test_the_forward_ranges_of_a_gated_network(tmp_path, monkeypatch, capsys):
    _, printed = printed_by("forward_ranges", tmp_path, monkeypatch, capsys)
    assert "    Multiply(..., dtype=\"float32\", name='product')" in printed
    assert "product (Multiply, float16): inf in Mul" in printed
    lines = re.findall(r"^(float\S.*?) +([\d.]+)% +(\d+)$", printed, re.M)
    accuracy = {title: float(percent) for title, percent, _ in lines}
    assert accuracy["float16, product in float32"] > 95
    assert accuracy["float32"] > 95
    assert accuracy["float16"] < 50


@pytest.mark.usefixtures("digits")  # which skips where it cannot run
def test_the_gradient_ranges_of_the_digits(tmp_path, monkeypatch, capsys):
    _, printed = printed_by("gradient_ranges", tmp_path, monkeypatch, capsys)
    rows = re.findall(r"^all +([\d,]+) .*$", printed, re.M)
    assert rows == ["306,340", "306,340"]


@pytest.mark.slow
def test_a_guard_saves_the_run_with_bad_batches(tmp_path, monkeypatch, capsys):
    skip_without("the pages", families()[0])
    _, printed = printed_by("spike_guard", tmp_path, monkeypatch, capsys)
    rows = re.findall(r"(?m)^(\w+) +([\d.]+)% +(\d+)$", printed)
    accuracy = {name: float(percent) for name, percent, _ in rows}
    skipped = {name: int(count) for name, _, count in rows}
    assert accuracy["clean"] >= 97
    assert accuracy["guarded"] >= accuracy["clean"] - 0.5
    assert accuracy["unguarded"] < accuracy["clean"] - 5
    (bad,) = re.findall(r"of which (\d+) are bad", printed)
    assert skipped == {"clean": 0, "unguarded": 0, "guarded": int(bad)}
