"""Every loop, in every mode, with every Keras, trains as a bare optimizer would.

One short list of programs runs eagerly, as a graph, compiled by XLA, in a session of
TensorFlow 1 and on replicas, where only the last one is bad. Other tests of optimizers
run in a graph, unless they are about the mode. What each route to disk keeps is in
test_routes.py, and what each loss scale does in scales/test_every_loss_scale.py.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Tuple

import numpy as np
import pytest
import tensorflow as tf
from impossible import why_not
from installed import STRATEGY, families
from models import compiled, variable_of
from strategies import assert_bit_equal, last_replica_gets, scope_of
from version_1 import running

from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScaleOptimizer,
    SpikeGuard,
)
from lossscale.runtime.keras_versions import tensor_of

MODES = ["eager", "graph", "xla", "replicas", "replicas-graph"]
S, START, OVERFLOWS, NAN = 2.0**100, 2.0**-10, 2.0**30, float("nan")


class Loop:
    """Optimizers that share a loss scale, each with a dense weight and a table."""

    def __init__(self, family, case):
        loss_scale = case.loss_scale()
        self.optimizers = [
            LossScaleOptimizer(family.optimizers.SGD(1.0), loss_scale, **case.options())
            for _ in range(case.optimizers)
        ]
        self.weights = [
            [
                variable_of(family, np.full(shape, START, np.float32), name=f"v{at}")
                for shape in ([3], [4, 2])
            ]
            for at in range(case.optimizers)
        ]
        for optimizer, weights in zip(self.optimizers, self.weights):
            optimizer.build(weights)

    def scaled(self, fed, at=0):
        """Returns gradients: `fed` for each element, and for each row that is read."""
        values = list(map(tensor_of, self.weights[at]))
        with tf.GradientTape() as tape:
            rows = tf.gather(values[1], [1, 3, 1])
            loss = fed * tf.reduce_sum(values[0]) + fed * tf.reduce_sum(rows)
            loss = self.optimizers[at].scale_loss(loss)
        return tape.gradient(loss, values)

    def unscaled(self, fed, at=0):
        return self.optimizers[at].get_unscaled_gradients(self.scaled(fed, at))

    def apply(self, grads, at=0):
        pairs = list(zip(grads, self.weights[at]))
        return self.optimizers[at].apply_gradients(pairs)


def scale_and_apply(loop, fed):
    """The loop of Keras 3's own wrapper."""
    return loop.apply(loop.scaled(fed))


def unscale_and_clip(loop, fed):
    """The loop of Keras 2's own wrapper, with a clip that hides the infinity."""
    dense, rows = loop.unscaled(fed)
    values = tf.clip_by_value(rows.values, -2.0, 2.0)
    rows = tf.IndexedSlices(values, rows.indices, rows.dense_shape)
    return loop.apply([tf.clip_by_value(dense, -2.0, 2.0), rows])


def accumulate(loop, fed):
    """The sum of two batches, of which the first may overflow."""
    first, second = loop.unscaled(fed), loop.unscaled(0.0)
    return loop.apply([tf.convert_to_tensor(a) + b for a, b in zip(first, second)])


def clip_while_scaled(loop, fed):
    """A norm of scaled gradients is far too large for the limit: it divides them."""
    grads = loop.optimizers[0].get_unscaled_gradients(loop.scaled(fed))
    norm = tf.linalg.global_norm(grads)
    return loop.apply([grad * tf.minimum(1.0, 1e6 / norm) for grad in densely(grads)])


def densely(grads):
    return [tf.convert_to_tensor(grad) for grad in grads]


def leave_one_out(loop, fed):
    """A variable without a gradient stays as it is, and the others are trained."""
    dense, _ = loop.scaled(fed)
    return loop.apply([dense, None])


def two_optimizers(loop, fed):
    """One step of the loss scale, though the last one's gradients are finite."""
    grads = [loop.scaled(fed, 0), loop.scaled(0.0 * fed + 1.0, 1)]
    return [loop.apply(each, at) for at, each in enumerate(grads)]


def two_bad_ones(loop, fed):
    """Both overflow: still one step, and one halving."""
    grads = [loop.scaled(fed, at) for at in (0, 1)]
    return [loop.apply(each, at) for at, each in enumerate(grads)]


def dynamic():
    return DynamicLossScale(S, 1000)


class Case(NamedTuple):
    """A program, and what becomes of it.

    Attributes:
      program: Takes a step with what is fed, on the last replica.
      scale: The loss scale at the end. None: it follows the gradients.
      loss_scale: Makes the loss scale.
      options: Makes what else `LossScaleOptimizer` is given.
      optimizers: How many optimizers share the loss scale.
      fed: What is fed at each step. Of a step that is skipped it is in `BAD`.
      rows: Whether the table is trained, too.
    """

    program: Callable[..., Any]
    scale: Any = S / 2
    loss_scale: Callable[[], Any] = dynamic
    options: Callable[[], Dict[str, Any]] = dict
    optimizers: int = 1
    fed: Tuple[float, ...] = (1.0, OVERFLOWS, 2.0, 1.0)
    rows: bool = True


