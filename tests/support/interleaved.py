"""Random programs of two optimizers that share a loss scale, their steps interleaved.

Each step of an optimizer computes gradients, may unscale and applies them; each of
these parts is eager or in a function, and may be in a function or a branch of its own.
Between the parts the other optimizer may scale, unscale and apply, so that the loss
scale moves. Each true gradient is a power of two: see exact.py.
"""

from __future__ import annotations

import random

import tensorflow as tf
from exact import gradients, heard, sharing
from models import compiled

from lossscale import DynamicLossScale, FixedLossScale

#: What a step may do: each of these is drawn for each optimizer, and now and then anew.
CHOICES = {
    "scales": ["optimizer", "optimizer", "loss scale"],
    "computes": ["eager", "graph", "graph"],
    "nests": ["plain", "plain", "function", "branch"],
    "keeps": ["list", "variable", "variable within"],
    "unscales": ["no", "no", "optimizer", "optimizer", "loss scale"],
    "unscales in": ["plain", "function", "branch"],
    "clips": [False, True],
    "applies": ["eager", "graph"],
}
ROUNDS, CLIPPED_TO = 4, 1.0


class Program:
    """Two optimizers, and what each should have subtracted from its variable."""

    def __init__(self, family, seed):
        self.draw = draw = random.Random(seed)  # noqa: S311 - no secret
        scale = DynamicLossScale(2.0 ** draw.randint(6, 15), increment_period=2)
        if draw.random() < 0.2:
            scale = FixedLossScale(512.0, skip_nonfinite=True)
        self.pair = sharing(family, scale)
        for trained in self.pair:
            trained.build()
        self.held = [tf.Variable(tf.zeros([8])) for _ in self.pair]
        self.expected, self.functions = [0.0, 0.0], {}
        self.styles = [self.drawn(), self.drawn()]

    def drawn(self):
        return {name: self.draw.choice(each) for name, each in CHOICES.items()}

    def function(self, key, function, mode):
        """Returns the same `tf.function` at each call with the same key."""
        if key not in self.functions:
            self.functions[key] = compiled(function, mode)
        return self.functions[key]

    def within(self, where, key, function, *args):
        if where == "branch":
            return tf.cond(
                tf.constant(True), lambda: function(*args), lambda: function(*args)
            )
        if where == "function":
            return self.function(key, function, "graph")(*args)
        return function(*args)

    def step(self, who, style, factor):
        """Takes a step of one optimizer, and yields between its parts."""
        trained, held = self.pair[who], self.held[who]
        optimizer, key = trained.optimizer, (who, *style.values())
        by = optimizer if style["scales"] == "optimizer" else optimizer.loss_scale
        scale = getattr(by, "scale_loss", None) or by.scale

        def compute(factor):
            make = lambda factor: gradients(scale, factor, trained.variables)  # noqa: E731
            grads = self.within(style["nests"], (*key, "make"), make, factor)
            if style["keeps"] == "variable within":
                held.assign(grads[0])
            return [tf.identity(grad) for grad in grads]

        def unscale(*grads):
            if style["unscales"] == "optimizer":
                return list(optimizer.get_unscaled_gradients(list(grads)))
            return list(optimizer.loss_scale.unscale(list(grads)))

        def apply(grads):
            if style["keeps"] != "list":
                grads = [tf.convert_to_tensor(held)]
            if style["unscales"] != "no":
                where = style["unscales in"]
                grads = self.within(where, (*key, "unscale"), unscale, *grads)
            if self.clips(style):
                grads = [tf.clip_by_value(g, -CLIPPED_TO, CLIPPED_TO) for g in grads]
            trained.apply(grads)

        compute = self.function((*key, "compute"), compute, style["computes"])
        grads = compute(tf.constant(factor))
        if style["keeps"] == "variable":
            held.assign(grads[0])
        yield
        yield
        self.function((*key, "apply"), apply, style["applies"])(grads)
        if factor < float("inf"):
            true = min(factor, CLIPPED_TO) if self.clips(style) else factor
            self.expected[who] += true

    def clips(self, style):
        # `LossScale.unscale` remembers no overflow, which clipping would hide.
        return style["clips"] and style["unscales"] == "optimizer"

    def run(self):
        """Runs it. Returns whether all weights are right, and what was told."""
        with heard() as told:
            for _ in range(ROUNDS):
                steps = []
                for who in range(2):
                    if self.draw.random() < 1 / 6:
                        self.styles[who] = self.drawn()
                    factor = self.draw.choice([0.25, 0.5, 0.5, 1.0, 2.0, 2.0] * 2)
                    factor = float("inf") if self.draw.random() < 1 / 8 else factor
                    if self.draw.random() < 3 / 4:
                        steps.append(self.step(who, self.styles[who], factor))
                while steps:
                    step = self.draw.choice(steps)
                    if next(step, "done") == "done":
                        steps.remove(step)
        subtracted = [trained.subtracted() for trained in self.pair]
        return subtracted == self.expected, told


def outcome(family, seed):
    """Returns what becomes of the program of a seed, and the program in words."""
    program = Program(family, seed)
    is_right, told = program.run()
    what = f"{'right' if is_right else 'wrong'}, {'told' if told else 'in silence'}"
    return what, f"{family.name}, seed {seed}: {program.styles}"
