"""A good step that is only counted: a graph's quick way leaves the rule's state."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.scales.dynamic import HYSTERESIS_RESETS

#: Finite; finite with a sum that is not, so that each is looked at; an infinity; a NaN.
GRADIENTS = {"T": [1, 1], "O": [3e38, 3e38], "I": [1, np.inf], "N": [1, np.nan]}

arguments = st.fixed_dictionaries(
    {
        "increment_period": st.integers(1, 4),
        "hysteresis": st.integers(1, 3),
        "hysteresis_reset": st.lists(st.sampled_from(HYSTERESIS_RESETS), unique=True),
    }
)
#: What a checkpoint may have left: a state that no run leads to, too.
states = st.fixed_dictionaries(
    {
        "good_steps": st.integers(0, 6),
        "bad_steps": st.integers(0, 4),
        "skipped_steps": st.integers(0, 9),
        "consecutive_skipped_steps": st.integers(0, 3),
        "last_step_finite": st.booleans(),
    }
)
NEW = {"good_steps": 0, "bad_steps": 0, "consecutive_skipped_steps": 0}


def in_state(config, values):
    loss_scale = DynamicLossScale(1.0, min_loss_scale=0.25, **config)
    for name, value in values.items():
        getattr(loss_scale, name).assign(value)
    return loss_scale


def state(loss_scale):
    return {v.name: v.numpy().item() for v in loss_scale.variables}


examples = [
    example({"increment_period": 3, "hysteresis_reset": ["good"]}, NEW, "TTTOTTINTTTT"),
    example({"hysteresis": 2}, {"good_steps": 1998, "last_step_finite": False}, "TTOT"),
]


def of_any(function, tries=15):
    """Tries `function(config, values, run)` on any rule, from any state."""
    function = given(arguments, states, st.text("TOIN", min_size=1, max_size=12))(
        function
    )
    for each in examples:
        function = each(function)
    return settings(max_examples=tries, deadline=None)(function)


@of_any
def test_update_in_a_graph_leaves_what_the_rule_leaves(config, values, run):
    by_rule, in_graph = in_state(config, values), in_state(config, values)
    update = tf.function(lambda grad: in_graph.update([grad])[1])
    for letter in run:
        applied = bool(update(tf.constant(GRADIENTS[letter], tf.float32)))
        _, should_apply = by_rule.adjust(letter in "TO")
        assert applied == bool(should_apply)
        assert state(in_graph) == state(by_rule)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_step_in_a_graph_leaves_what_the_rule_leaves(family, unscales):
    def check(config, values, run):
        by_rule, in_graph = in_state(config, values), in_state(config, values)
        weight = variable_of(family, [1.0, 1.0])
        optimizer = LossScaleOptimizer(family.optimizers.SGD(0.0), in_graph)

        @tf.function
        def step(grad):
            # As if it came of a scaled loss: it is of what it is.
            grads = [tf.where(True, grad, optimizer.scale_loss(grad))]
            if unscales:
                grads = optimizer.get_unscaled_gradients(grads)
            optimizer.apply_gradients(zip(grads, [weight]))

        for letter in run:
            grad = np.array(GRADIENTS[letter], np.float32)
            with np.errstate(over="ignore"):
                is_finite = np.isfinite(grad / by_rule().numpy()).all()
            step(tf.constant(grad))
            by_rule.adjust(bool(is_finite))
            assert state(in_graph) == state(by_rule)

    of_any(check, tries=3)()


@pytest.mark.parametrize("name", ["adjust", "_adjust"])
def test_a_subclass_with_a_rule_of_its_own_is_asked_at_each_step(name):
    seen = []

    def own(self, is_finite):
        seen.append(is_finite)
        return getattr(super(subclass, self), name)(is_finite)

    subclass = type("Own", (DynamicLossScale,), {name: own})
    loss_scale = subclass(64.0)
    update = tf.function(lambda grad: loss_scale.update([grad])[1])
    assert bool(update(tf.ones([2])))
    assert len(seen) == 1
    assert seen[0].shape == ()


def test_a_counted_step_leaves_the_rule_to_a_branch():
    loss_scale = DynamicLossScale(64.0)
    update = tf.function(lambda grad: loss_scale.update([grad])[1])
    graph = update.get_concrete_function(tf.TensorSpec([2])).graph
    types = [operation.type for operation in graph.get_operations()]
    assert types.count("If") == 1
    assert not any(name.startswith(("Select", "Assign")) for name in types)
