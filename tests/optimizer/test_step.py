"""A step: what was unscaled has its say, and what its graph leaves out."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from every_loss_scale import CASES
from limits import TENSORFLOW
from models import built, compiled
from predicates import nodes_run

from lossscale import DynamicLossScale
from lossscale.gradients.check import SMALL
from lossscale.runtime.mode import COMPILED_BY_XLA

INF, NAN = float("inf"), float("nan")
XLA_LATER = pytest.param("xla", marks=pytest.mark.slow)


@pytest.mark.parametrize("unscales", [False, True])
def test_one_replica_divides_once(family, unscales):
    """In the branch that applies, unless the program asked for the quotients."""
    loss_scale = DynamicLossScale(backoff_factor=0.5)  # it multiplies
    optimizer, weight = built(family, loss_scale, np.ones([100, 100]))

    @tf.function(autograph=False)
    def step():
        grad = optimizer.scale_loss(tf.random.stateless_uniform([100, 100], [1, 2]))
        if unscales:
            (grad,) = optimizer.get_unscaled_gradients([grad])
        optimizer.apply_gradients([(grad, weight)])

    found = nodes_run(step, of="stateless_random_uniform")
    run = [node.name for node in found if node.op == "RealDiv"]
    outside = [name for name in run if "/then/" not in name and "/else/" not in name]
    assert len(outside) == (1 if unscales else 0)
    assert sum("/then/" in name for name in run) == (0 if unscales else 1)


@pytest.mark.parametrize("value", [1.0, 2e38], ids=["small", "of infinite sum"])
def test_what_was_unscaled_and_is_not_applied_has_its_say(family, value):
    loss_scale = DynamicLossScale(1.0)
    optimizer, weight = built(family, loss_scale, [0.0, 0.0], 2.0**-127)

    @tf.function
    def step(other):
        grads = [optimizer.scale_loss(each) for each in (tf.fill([2], value), other)]
        first, _ = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients([(first, weight)])

    for number, (other, skipped) in enumerate([(1.0, 0), (INF, 1), (NAN, 2), (1.0, 2)]):
        step(tf.constant([other]))
        assert int(loss_scale.skipped_steps) == skipped
        assert int(optimizer.iterations.numpy()) == number + 1 - skipped


def test_what_was_there_before_clipping_is_not_kept_for_the_branch(family):
    # It would take as much memory again as all gradients.
    optimizer, weight = built(family, DynamicLossScale(), np.ones([100, 100]))
    handed_out = []

    def step():
        grad = optimizer.scale_loss(tf.random.stateless_uniform([100, 100], [1, 2]))
        handed_out[:] = optimizer.get_unscaled_gradients([grad])
        grads, _ = tf.clip_by_global_norm(handed_out, 1.0)
        optimizer.apply_gradients([(grads[0], weight)])

    graph = tf.function(step, autograph=False).get_concrete_function().graph
    *_, branch = (op for op in graph.get_operations() if op.type == "If")
    assert not any(each is handed_out[0] for each in branch.inputs)


#: Loss scale, value of a scaled gradient, and whether it is applied.
STEPS = [
    (1.0, 3e38, True),  # their sum is infinite
    (0.25, 3e37, True),
    (0.25, 1e38, False),  # finite, and so is the sum, until they are divided
    (2.0**127, 2.0**127, True),
    (2.0, INF, False),
    (2.0, NAN, False),
]


@pytest.mark.smoke
@pytest.mark.parametrize("size", [2, SMALL + 1], ids=["small", "large"])
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_a_step_is_applied_if_the_unscaled_gradients_are_finite(family, size, mode):
    loss_scale = DynamicLossScale(1.0, min_loss_scale=2.0**-10)
    optimizer, variable = built(family, loss_scale, np.zeros([size]))

    def step(grad):
        optimizer.scale_loss(1.0)
        optimizer.apply_gradients([(grad, variable)])

    step, skipped = compiled(step, mode), 0
    for scale, value, applies in STEPS:
        loss_scale.current_loss_scale.assign(scale)
        variable.assign(tf.zeros([size]))
        grad = np.zeros([size], np.float32)
        grad[-2:] = value
        step(tf.constant(grad))
        expected = -np.float32(value) / np.float32(scale) if applies else 0.0
        assert float(tf.convert_to_tensor(variable)[-1]) == expected
        skipped += not applies
        assert int(loss_scale.skipped_steps.numpy()) == skipped


@pytest.mark.parametrize("name", [name for name in CASES if "dynamic" in name])
def test_a_step_moves_a_loss_scale_as_adjust_by_hand_does(family, name, rng):
    """To the bit."""
    by_step, by_hand = CASES[name](), CASES[name]()
    optimizer, variable = built(family, by_step, [0.0, 0.0], rate=0.0)

    @tf.function
    def step(values):
        by_step.scale(1.0)
        optimizer.apply_gradients([(values, variable)])

    for _ in range(40):
        last = rng.choice([1.0, 1.0, 1.0, 3e38, INF])
        values = np.float32([last if last == 3e38 else 1.0, last])
        step(tf.constant(values))
        by_hand.adjust(bool(np.isfinite(last)))
        for one, other in zip(by_step.variables, by_hand.variables):
            assert one.numpy().tobytes() == other.numpy().tobytes(), one.name


def test_under_xla_no_cond_runs_both_its_sides(family):
    optimizer, variable = built(family, "dynamic", np.ones([SMALL + 1]))

    @tf.function(**COMPILED_BY_XLA)
    def step(grad):
        optimizer.scale_loss(0.0)
        optimizer.apply_gradients([(grad, variable)])

    graph = step.get_concrete_function(tf.TensorSpec([SMALL + 1])).graph.as_graph_def()
    nodes = {f.signature.name: f.node_def for f in graph.library.function}
    every = [*graph.node, *(node for body in nodes.values() for node in body)]
    types = {node.op for node in every}
    assert not types & {"Switch", "While", "StatelessWhile", "Case", "StatelessCase"}
    ifs = [node for node in every if node.op in ("If", "StatelessIf")]
    branches = {node.attr["else_branch"].func.name for node in ifs}
    drawn = {n for n, body in nodes.items() if "RandomUniform" in {b.op for b in body}}
    # Of the rule both sides may run. They take variables, and no gradient.
    rules = {
        f.signature.name
        for f in graph.library.function
        if {arg.type for arg in f.signature.input_arg} == {tf.resource.as_datatype_enum}
    }
    assert branches
    assert branches <= drawn | rules
    assert len(drawn) >= 2
    if TENSORFLOW >= (2, 10):  # older ones do not show what they compile
        program = step.experimental_get_compiler_ir(tf.ones([SMALL + 1]))
        assert " conditional(" in program(stage="optimized_hlo")
