"""What Keras's own wrappers do: the defects for which the README says to use ours.

On the newest versions only. When one of these fails, the peer has been mended: update
the README and docs/reliability.md.
"""

from __future__ import annotations

import subprocess
import textwrap

import numpy as np
import pytest
import tensorflow as tf
from installed import STRATEGY, families
from limits import skip_without
from processes import free_ports, started
from strategies import last_replica_gets

pytestmark = [
    pytest.mark.slow,  # once, on the newest versions
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(STRATEGY != "mirrored", reason="is about others, once"),
]
BAD, GOOD = [np.inf, 0.0], [1.0, 0.0]


def peer(name):
    """Returns a Keras, or skips where it is not the newest."""
    found = {family.name: family for family in families()}
    if name not in found:
        pytest.skip(f"{name} is not installed")
    skip_without("what the table of peers says", found[name])
    return found[name]


@pytest.fixture
def keras3():
    return peer("keras3")


@pytest.fixture
def keras2():
    return peer("keras2-new")


def of_keras3(family, **arguments):
    """Returns Keras 3's wrapper, built, and a variable."""
    variable, inner = family.keras.Variable([1.0, 2.0]), family.optimizers.SGD(1.0)
    optimizer = family.optimizers.LossScaleOptimizer(inner, **arguments)
    optimizer.build([variable])
    return optimizer, variable


def of_keras2(family, **arguments):
    """Returns Keras 2's wrapper, and a variable."""
    wrapper = family.keras.mixed_precision.LossScaleOptimizer
    return wrapper(family.optimizers.SGD(1.0), **arguments), tf.Variable([1.0, 2.0])


def apply(optimizer, variable, grad):
    optimizer.apply_gradients([(tf.constant(grad, variable.dtype), variable)])


@pytest.mark.peer_defect(1)
def test_keras3_applies_an_overflow_of_the_last_replica(keras3, mirrored):
    with mirrored.scope():
        optimizer, variable = of_keras3(keras3)

    def each():
        optimizer.apply_gradients([(last_replica_gets(BAD, GOOD), variable)])

    tf.function(lambda: mirrored.run(each))()
    assert not np.isfinite(variable.numpy()).all()
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**15


WORKER = """
    import json, os, sys
    rank, ports = int(sys.argv[1]), sys.argv[2].split(",")
    workers = [f"localhost:{port}" for port in ports]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    import keras
    import tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
        wrapper = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
        wrapper.build([variable])

    @tf.function
    def step(special):
        def each(special):
            wrapper.apply_gradients([(tf.stack([special, 1.0]), variable)])
        strategy.run(each, (special,))

    step(tf.constant(1.0))
    print("one step done", flush=True)
    step(tf.constant(float("inf") if rank == 1 else 1.0))
    print("two steps done", flush=True)
    if rank == 1:
        sys.stdin.read()  # ending, it would break the other one's waiting
"""


@pytest.mark.peer_defect(2)
@pytest.mark.usefixtures("keras3")
def test_keras3_hangs_two_workers(tmp_path):
    ports = ",".join(map(str, free_ports(2)))
    commands = [["-c", textwrap.dedent(WORKER), rank, ports] for rank in (0, 1)]
    with started(commands, tmp_path, 300) as processes:
        said = [process.stdout.readline() for process in processes]
        with pytest.raises(subprocess.TimeoutExpired):
            processes[0].wait(timeout=5)  # a step takes some milliseconds
    assert said == ["one step done\n"] * 2


@pytest.mark.peer_defect(3)
@pytest.mark.peer_defect(4)
def test_keras3s_scale_falls_to_zero_and_grows_to_infinity(keras3):
    optimizer, variable = of_keras3(keras3, initial_scale=2.0**-145)
    for _ in range(8):
        apply(optimizer, variable, BAD)
    assert float(optimizer.dynamic_scale.numpy()) == 0.0
    apply(optimizer, variable, [0.0, 0.0])  # of a loss times 0
    assert np.isnan(variable.numpy()).all()
    high = {"initial_scale": 2.0**126, "dynamic_growth_steps": 1}
    optimizer, variable = of_keras3(keras3, **high)
    for _ in range(3):
        apply(optimizer, variable, GOOD)
    assert float(optimizer.dynamic_scale.numpy()) == np.inf


@pytest.mark.peer_defect(12)
def test_keras2_loses_the_scale_in_a_keras_file(keras2, tmp_path):
    keras = keras2.keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer, _ = of_keras2(keras2)
    model.compile(optimizer, loss="mse")
    model.train_on_batch(np.array([BAD]), np.ones([1, 1]))
    assert float(optimizer.loss_scale) == 2.0**14
    model.save(tmp_path / "model.keras")
    other = keras.models.load_model(tmp_path / "model.keras")
    assert float(other.optimizer.loss_scale) == 2.0**15


@pytest.mark.peer_defect(17)
def test_all_compute_in_float16(keras3, keras2):
    loss = tf.constant(1.0, tf.float16)
    optimizer, _ = of_keras2(keras2, initial_scale=2.0**16)
    assert optimizer.get_scaled_loss(loss).numpy() == np.inf
    unbuilt = keras3.optimizers.LossScaleOptimizer(
        keras3.optimizers.SGD(), initial_scale=2.0**16
    )
    assert unbuilt.scale_loss(loss).numpy() == np.inf
    optimizer, _ = of_keras2(keras2, initial_scale=2.0**26)
    grads = optimizer.get_unscaled_gradients([tf.constant([2.0**15], tf.float16)])
    np.testing.assert_array_equal(grads[0].numpy(), [0.0])


@pytest.mark.peer_defect(24)
def test_all_apply_an_overflow_that_was_clipped(keras3, keras2):
    for optimizer, variable in (of_keras3(keras3), of_keras2(keras2)):
        apply(optimizer, variable, tf.clip_by_value(BAD, -1.0, 1.0))
        assert variable.numpy()[0] < 1.0
