"""The examples: what each prints, and that it draws its picture."""

import importlib
import re
import sys

import processes
import pytest
from installed import ROOT, families
from limits import skip_without

EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch):
    """Returns a function that imports an example."""
    skip_without("the pages", families()[0])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture
def printed_by(example, tmp_path, monkeypatch, capsys):
    """Returns a function that runs an example that draws a picture: what it prints."""

    def run(name, *arguments):
        picture = tmp_path / "picture.png"
        monkeypatch.setattr(sys, "argv", [name, "--output", str(picture), *arguments])
        example(name).main()
        assert picture.stat().st_size > 10_000
        return capsys.readouterr().out

    return run


def printed_in_a_process(name, *arguments, **environment):
    """Returns what an example prints as a program."""
    return processes.printed(EXAMPLES / f"{name}.py", *arguments, **environment)


def accuracies(printed):
    """Returns the percentage of each row that begins with a name."""
    rows = re.findall(r"(?m)^(\w.*?) {2,}([\d.]+)%", printed)
    return {name: float(percent) for name, percent in rows}


@pytest.mark.slow
def test_the_whole_example(example, tmp_path):
    assert str(EXAMPLES / "digits.png") == example("digits").PICTURE  # README's
    picture = tmp_path / "digits.png"
    printed = printed_in_a_process("digits", "--output", str(picture))
    accuracy = accuracies(printed)
    assert accuracy["float32"] >= 97
    assert accuracy["float16, dynamic loss scale"] >= 97
    assert accuracy["float16, no loss scaling"] < 90
    assert printed.count("equal: True") == 2
    assert len(printed.splitlines()) < 50  # no progress bars
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_two_workers_end_with_equal_weights():
    options = ["--steps", "40", "--communication-dtype", "float16"]
    lines = printed_in_a_process(
        "multi_worker", *options, TF_USE_LEGACY_KERAS="1"
    ).splitlines()
    assert lines[-1] == "Both workers end with equal weights: True"
    for worker in (0, 1):
        mine = [line[10:] for line in lines if line.startswith(f"worker {worker}: ")]
        assert mine[:2] == [
            "step 5 is skipped, the loss scale is 512",
            "step 9 is skipped, the loss scale is 256",
        ]
        assert mine[3] == "skipped: 2"
        assert float(re.search(r"accuracy: ([\d.]+)%", mine[2])[1]) > 80


@pytest.mark.slow
def test_the_comparison_of_schedules(example, printed_by):
    printed = printed_by("compare_schedules")
    figures = r"^(\S.*?) {2,}(\d+) +(\d+) +([\d.]+) +(\d+) +([\d.]+)$"
    rows = {name: values for name, *values in re.findall(figures, printed, re.M)}
    assert set(rows) == set(example("compare_schedules").schedules())
    page = (ROOT / "docs" / "examples" / "compare-schedules.md").read_text()
    shown = re.findall(r"(?m)^\| ([^|]+?) \| (\d.*) \|$", page)
    assert len(shown) > 10  # those that differ
    assert all(rows[name] == values.split(" | ") for name, values in shown)
    drawn = re.search(r"picture\.png, of (.*)\.", printed).group(1).split(", ")
    assert len(drawn) == 5
    assert {"tensorflow", "fixed at 2**10"} <= set(drawn) <= set(rows)


@pytest.mark.slow
def test_an_optimizer_of_ones_own():
    lines = printed_in_a_process("own_optimizer").splitlines()
    skipped = "step 3 is skipped on every replica, the loss scale is 512"
    ends = "39 of 40 steps applied, weights [ 1. -2.  3.]"
    assert lines[-4:] == [skipped, f"two replicas: {ends}", skipped, f"XLA: {ends}"]


@pytest.mark.slow
def test_a_loss_scale_that_looks_at_the_gradients():
    out = printed_in_a_process("log_normal")
    lost = int(re.search(r"steps_lost=(\d+)", out)[1])
    assert 0 < lost < 20  # of 2,000 steps, about one in 1,000 and those at the start


@pytest.mark.slow
def test_the_forward_ranges_of_a_gated_network(printed_by):
    printed = printed_by("forward_ranges")
    assert "    Multiply(..., dtype=\"float32\", name='product')" in printed
    assert "product (Multiply, float16): inf in Mul" in printed
    accuracy = accuracies(printed)
    assert accuracy["float16, product in float32"] > 95
    assert accuracy["float32"] > 95
    assert accuracy["float16"] < 50


def test_the_gradient_ranges_of_the_digits(printed_by):
    rows = re.findall(r"^all +([\d,]+) .*$", printed_by("gradient_ranges"), re.M)
    assert rows == ["306,340", "306,340"]


@pytest.mark.slow
def test_a_guard_saves_the_run_with_bad_batches(printed_by):
    printed = printed_by("spike_guard")
    skipped = dict(re.findall(r"(?m)^(\w+) +[\d.]+% +(\d+)$", printed))
    accuracy = accuracies(printed)
    assert accuracy["clean"] >= 97
    assert accuracy["guarded"] >= accuracy["clean"] - 0.5
    assert accuracy["unguarded"] < accuracy["clean"] - 5
    (bad,) = re.findall(r"of which (\d+) are bad", printed)
    assert skipped == {"clean": "0", "unguarded": "0", "guarded": bad}
