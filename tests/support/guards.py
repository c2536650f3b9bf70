"""Guards of a user's, and an engine that one of them guards, in every mode."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pages
import tensorflow as tf
from models import compiled
from strategies import assert_bit_equal, last_replica_gets

from lossscale import Guard, LossScaleEngine, SpikeGuard

#: Every way in which an engine can take a step.
MODES = ["eager", "graph", "xla", "session", "replica", "replica-graph"]


class Judges(Guard):
    """Its verdict is what a function of the largest gradient returns."""

    left_out_as = "mine"

    def __init__(self, verdict=lambda _: (True, {})):
        super().__init__()
        self.verdict = verdict
        self.asked = self._add_weight("asked", 0, tf.int64)

    def judge(self, state, largest):
        verdict = self.verdict(largest)
        if isinstance(verdict, tuple) and verdict[1:] == ({},):
            return verdict[0], {"asked": state.asked + 1}
        return verdict

    def get_config(self):
        return {}


class Follows(Guard):
    """Each of its variables becomes what another one was."""

    left_out_as = "far away"

    def __init__(self, factor=8.0):
        super().__init__()
        self.factor = factor
        self.newest = self._add_weight("newest", 0.0, tf.float32)
        self.older = self._add_weight("older", [0.0, 0.0], tf.float32)

    def judge(self, state, largest):
        values = {"newest": largest, "older": tf.stack([state.newest, state.older[0]])}
        is_near = largest <= self.factor * state.newest
        return tf.logical_or(is_near, tf.equal(state.older[1], 0.0)), values

    def get_config(self):
        return {"factor": self.factor}


#: The module that docs/bad-batches.md shows as the model of all.
PAGE = pages.module_of("bad-batches", "left_out_as = ")
#: Ways to make a guard, with arguments that are not the defaults: each must keep every
#: promise.
GUARDS = {
    "spike-guard": lambda: SpikeGuard(
        threshold=0.5, window=3, max_in_a_row=1, min_ratio=1.25
    ),
    "follows": lambda: Follows(4.0),
    "page": PAGE.SkipsZeros,
}


def tiny(largest):
    """Leaves small steps out."""
    return largest >= 0.5, {}


def large(largest):
    """Leaves large steps out."""
    return largest < 8.0, {}


class Guarded:
    """An engine of one variable, and its steps.

    On replicas the last one has the largest gradient, if it is above 2**-60.
    """

    def __init__(self, make_scale, make_guard, mode="eager", strategy=None):
        self.session, self.strategy = None, strategy if "replica" in mode else None
        scope = nullcontext() if self.strategy is None else strategy.scope()
        if mode == "session":
            self.session = tf.compat.v1.Session(graph=tf.Graph())
            scope = self.session.graph.as_default()
        with scope:
            self.engine = LossScaleEngine(make_scale(), guard=make_guard())
            self.guard, self.scale = self.engine.guard, self.engine.loss_scale
            same = tf.VariableAggregation.ONLY_FIRST_REPLICA
            settings = {"aggregation": same, "dtype": tf.float32, "name": "trained"}
            if self.session is None:
                self.variable = tf.Variable([0.0, 0.0], **settings)
                self.engine.build([self.variable])  # or a function is traced twice
            else:
                made = tf.compat.v1.Variable([0.0, 0.0], use_resource=True, **settings)
                self.variable, self.fed = made, tf.compat.v1.placeholder(tf.float32, [])
                self.op = self._step(self.fed)
                self.session.run(tf.compat.v1.global_variables_initializer())
        if self.strategy is not None:
            self.step = compiled(
                lambda largest: strategy.run(self._replica, (largest,)),
                "graph" if mode.endswith("graph") else "eager",
            )
        elif self.session is None:
            self.step = compiled(self._take, mode)

    def _take(self, largest):
        self._step(largest)  # a tf.function returns no operation

    def _replica(self, largest):
        self._take(last_replica_gets(largest, 2.0**-60))

    def _step(self, largest):
        scaled = self.engine.scale_loss(tf.constant(1.0))
        grad = tf.stack([scaled, -largest * scaled])
        grad = tf.where([True, False], 0.0, grad)  # no inf times 0

        def add(grads, variables):
            context = tf.distribute.get_replica_context()
            total = context.all_reduce("SUM", grads[0])
            return variables[0].assign_add(total, read_value=False)

        return self.engine.apply([grad], [self.variable], add)

    def value(self, variable):
        if self.session is not None:
            return self.session.run(variable)
        return np.array(variable.numpy())

    def __call__(self, largest):
        """Takes a step. Returns whether it was applied."""
        before = int(self.value(self.engine.applied_steps))
        if self.session is not None:
            self.session.run(self.op, {self.fed: largest})
        else:
            self.step(tf.constant(largest, tf.float32))
        if self.strategy is not None:
            assert_bit_equal(self.strategy, [*self.variables(), self.variable])
        return int(self.value(self.engine.applied_steps)) > before

    def variables(self):
        last = self.scale.last_largest
        return [*self.engine._state_variables(), *([] if last is None else [last])]

    def state(self):
        every = [*self.variables(), self.variable]
        return [np.array(self.value(v)).tolist() for v in every]

    def run(self, steps):
        """Returns, of each step, whether it was applied and the state after it."""
        return [(self(largest), self.state()[:-1]) for largest in steps]
