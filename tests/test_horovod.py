"""Horovod as it is built: `nox -s horovod` builds it, and runs these on two ranks.

Elsewhere Horovod is not installed. It is 0.28.1 with gloo, which knows Keras 2 only.
"""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pages
import pytest
from installed import ROOT
from processes import SUPPORT, logs, started

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None,
        reason="Horovod is not installed: nox -s horovod",
    ),
]
#: What is said of what cannot be right, by its name in horovod_ranks.py.
REFUSED = {
    "passes": r"`backward_passes_per_step` must be 1 .* got 2\. Add unscaled",
    "v1 passes": r"`backward_passes_per_step` must be 1 .* got 2\. Add unscaled",
    "around ours": r"must not wrap a LossScaleOptimizer, .*hvd\.DistributedOptimizer\(",
    "around ours, new": r"must not wrap a LossScaleOptimizer",
    "communication": r"sums them with Horovod.*compression=hvd\.Compression\.fp16",
    "allgather of a vector": r"of shape \[None, 4\].*got float32 of shape \(None,\)",
    "allreduce": r"of shape \[None, 4\].*got float32 of shape \(4,\)\. Write gather=",
    "not a function": r"`gather` must be a function, got <module 'horovod",
}


def on_two_ranks(folder, *command):
    """Runs a program on two ranks, and returns what both print."""
    runner = Path(sys.executable).with_name("horovodrun")
    horovodrun = [runner, "-np", "2", "-H", "localhost:2", "--gloo"]
    horovodrun += ["--network-interface", "lo", sys.executable, *command]
    path = os.pathsep.join(map(str, (SUPPORT, ROOT)))
    with started([horovodrun], folder, 500, [{"PYTHONPATH": path}]) as (process,):
        printed = process.stdout.read()
        assert process.wait() == 0, logs(folder) + printed[-3000:]
    return printed


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Returns what both ranks tell of all cases, which run in the same processes."""
    folder = tmp_path_factory.mktemp("ranks")
    on_two_ranks(folder, SUPPORT / "horovod_ranks.py", folder)
    one, other = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    assert one == other  # weights, counters and reports, after each case
    return one


def test_each_case_is_right_or_refused(told):
    assert len(told["cases"]) >= 100
    for case, answer in told["cases"].items():
        if case.endswith("not agreed"):
            assert "Pass gather=lambda x: hvd.allgather(x[tf.newaxis])" in answer, case
        else:
            (*state, reports), expected = answer
            assert state == expected, case
            assert reports is None or reports[1] == 1, case
            was_bad_loss = "a bad loss, agreed" in case and "in functions" not in case
            assert not was_bad_loss or reports is None or reports[0] == "nan", case


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_is_refused_with_what_to_write(told, what):
    assert re.search(REFUSED[what], told["refused"][what], re.DOTALL)


def test_broadcasting_carries_the_loss_scale(told):
    assert told["broadcast"] == [64.0, 3]


def test_the_greatest_gradient_of_all_ranks_counts(told):
    largest = [1.0, 2.0, 1.0, 2.0, 4096.0, 1.0]
    assert [seen[0] for seen in told["largest"]] == largest
    assert [seen[3] for seen in told["largest"]] == [1, 2, 3, 4, 4, 5]  # a spike


def test_the_pages_program_runs(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(pages.block_of("replicas", "hvd.init()"))
    lines = on_two_ranks(tmp_path, program).splitlines()
    assert len(lines) == 8
    assert all(line.endswith(" 32768.0") for line in lines)
