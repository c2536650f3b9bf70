"""The benchmarks: each runs, in small; and what their figures are worth.

Nothing here looks at a time: machines are as busy as they are.
"""

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

from lossscale.runtime import keras_versions

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
    "monitor": (
        "--models small --choices 'no monitor' monitor --steps 4 --seconds 0",
        rf"(?m)^\| small \| {FIGURE} \| {FIGURE} \|$",
    ),
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
    keras_versions.imported("tf_keras")
    if keras_versions.keras3() is None or len(keras_versions.keras2()) == 0:
        pytest.skip("benchmarks set Keras 2 and Keras 3 side by side")
    arguments, expected = SMALL[name]
    plain = [] if name in ("step_graphs", "policies", "many_workers") else ["--plain"]
    command = [str(FOLDER / f"{name}.py"), *shlex.split(arguments), *plain]
    if name in OWN_PROCESS:
        path = os.pathsep.join(sys.path)
        with mock.patch.dict(os.environ, timing.without_keep(), clear=True):
            answer = printed(*command, cwd=tmp_path, PYTHONPATH=path)
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
