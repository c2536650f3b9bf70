"""The main job: examples/digits.py, its parts quickly and the whole of it slowly."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parent.parent / "examples" / "digits.py"


@pytest.fixture
def digits(monkeypatch):
    spec = importlib.util.spec_from_file_location("digits", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "EPOCHS", 2)
    return module


def test_resumed_training_ends_where_uninterrupted_training_ends(digits, capsys):
    images, _, labels, _ = digits.load()
    model, recorder = digits.train_and_resume((images, labels))
    printed = capsys.readouterr().out
    assert "All that was saved is equal: True" in printed
    assert "Both ends are equal: True" in printed
    steps = 2 * -(-len(images) // digits.BATCH_SIZE)
    assert len(recorder.scales) == len(recorder.applied) == steps
    assert recorder.applied.count(True) == int(model.optimizer.iterations.numpy())


def test_the_picture_is_drawn(digits, tmp_path):
    recorder = digits.Recorder(None)
    recorder.scales = [2.0**15, 2.0**16, 2.0**15]
    recorder.applied = [True, False, True]
    digits.draw(recorder, np.linspace(-40, -20, 100), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_whole_example(tmp_path):
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
    assert (tmp_path / "digits.png").is_file()