SPIKE = 2.0**20
BAD = {OVERFLOWS, SPIKE, NAN}
CASES = {
    "scale, apply": Case(scale_and_apply),
    "scale, unscale, clip, apply": Case(unscale_and_clip),
    "accumulate": Case(accumulate),
    "clip by a norm": Case(clip_while_scaled),
    "a gradient that is None": Case(leave_one_out, rows=False),
    "a shared loss scale": Case(two_optimizers, optimizers=2),
    "a shared loss scale, both bad": Case(two_bad_ones, optimizers=2),
    "a fixed loss scale": Case(
        scale_and_apply, S, lambda: FixedLossScale(S, skip_nonfinite=True)
    ),
    "headroom": Case(
        scale_and_apply,
        None,
        lambda: HeadroomLossScale(S, half_life=4),
        fed=(1.0, NAN, 2.0),
    ),
    "a guard": Case(
        scale_and_apply,
        S,
        options=lambda: {"guard": SpikeGuard(window=2)},
        fed=(1.0, 1.0, 1.0, SPIKE, 1.0),
    ),
    "a bad loss, skipped": Case(
        unscale_and_clip,
        S,
        options=lambda: {"nonfinite_loss": "skip"},
        fed=(1.0, NAN, 2.0),
    ),
    "a bad loss": Case(scale_and_apply, fed=(1.0, NAN, 2.0)),
    "finite, of infinite sum": Case(
        scale_and_apply, 1.0, lambda: DynamicLossScale(1.0, 1000), fed=(2.0**126,)
    ),
}


pytestmark = pytest.mark.filterwarnings(
    "ignore:Gradients do not exist", "ignore:.*no gradients"
)
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.smoke
@pytest.mark.peer_defect(1)
@pytest.mark.peer_defect(16)
@pytest.mark.peer_defect(24)
@each_case
@pytest.mark.parametrize("mode", MODES)
def test_it_trains_as_a_bare_optimizer_and_skips_what_is_bad(
    family, mode, case, mirrored
):
    strategy = mirrored if "replicas" in mode else None
    if strategy and why_not(STRATEGY, family.name, "loop"):
        pytest.skip("impossible, see impossible.py")
    assert_trains(family, mode, case, strategy)


LEGACY = [family for family in families() if family.name == "keras2-legacy"]


@each_case
@pytest.mark.parametrize("legacy", LEGACY, ids=lambda family: family.name)
def test_in_a_session_too(legacy, case):
    assert_trains(legacy, "session", case)


def assert_trains(family, mode, case, strategy=None):
    """Takes the steps of a case, and compares with what SGD makes of the good ones."""
    others = strategy.num_replicas_in_sync - 1 if strategy else 0
    with running(mode if mode == "session" else "eager") as run:
        with scope_of(strategy):
            loop = Loop(family, case)
        step = made(lambda fed: case.program(loop, fed), mode, strategy, run)
        for fed in case.fed:
            step(fed)
        scale = loop.optimizers[0].loss_scale
        variables = [v for weights in loop.weights for v in weights]
        variables.append(scale.skipped_steps)
        *weights, skipped = (run.value(tensor_of(each)) for each in variables)
        end = run.value(scale)
        applied = [run.value(each.iterations) for each in loop.optimizers]
    if strategy:
        assert_bit_equal(strategy, variables)
    good = [fed for fed in case.fed if fed not in BAD]
    sums = [good] * case.optimizers  # what each optimizer has applied
    if case.program is two_optimizers:
        sums[1] = [1.0] * len(case.fed)
    assert applied == list(map(len, sums))
    assert skipped == (0 if "guard" in case.options() else len(case.fed) - len(good))
    assert case.scale is None or end == case.scale
    reads = np.array([[0, 0], [2, 2], [0, 0], [1, 1]], np.float32) * case.rows
    for added, dense, rows in zip(sums, weights[::2], weights[1::2]):
        total = np.float32(sum(added) + len(added) * others)
        np.testing.assert_array_equal(dense, np.full([3], START - total))
        np.testing.assert_array_equal(rows, START - reads * total)


def made(program, mode, strategy, run):
    """Returns a function that takes a step of a program in a mode."""
    if mode == "session":
        return run.step(lambda fed: tf.group(program(fed)))
    if strategy is None:
        step = compiled(lambda fed: (program(fed), None)[1], mode)
    else:
        on_replica = lambda fed: (program(last_replica_gets(fed, 1.0)), None)[1]  # noqa: E731
        step = lambda fed: strategy.run(on_replica, (fed,))  # noqa: E731
        step = compiled(step, "graph") if "graph" in mode else step
    return lambda fed: step(tf.constant(fed))
