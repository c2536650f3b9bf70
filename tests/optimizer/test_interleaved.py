"""Random programs of two optimizers that share a loss scale: right, or told.

Each step of an optimizer computes gradients, may unscale and applies them; each of
these parts is eager or in a function, and may be in a function or a branch of its own.
Between the parts the other optimizer may scale, unscale and apply, so that the loss
scale moves. Each true gradient is a power of two: see exact.py.
"""

import random

import pytest
import tensorflow as tf
from exact import gradients, heard, sharing
from installed import families

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
ROUNDS, CLIPPED_TO, INF = 4, 1.0, float("inf")


class Program:
    """Two optimizers, and what each should have subtracted from its variable."""

    def __init__(self, family, seed):
        self.draw = draw = random.Random(seed)  # noqa: S311 - no secret
        scale = DynamicLossScale(2.0 ** draw.randint(6, 15), increment_period=2)
        if draw.random() < 0.2:
            scale = FixedLossScale(512.0, skip_nonfinite=True)
        self.pair = sharing(family, scale)
        self.held = [tf.Variable(tf.zeros([8])) for _ in self.pair]
        self.expected, self.functions = [0.0, 0.0], {}
        self.styles = [self.drawn(), self.drawn()]

    def drawn(self):
        style = {name: self.draw.choice(each) for name, each in CHOICES.items()}
        # `LossScale.unscale` remembers no overflow, which clipping would hide.
        style["clips"] &= style["unscales"] == "optimizer"
        return style

    def within(self, where, key, function, *args):
        """Calls a function: in a branch, in the same `tf.function` for a key, or so."""
        if where == "branch":
            one = lambda: function(*args)  # noqa: E731
            return tf.cond(tf.constant(True), one, one)
        if where in ("function", "graph"):
            function = self.functions.setdefault(key, tf.function(function))
        return function(*args)

    def step(self, who, style, factor):
        """Takes a step of one optimizer, and yields between its parts."""
        trained, held = self.pair[who], self.held[who]
        optimizer, key = trained.optimizer, (who, *style.values())
        scale = optimizer.loss_scale
        multiply = (
            optimizer.scale_loss if style["scales"] == "optimizer" else scale.scale
        )

        def compute(factor):
            make = lambda factor: gradients(multiply, factor, trained.variables)  # noqa: E731
            grads = self.within(style["nests"], (*key, "make"), make, factor)
            if style["keeps"] == "variable within":
                held.assign(grads[0])
            return [tf.identity(grad) for grad in grads]

        def unscale(*grads):
            by_it = style["unscales"] == "optimizer"
            by = optimizer.get_unscaled_gradients if by_it else scale.unscale
            return list(by(list(grads)))

        def apply(grads):
            if style["keeps"] != "list":
                grads = [tf.convert_to_tensor(held)]
            if style["unscales"] != "no":
                where = style["unscales in"]
                grads = self.within(where, (*key, "unscale"), unscale, *grads)
            if style["clips"]:
                grads = [tf.clip_by_value(g, -CLIPPED_TO, CLIPPED_TO) for g in grads]
            trained.apply(grads)

        factor_given = tf.constant(factor)
        grads = self.within(style["computes"], (*key, "compute"), compute, factor_given)
        if style["keeps"] == "variable":
            held.assign(grads[0])
        yield
        yield
        self.within(style["applies"], (*key, "apply"), apply, grads)
        if factor < INF:
            self.expected[who] += min(factor, CLIPPED_TO) if style["clips"] else factor

    def run(self):
        for _ in range(ROUNDS):
            steps = []
            for who in range(2):
                if self.draw.random() < 1 / 6:
                    self.styles[who] = self.drawn()
                factor = self.draw.choice([0.25, 0.5, 0.5, 1.0, 2.0, 2.0] * 2)
                factor = INF if self.draw.random() < 1 / 8 else factor
                if self.draw.random() < 3 / 4:
                    steps.append(self.step(who, self.styles[who], factor))
            while steps:
                step = self.draw.choice(steps)
                if next(step, "done") == "done":
                    steps.remove(step)


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 38), marks=pytest.mark.slow)]
)
def test_weights_are_right_or_a_warning_says_that_they_are_not(seeds):
    """If it cannot be known whose gradients were unscaled, that is told: seldom."""
    every, needless = families(), []
    for seed in seeds:
        program = Program(every[seed % len(every)], seed)
        with heard() as told:
            program.run()
        is_right = [each.subtracted() for each in program.pair] == program.expected
        assert is_right or told, (seed, program.styles)
        needless += [seed] if is_right and told else []
    assert len(needless) <= len(seeds) // 15, needless
