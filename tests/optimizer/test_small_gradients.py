"""Steps on gradients around the size up to which they are packed."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from limits import TENSORFLOW
from models import variable_of

import lossscale
from lossscale.gradients.packing import SMALL
from lossscale.runtime.mode import COMPILED_BY_XLA

pytestmark = [pytest.mark.compiled_once, pytest.mark.either_keras2]


def test_under_xla_no_cond_runs_both_its_sides(family):
    variable = variable_of(family, np.ones([SMALL + 1], np.float32))
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(1.0))

    @tf.function(**COMPILED_BY_XLA)
    def step(grad):
        optimizer.scale_loss(0.0)
        optimizer.apply_gradients([(grad, variable)])

    graph = step.get_concrete_function(tf.TensorSpec([SMALL + 1])).graph
    functions = graph.as_graph_def().library.function
    nodes = [node for function in functions for node in function.node_def]
    types = {node.op for node in [*graph.as_graph_def().node, *nodes]}
    assert not types & {"Switch", "While", "StatelessWhile", "Case", "StatelessCase"}
    branches = [
        node.attr["else_branch"].func.name
        for node in [*graph.as_graph_def().node, *nodes]
        if node.op in ("If", "StatelessIf")
    ]
    assert branches
    drawn = {f.signature.name for f in functions if _draws(f)}
    # Of the rule both sides may run. They take variables, and no gradient.
    rules = {f.signature.name for f in functions if _takes_variables(f)}
    assert set(branches) <= drawn | rules
    assert len(drawn) >= 2
    if TENSORFLOW >= (2, 10):  # older ones do not show what they compile
        compiled = step.experimental_get_compiler_ir(tf.ones([SMALL + 1]))
        assert " conditional(" in compiled(stage="optimized_hlo")


def _takes_variables(function):
    taken = {arg.type for arg in function.signature.input_arg}
    return taken == {tf.resource.as_datatype_enum}


def _draws(function):
    return any(node.op == "RandomUniform" for node in function.node_def)


#: Loss scale, value of a scaled gradient, and whether it is applied.
STEPS = [
    (1.0, 3e38, True),  # their sum is infinite
    (0.25, 3e37, True),
    (0.25, 1e38, False),  # finite, and so is the sum, until they are divided
    (2.0**127, 2.0**127, True),
    (2.0, np.inf, False),
    (2.0, np.nan, False),
]


@pytest.mark.parametrize("size", [2, SMALL + 1], ids=["small", "large"])
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_a_step_is_applied_if_the_unscaled_gradients_are_finite(family, size, mode):
    variable = variable_of(family, tf.zeros([size]))
    loss_scale = lossscale.DynamicLossScale(1.0, min_loss_scale=2.0**-10)
    inner = family.optimizers.SGD(1.0)
    optimizer = lossscale.LossScaleOptimizer(inner, loss_scale)
    optimizer.build([variable])
    optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for

    def step(grad):
        optimizer.scale_loss(1.0)
        grads = [grad]
        if family.name != "keras3":
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients([(grads[0], variable)])

    if mode != "eager":
        options = COMPILED_BY_XLA if mode == "xla" else {}
        step = tf.function(step, autograph=False, **options)
    skipped = 0
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
