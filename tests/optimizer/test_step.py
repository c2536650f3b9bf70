"""What an attempt to apply gradients holds is equal on all replicas."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import tensorflow as tf
from models import variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.optimizer import base
from lossscale.optimizer.step import Attempt


@pytest.fixture
def attempts(monkeypatch):
    """Returns a list of the attempts that are made."""
    made = []

    class Kept(Attempt):
        def run(self, handed, variables):
            made.append(self)
            return super().run(handed, variables)

    monkeypatch.setattr(base, "Attempt", Kept)
    return made


def _tensors_within(value):
    """Returns the tensors that an attribute holds, in a closure too."""
    if inspect.isfunction(value):
        value = [cell.cell_contents for cell in value.__closure__ or ()]
    if isinstance(value, partial):
        value = [value.args, value.keywords]
    return [leaf for leaf in tf.nest.flatten(value) if tf.is_tensor(leaf)]


def _as_told(value):
    """Returns what must be equal: a function's code, and else the value."""
    if inspect.isfunction(value):
        return value.__code__
    return (type(value), vars(value)) if "Among" in str(type(value)) else value


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_one_replica_decides_with_is_equal_on_all(
    family, mirrored, attempts, unscales, mode
):
    # Where replicas meet, the first one's attempt runs for all of them.
    with mirrored.scope():
        weights = [variable_of(family, [1.0, 2.0]) for _ in range(2)]
        optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), DynamicLossScale())

    def replica():
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.scale_loss(tf.constant(1.0))
        grads = [tf.fill([2], tf.cast(number, tf.float32)), None]
        if unscales:
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(list(zip(grads, weights)))

    def step():
        mirrored.run(replica)

    tf.function(step)() if mode == "graph" else step()
    assert len(attempts) >= 2
    first, last = attempts[-2:]
    for name, value in vars(first).items():
        assert _as_told(value) == _as_told(vars(last)[name]), name
        assert not _tensors_within(value), name
