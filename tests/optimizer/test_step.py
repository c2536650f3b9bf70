"""A step: what was unscaled has its say, and what its graph leaves out."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from limits import TENSORFLOW
from models import built, compiled
from predicates import nodes_run

from lossscale import DynamicLossScale, LossScaleOptimizer
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


@pytest.mark.parametrize("mode", ["eager", "graph", XLA_LATER])
@pytest.mark.parametrize("value", [1.0, 2e38], ids=["small", "of infinite sum"])
def test_what_was_unscaled_and_is_not_applied_has_its_say(family, value, mode):
    loss_scale = DynamicLossScale(1.0)
    optimizer, weight = built(family, loss_scale, [0.0, 0.0], 2.0**-127)

    def step(other):
        grads = [optimizer.scale_loss(each) for each in (tf.fill([2], value), other)]
        first, _ = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients([(first, weight)])

    step = compiled(step, mode)
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


#: Loss scales, and what their states hold.
RULES = {
    "defaults": {"increment_period": 3},
    "bounded": {"increment_period": 2, "min_loss_scale": 4.0, "max_loss_scale": 64.0},
    "good": {"increment_period": 3, "hysteresis": 2, "hysteresis_reset": ["good"]},
    "growth": {"increment_period": 3, "hysteresis": 2, "hysteresis_reset": ["growth"]},
    "one of good": {"increment_period": 3, "hysteresis_reset": ["good"]},
    "one of growth": {"increment_period": 3, "hysteresis_reset": ["growth"]},
    "search": {"increment_period": 3, "search_period": 1, "multiplier": 1.7},
    "cooldown": {"increment_period": 3, "backoff_cooldown": 2},
    "tolerance": {"increment_period": 3, "overflow_tolerance": 0.4},
}
HIGHEST = {"bad_steps": 3, "cooldown_steps": 3, "window_bad_steps": 3}


def some_state(rng, loss_scale):
    """Returns a state that a run or a file may have left, by the variables' names."""
    state = {}
    for variable in loss_scale.variables:
        name = variable.name.split(":")[0]
        state[name] = rng.integers(HIGHEST.get(name, 5))
    state["current_loss_scale"] = rng.choice([2.0, 4.0, 3e38, 2.0 ** rng.integers(9)])
    state["last_step_finite"] = bool(rng.integers(2))
    if state["last_step_finite"]:
        state["consecutive_skipped_steps"] = 0
    if loss_scale.hysteresis == 1 and "backoff" in loss_scale.hysteresis_reset:
        state["bad_steps"] = 0  # such a count is cleared at once
    return state


@pytest.mark.parametrize("mode", ["graph", XLA_LATER])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_leaves_any_state_as_adjust_by_hand_does(family, mode, rule, rng):
    """To the bit."""
    loss_scale = DynamicLossScale(32.0, **RULES[rule])
    optimizer, variable = built(family, loss_scale, [0.0, 0.0], rate=0.0)

    def step(values):
        loss_scale.scale(1.0)
        optimizer.apply_gradients([(values, variable)])

    def adjust(is_finite):
        loss_scale.adjust(is_finite)

    def left_by(function, argument):
        for each in loss_scale.variables:
            each.assign(state[each.name.split(":")[0]])
        function(tf.constant(argument))
        return [each.numpy().tobytes() for each in loss_scale.variables]

    step, adjust = compiled(step, mode), compiled(adjust, mode)
    for _ in range(25):
        state = some_state(rng, loss_scale)
        last = rng.choice([1.0, 1.0, 1.0, 3e38, INF])
        values = np.float32([last if last == 3e38 else 1.0, last])
        by_hand = left_by(adjust, bool(np.isfinite(values).all()))
        assert left_by(step, values) == by_hand, (state, values)


@pytest.mark.parametrize("mode", ["graph", XLA_LATER])
@pytest.mark.parametrize("value", [0.0, NAN])
def test_a_constant_flag_by_hand_brings_back_what_is_no_scale(mode, value):
    """Nothing has proved that S is a number."""
    loss_scale = DynamicLossScale(8.0, 1)
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), loss_scale)
    variable = tf.Variable([0.0])

    def train():
        optimizer.apply_gradients([(optimizer.scale_loss([1.0]), variable)])

    def adjust():
        loss_scale.adjust(tf.constant(True))

    compiled(train, mode)()
    loss_scale.current_loss_scale.assign(value)
    compiled(adjust, mode)()
    assert float(loss_scale) == 8.0


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
