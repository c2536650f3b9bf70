"""docs/replicas.md: its loop on one replica and two, and its programs of processes.

test_horovod.py runs that of Horovod.
"""

import json

import numpy as np
import pages
import pytest
import tensorflow as tf
from installed import families
from limits import skip_without
from models import assert_same, scale_state
from pages import block_of
from processes import free_ports, logs, started

MAKES = "strategy = tf.distribute.MirroredStrategy()\n"


def weights_of(found):
    return [np.array(weight.numpy()) for weight in found["weights"]]


@pytest.fixture
def loop(run, family):
    """Returns a function that runs the page's loop under a strategy."""
    skip_without("adding up over replicas", family)
    text = block_of("replicas", "Only if you clip")
    assert text.count(MAKES) == 1
    # Of a strategy of the tests' own: a second one breaks the first one's collectives.
    text = text.replace(MAKES, "").replace("keras.layers.Dense(1)", DENSE)

    def loop(strategy, *cut):
        return run(text.replace(*cut) if cut else text, strategy=strategy)

    return loop


DENSE = "keras.layers.Dense(1, kernel_initializer='zeros')"
DIVIDES = "        loss /= strategy.num_replicas_in_sync  # first divide, then scale\n"


@pytest.mark.slow
def test_weights_move_about_twice_as_far_if_the_loss_is_not_divided(loop, mirrored):
    far, right = weights_of(loop(mirrored, DIVIDES, "")), weights_of(loop(mirrored))
    assert np.abs(far[0]).max() > 1.5 * np.abs(right[0]).max()


def test_each_loop_on_replicas_divides_its_loss():
    for name, path in pages.PAGES.items():
        for block in pages.blocks(path):
            if "strategy.run(" in block and "ParameterServer" not in block:
                assert "num_replicas_in_sync" in block, name


@pytest.mark.parametrize(
    "numbers", [pytest.param((1, 2), marks=pytest.mark.slow), (2, 1)], ids=str
)
def test_a_run_continues_on_another_number_of_replicas(
    loop, mirrored, tmp_path, numbers
):
    def checkpoint(found):
        names = ("weights", "optimizer")
        return tf.train.Checkpoint(**{name: found[name] for name in names})

    both = tf.distribute.OneDeviceStrategy("CPU:0"), mirrored
    strategies = [both[number - 1] for number in numbers]
    first, second = (loop(each) for each in strategies)
    optimizer, other = first["optimizer"], second["optimizer"]
    optimizer.loss_scale.current_loss_scale.assign(2.0**7)
    checkpoint(second).read(checkpoint(first).write(str(tmp_path / "checkpoint")))
    assert scale_state(other) == scale_state(optimizer)
    assert_same(weights_of(first), weights_of(second))
    for found in (first, second):
        strategy = found["strategy"]
        for batch in strategy.experimental_distribute_dataset(found["dataset"]):
            found["train_step"](*batch)
    for one, two in zip(weights_of(first), weights_of(second)):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)
    assert scale_state(other) == scale_state(optimizer)


def printed_by(folder, text, *jobs, last):
    """Runs a page's program as each of these jobs. Returns what the last ones print."""
    program = folder / "train.py"
    program.write_text(text)
    cluster = {}
    for job, port in zip(jobs, free_ports(len(jobs))):
        cluster.setdefault(job, []).append(f"localhost:{port}")
    tasks = [{"type": j, "index": jobs[:i].count(j)} for i, j in enumerate(jobs)]
    configs = [json.dumps({"cluster": cluster, "task": task}) for task in tasks]
    environments = [{"TF_CONFIG": config} for config in configs]
    with started([[program]] * len(jobs), folder, 200, environments) as processes:
        printed = [process.stdout.read() for process in processes[-last:]]
        codes = [process.wait() for process in processes[-last:]]
        assert codes == [0] * last, logs(folder)
    return printed


@pytest.mark.slow
def test_the_program_of_several_machines_runs(tmp_path):
    skip_without("the pages", families()[0])
    program = block_of("replicas", "Only if you clip")
    workers = MAKES.replace("Mirrored", "MultiWorkerMirrored")
    assert program.count(MAKES) == 1
    program = program.replace(MAKES, workers)  # the one line that the page changes
    one, other = printed_by(tmp_path, program, "worker", "worker", last=2)
    assert one == other  # the mean over both, and the loss scale
    assert [line.split()[1] for line in one.splitlines()] == ["32768.0"] * 4


@pytest.mark.slow
def test_the_program_of_parameter_servers_runs(tmp_path):
    if families()[0].name != "keras3":
        pytest.skip("impossible, see impossible.py: Keras 2 refuses the strategy")
    program = block_of("replicas", "tf.distribute.ParameterServerStrategy(")
    jobs = ("worker", "worker", "ps", "chief")
    (printed,) = printed_by(tmp_path, program, *jobs, last=1)
    scale, loss = map(float, printed.split())
    assert scale == 2.0**15
    assert loss < 0.5  # 1.0 before; a worker that reads early may undo little of it
