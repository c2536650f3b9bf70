"""The benchmarks: each runs, in small; and what their figures are worth.

Nothing here looks at a time: machines are as busy as they are.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import runpy
import shlex
import sys
from unittest import mock

import pytest
from benchmark import timing
from installed import ROOT, families
from processes import printed

from lossscale.runtime import kerases

FOLDER = ROOT / "benchmarks"
FIGURE = r"[+-]?\d+\.\d+ ±(\d+\.\d+|\?)"
#: Of each benchmark its smallest run, and what it prints.
SMALL = {
    "step_overhead": (
        "--workloads tiny --inner sgd --modes graph --seconds 0",
        rf"(?m)^ours-legacy +{FIGURE} +{FIGURE} +({FIGURE}|within noise) ",
    ),
    "training_step": (
        "--models tiny --inner sgd --modes graph --dtypes mixed_float16 --processes 1 "
        "--most 1 --seconds 0 --families keras2-new --peaks 1",
        rf"(?m)^\| tiny, SGD, mixed_float16, graph \| tf_keras( \| {FIGURE}){{3}} \| "
        r".*( \| \d+ ±\?){3} \|$",
    ),
    "replicas": ("--replicas 1 --seconds 0", rf"\| 1 \| .*{FIGURE} \(0\) \|"),
    "workers": (
        "--workers 2 --keras keras --kinds bare float16 --layers 1 --units 8 "
        "--rounds 1",
        rf"\| 2 workers, keras, float16 \| .* \| {FIGURE} \| .* \|",
    ),
    "many_workers": (
        "--workers 8 --elements 100 --seeds 2",
        r"(?m)^\| 8 workers, noisy( \| \d\.\de-\d\d){4} \| \d+\.\d% \| \d+\.\d \|$",
    ),
    "update": ("--gradients 'one of 1' --seconds 0", rf"eager +call {FIGURE} ms, ours"),
    "packing": ("--counts 10 --sizes 256 --seconds 0", rf"stacked {FIGURE} ms, "),
    "policies": (
        "--weights -18 --epochs 1 --only Headroom",
        r"(?m)^\| 2\*\*-18 \| .*Headroom.* \| ",
    ),
    "traces": (
        "--workloads tiny --contenders bare ours --traces 5",
        rf"(?m)^\| tiny, sgd \| ours \| {FIGURE} \| {FIGURE} \|$",
    ),
    "simulate": ("--steps 1000 --calls 1", rf"a subclass +limit +{FIGURE} s"),
    "step_graphs": (
        "--modes graph --families keras3 --inner sgd",
        r"scale-apply +sgd +dynamic +\d+ ops +\d+ executed",
    ),
}

#: These arrange TensorFlow's devices.
OWN_PROCESS = {"step_overhead", "step_graphs"}


def test_every_benchmark_is_run():
    programs = [
        path.stem
        for path in FOLDER.glob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    ]
    assert sorted(programs) == sorted(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_it_runs(name, tmp_path, monkeypatch, capsys):
    kerases.imported("tf_keras")
    if kerases.keras3() is None or len(kerases.keras2()) == 0:
        pytest.skip("benchmarks set both Kerases side by side")
    arguments, expected = SMALL[name]
    plain = [] if name in ("step_graphs", "policies", "many_workers") else ["--plain"]
    command = [str(FOLDER / f"{name}.py"), *shlex.split(arguments), *plain]
    if name in OWN_PROCESS:
        answer = run(command, tmp_path)
    else:
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
        try:
            runpy.run_path(command[0], run_name="__main__")
        finally:
            for each in families():
                each.keras.mixed_precision.set_global_policy("float32")
        answer = capsys.readouterr().out
    assert re.search(expected, answer), answer


def run(command, folder):
    """Returns what a benchmark prints as a program."""
    path = os.pathsep.join(sys.path)
    with mock.patch.dict(os.environ, timing.without_keep(), clear=True):
        return printed(*command, cwd=folder, PYTHONPATH=path)


# What a figure is worth


@pytest.mark.parametrize("count", [5, 6, 7, 8, 9, 11, 14])
def test_the_error_is_the_narrowest_that_holds_the_median_with_90_percent(count):
    found = timing.figure(range(count))
    cut = round(found.median - found.error) + 1  # the interval's ends, counted inwards

    def missed(cut):
        # Each value is as likely above the true median as below it.
        below = [sum(each) for each in itertools.product([0, 1], repeat=count)]
        return sum(n < cut or count - n < cut for n in below) / 2**count

    assert missed(cut) <= 0.1 < missed(cut + 1)


def test_of_fewer_than_five_values_nothing_is_sure():
    found = timing.figure([3.0, 3.05, 3.05, 3.1])
    assert found.error == math.inf
    assert found.is_noise
    assert found.shown(2) == "3.05 ±?"
    # One process repeats itself as well as its rounds say.
    assert timing.over_processes([timing.Figure(3.0, 0.2)]) == (3.0, 0.2)
    assert timing.over_processes([timing.Figure(n, 0.2) for n in range(5)]) == (2, 2)


def test_what_is_within_noise_has_no_ratio():
    sure, unsure = timing.Figure(4.0, 0.4), timing.Figure(0.3, 0.4)
    less = timing.Figure(-2.0, 0.1)
    for mine, other in [(unsure, sure), (sure, unsure), (less, sure), (sure, less)]:
        assert timing.shown_ratio(timing.ratio(mine, other)) == "within noise"
    found = timing.ratio(timing.Figure(2.0, 0.2), sure)
    assert found == pytest.approx((0.5, 0.5 * math.hypot(0.1, 0.1)))
    assert timing.shown_ratio(found) == "0.50 ±0.07"


def test_what_does_not_differ_is_called_the_same():
    own, step = timing.Figure(4.0, 0.4), timing.Figure(60.0, 1.0)
    for mine, told in [
        (timing.Figure(2.0, 0.2), "0.50 ±?"),
        (timing.Figure(-2.0, 0.2), "-0.50 ±?"),
        (timing.Figure(0.2, 0.3), "0.05 ±?"),  # noise, and surely less than theirs
        (timing.Figure(3.0, 4.0), "same"),
    ]:
        assert timing.compared([mine], [own]) == told
    unsure = timing.Figure(0.3, 0.4)
    assert timing.compared([timing.Figure(0.5, 0.1)], [unsure]) == "same"
    assert timing.compared([own], [unsure]) == "+3.70 ms"
    faster = timing.Figure(-0.4, 0.1)  # than with nothing added, both of them
    assert timing.compared([faster], [timing.Figure(-0.5, 0.1)]) == "same"
    # A process that is three times as slow is so for both.
    times = [timing.Figure(t, 0.1) for t in (4.0, 4.2, 4.4, 12.0, 4.1)]
    mine = [timing.Figure(t.median / 2, 0.1) for t in times]
    assert timing.compared(mine, times) == "same"  # of each the error is large
    assert timing.compared(mine[:3] * 2, times[:3] * 2) == "0.50 ±0.00"
    # A third of the figure, or of 1.2 ms.
    assert timing.is_sure(timing.Figure(6.0, 2.0), step)
    assert timing.is_sure(timing.Figure(0.1, 0.39), step)
    assert not timing.is_sure(timing.Figure(0.6, 0.5), step)
