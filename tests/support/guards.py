"""Guards of a user's own, and those that must keep every promise of a guard."""

import pages
import tensorflow as tf

from lossscale import Guard, SpikeGuard


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
