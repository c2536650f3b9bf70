"""Workers that are processes of their own, on this machine.

Of most tests two train in step. The first overflows at step 5, the second at step 9.
Both must skip both; a worker that decides by its own flag alone leaves the other one
waiting for ever. So a watchdog ends them after 90 seconds, and the test fails.
"""

import json
import re
from types import SimpleNamespace

import numpy as np
import parameter_server
import pytest
import strategies
from impossible import why_not
from installed import families
from models import assert_same
from processes import SUPPORT, free_ports, kill, logs, started
from worker import RUN

SECONDS = 90
pytestmark = [pytest.mark.slow, pytest.mark.peer_defect(2)]
with_one_keras = pytest.mark.parametrize(
    "family", families()[:1], ids=lambda family: family.name
)


def workers(folder, keras, ways, save_at=None, waits_at=(None, None)):
    """Starts two workers. Each waits to be killed after a step of its own, or not."""
    given = {"folder": str(folder), "keras": keras, "ways": ways, "save_at": save_at}
    given["ports"] = free_ports(2)
    each = [{**given, "rank": rank, "wait_at": waits_at[rank]} for rank in (0, 1)]
    commands = [[SUPPORT / "worker.py", json.dumps(one)] for one in each]
    return started(commands, folder, SECONDS)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Returns what each worker saw, each way. All ways are in the same two processes.

    Only with one Keras they are killed: test_routes.py has all.
    """
    seen = {}

    def find(family):
        if family.name not in seen:
            seen[family.name], folder = None, tmp_path_factory.mktemp("workers")
            ways = ["fit"]
            if family.name == families()[0].name:
                # The second dies between two steps, the first in one: it waits.
                interrupted = workers(folder, family.name, ["loop"], 6, (None, 8))
                with interrupted as processes:
                    assert processes[1].stdout.readline() == "waiting\n", logs(folder)
                    kill(reversed(processes))
                # Keras 3 cannot run `fit` there.
                is_keras3 = family.name == "keras3"
                full = ["loop", "failing-fits"] if is_keras3 else ["fit"]
                ways = ["resumed", "float16", "tell", *full]
            with workers(folder, family.name, ways) as processes:
                codes = [process.wait() for process in processes]
            assert codes == [0, 0], logs(folder)
            texts = [(folder / f"{rank}.json").read_text() for rank in (0, 1)]
            seen[family.name] = list(map(json.loads, texts))
        assert seen[family.name], "the workers have failed in another test"
        return seen[family.name]

    return find


def test_both_workers_skip_what_either_cannot_apply(family, told):
    for worker in told(family):
        for way in {"loop", "fit", "float16"} & {*worker}:
            seen = SimpleNamespace(**worker[way])
            seen.states = list(map(tuple, seen.states))
            # What one replica comes to without a wrapper and without the bad steps.
            if way == "fit":
                weights = strategies.fit_on_one(family, RUN)
            else:
                weights = strategies.loop_on_one(family, RUN, 2)
            strategies.assert_right(seen, RUN, weights)


@with_one_keras
def test_both_see_the_largest_gradient_and_bad_losses_with_one_collective_more(
    family, told
):
    one, other = (worker["tell"] for worker in told(family))
    assert one == other
    assert one["crossings"]["lossscale"] == one["crossings"]["bare"] + 1 >= 2
    assert one["seen"] == [
        [2.0**-12, 2.0**23, 0.0],
        [2.0**-2, 2.0**13, 0.0],
        [np.inf, 2.0**13, 1.0],  # a bad loss tells the rule nothing
        [np.inf, 2.0**12, 2.0],  # an overflow lowers the ceiling
        [np.inf, 2.0**11, 3.0],
        [np.inf, 2.0**11, 4.0],
        [2.0**-20, 2.0**11, 4.0],
    ]
    assert one["why"] == ["nan", "gradients", "gradients", "inf"]


@with_one_keras
def test_killed_and_restarted_it_ends_as_if_uninterrupted(family, told):
    expected = strategies.loop_on_one(family, RUN, 2)
    flags = strategies.applied(RUN)
    for seen in (worker["resumed"] for worker in told(family)):
        assert len(seen["weights"]) == len(RUN) - 7
        assert_same(seen["weights"][-1], expected[-1])
        assert tuple(seen["states"][-1]) == strategies.rule(flags)[-1]
        assert seen["iterations"][-1] == sum(flags)


def test_keras3s_fit_cannot_run_there_bare_or_wrapped(family, told):
    reason = why_not("multi-worker", family.name, "fit")
    if reason is None:
        pytest.skip("Keras 2 can")
    for worker in told(family):
        bare, wrapped = worker["failing-fits"]
        assert re.search(reason, bare)
        assert re.search(reason, wrapped)


@pytest.mark.each_version
def test_each_case_with_parameter_servers_is_right_or_refused(tmp_path):
    """Each worker's step is a step of its own there: nobody waits for the others."""
    with started([[SUPPORT / "parameter_server.py"]], tmp_path, 500) as (process,):
        told = json.loads(process.stdout.read() or "{}")
    assert told, logs(tmp_path)
    for family in families():
        reason = why_not("parameter-server", family.name, "fit")
        for wraps in ("ours", "Keras's"):
            assert re.search(reason, told.pop(f"fit, {family.name}, {wraps}"))
    assert len(told) >= 80
    for case, answer in told.items():
        kind, program, _ = case.split(": ")
        if program in parameter_server.REFUSED:
            assert "Scale, unscale and apply once in one function" in answer, case
        elif (kind, program) == ("keras3", "all in a function"):
            # A bare optimizer fails, too: Keras's sum over replicas cannot be there.
            assert "destinations can not be empty" in answer, case
        else:
            assert answer == "right", case
