"""A step: what was unscaled has its say, and what its graph leaves out."""

import numpy as np
import pytest
import tensorflow as tf
from models import built, compiled
from predicates import nodes_run

from lossscale import DynamicLossScale
from lossscale.gradients.check import SMALL
from lossscale.runtime.mode import COMPILED_BY_XLA

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("unscales", [False, True])
def test_one_replica_divides_once(family, unscales):
    """In the branch that applies, unless the program asked for the quotients.

    What they were before clipping is not kept for the branch: it would take as much
    memory again as all gradients.
    """
    loss_scale = DynamicLossScale(backoff_factor=0.5)  # it multiplies
    optimizer, weight = built(family, loss_scale, np.ones([100, 100]))
    handed_out = []

    @tf.function(autograph=False)
    def step():
        grad = optimizer.scale_loss(tf.random.stateless_uniform([100, 100], [1, 2]))
        if unscales:
            handed_out[:] = optimizer.get_unscaled_gradients([grad])
            grad = tf.clip_by_value(handed_out[0], -1.0, 1.0)
        optimizer.apply_gradients([(grad, weight)])

    found = nodes_run(step, of="stateless_random_uniform")
    run = [node.name for node in found if node.op == "RealDiv"]
    outside = [name for name in run if "/then/" not in name and "/else/" not in name]
    assert len(outside) == (1 if unscales else 0)
    assert sum("/then/" in name for name in run) == (0 if unscales else 1)
    operations = step.get_concrete_function().graph.get_operations()
    *_, branch = (op for op in operations if op.type == "If")
    assert not any(given is each for given in branch.inputs for each in handed_out)


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


def test_under_xla_no_branch_becomes_a_select_of_both_its_sides(family):
    """XLA keeps one of which a side draws a random number: see runtime/control.py."""
    optimizer, variable = built(family, "dynamic", np.ones([SMALL + 1]))

    @tf.function(**COMPILED_BY_XLA)
    def step(grad):
        optimizer.scale_loss(0.0)
        optimizer.apply_gradients([(grad, variable)])

    graph = step.get_concrete_function(tf.TensorSpec([SMALL + 1])).graph.as_graph_def()
    functions = {f.signature.name: f for f in graph.library.function}
    nodes = [*graph.node, *(node for f in functions.values() for node in f.node_def)]
    ifs = [node for node in nodes if node.op in ("If", "StatelessIf")]
    sides = [functions[node.attr["else_branch"].func.name] for node in ifs]
    assert any(draws(side) for side in sides)
    # Of the rule both sides may run. They take variables, and no gradient.
    resource = tf.resource.as_datatype_enum
    for side in sides:
        assert draws(side) or {a.type for a in side.signature.input_arg} == {resource}


def draws(function):
    return any(node.op == "RandomUniform" for node in function.node_def)
