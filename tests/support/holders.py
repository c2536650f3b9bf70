"""Loss scales of a user's that hold others, and chains of them.

A chain is one loss scale, held by one of the user's own, held by another of these. All
of them have counters of the same names, and some have more variables alike.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from every_loss_scale import CASES, PAGE

import lossscale
from lossscale import LossScale, Verdict

#: A step whose largest gradient is below this counts as all zero: on two replicas
#: `driving.drive` gives the first one so small a gradient.
ZERO = 2.0**-50


class Counts(LossScale):
    """Holds another one, and counts good steps as `DynamicLossScale` does."""

    def __init__(self, loss_scale):
        super().__init__()
        self.loss_scale = lossscale.get(loss_scale)
        self.good_steps = self._add_weight("good_steps", 0, tf.int64)

    def next_state(self, state, is_finite):
        return {"good_steps": tf.where(is_finite, state.good_steps + 1, 0)}

    def get_config(self):
        return {"loss_scale": lossscale.serialize(self.loss_scale)}


class SkipsZeros(LossScale):
    """Holds another one, and leaves out steps whose gradients are all zero."""

    needs_largest = True
    left_out_as = "all zero"

    def __init__(self, loss_scale):
        super().__init__()
        self.loss_scale = lossscale.get(loss_scale)
        self.zeros = self._add_weight("zeros", 0, tf.int64)
        self.good_steps = self._add_weight("good_steps", 0, tf.int64)

    def judge(self, state, is_finite, largest):
        is_zero = is_finite & (largest < ZERO)
        good = tf.where(is_finite, state.good_steps + 1, 0)
        return Verdict(
            should_apply=is_finite & ~is_zero,
            is_told=~is_zero,
            kept={
                "zeros": state.zeros + tf.cast(is_zero, tf.int64),
                "good_steps": good,
            },
        )

    def get_config(self):
        return {"loss_scale": lossscale.serialize(self.loss_scale)}


class OfTwo(LossScale):
    """Holds another one as programs of 2.x do: it assigns, and calls `adjust`."""

    needs_largest = True

    def __init__(self, loss_scale):
        super().__init__()
        self.loss_scale = lossscale.get(loss_scale)
        self.good_steps = self._add_weight("good_steps", 0, tf.int64)

    def __call__(self):
        return self.loss_scale()

    def _adjust(self, is_finite, largest):
        good = tf.where(is_finite, tf.convert_to_tensor(self.good_steps) + 1, 0)
        counted = self.good_steps.assign(good, read_value=False)
        return [counted, self.loss_scale.adjust(is_finite, largest)[0]]

    def get_config(self):
        return {"loss_scale": lossscale.serialize(self.loss_scale)}


class LeavesOutTiny(LossScale):
    """Holds none. Leaves out steps whose gradients are tiny, but for zero."""

    needs_largest = True
    left_out_as = "tiny"

    def __init__(self, initial_loss_scale=64.0):
        super().__init__(initial_loss_scale)
        self.tiny = self._add_weight("tiny", 0, tf.int64)

    def judge(self, state, is_finite, largest):
        is_tiny = is_finite & (largest >= ZERO) & (largest < 2.0**-8)
        kept = {"tiny": state.tiny + tf.cast(is_tiny, tf.int64)}
        return Verdict(is_finite & ~is_tiny, ~is_tiny, kept)

    def next_state(self, state, is_finite, largest):
        del largest
        factor = tf.where(is_finite, 2.0, 0.5)
        return {"current_loss_scale": state.current_loss_scale * factor}

    def get_config(self):
        return {"initial_loss_scale": self.initial_loss_scale}


class AssignsAlone(LossScale):
    """Holds none, and assigns as programs of 2.x do."""

    def __init__(self, initial_loss_scale=64.0):
        super().__init__()
        self.initial_loss_scale = initial_loss_scale
        self.loss_scale_now = self._add_weight(
            "loss_scale", initial_loss_scale, tf.float32
        )

    def __call__(self):
        return tf.convert_to_tensor(self.loss_scale_now)

    def _adjust(self, is_finite):
        current = tf.convert_to_tensor(self.loss_scale_now)
        halved = tf.where(is_finite, current, current / 2.0)
        return self.loss_scale_now.assign(halved, read_value=False)

    def get_config(self):
        return {"initial_loss_scale": self.initial_loss_scale}


#: The classes that a file of a chain names.
CLASSES = {
    cls.__name__: cls
    for cls in (
        *(Counts, SkipsZeros, OfTwo, LeavesOutTiny, AssignsAlone),
        PAGE.Halving,
    )
}
#: What is held: each loss scale of the library, and three of a user's own. The one of
#: a user's LossScaleManager has no config.
HELD = {
    **{name: make for name, make in CASES.items() if name != "manager"},
    "own-judge": lambda: LeavesOutTiny(64.0),
    "own-2.x": lambda: AssignsAlone(64.0),
}
#: Who holds it: the outer one, and the one in it.
HOLDERS = {
    "counts-skips": (Counts, SkipsZeros),
    "skips-counts": (SkipsZeros, Counts),
    "counts-counts": (Counts, Counts),
    "skips-skips": (SkipsZeros, SkipsZeros),
    "counts-2.x": (Counts, OfTwo),
    "2.x-skips": (OfTwo, SkipsZeros),
}


def chain(held, holders):
    """Returns a loss scale of `HELD`, held by the two of `HOLDERS`."""
    outer, middle = HOLDERS[holders]
    return outer(middle(HELD[held]()))


def state_by_path(loss_scale):
    """Returns the values of all variables of a chain, by their paths."""
    return {
        "/".join(map(str, path)): np.array(variable.numpy())
        for path, variable in loss_scale._flatten(
            predicate=lambda each: isinstance(each, tf.Variable), with_path=True
        )
    }


def fill(loss_scale):
    """Gives each variable of a chain a value that no other one has, if it can."""
    variables = loss_scale.variables
    for number, variable in enumerate(variables, 3):
        if variable.dtype == tf.bool:
            variable.assign(number % 2 == 0)
        elif variable.dtype.is_integer:
            variable.assign(number)
        else:
            shape = variable.shape
            steps = np.arange(shape.num_elements(), dtype=np.float32).reshape(shape)
            variable.assign(np.float32(2.0**number) + steps)


def law(held, holders, steps, alone=None):
    """Returns what a chain does at each step: `(scales, applied)`.

    A step is applied if each loss scale of the chain applies it. A rule learns of it if
    each would have it learn. So the held one moves as it does alone on the steps that
    no holder leaves out.

    Args:
      held: As in `chain`.
      holders: As in `chain`.
      steps: Pairs of whether a step is finite, and its largest gradient.
      alone: A loss scale of `HELD`, which takes the steps. None: a new one.
    """
    alone = HELD[held]() if alone is None else alone
    skips = SkipsZeros in HOLDERS[holders]
    scales, applied = [], []
    for is_finite, largest in steps:
        if skips and is_finite and largest < ZERO:
            applied.append(False)
        else:
            told = bool(alone.adjust(is_finite, largest)[1])
            applied.append(told and is_finite)  # FixedLossScale(64) looks at nothing
        scales.append(float(alone))
    return scales, applied
