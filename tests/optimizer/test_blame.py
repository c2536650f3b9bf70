"""Which loss is at fault of a bad step, and that no loss scale is held up for ever.

With `nonfinite_loss="skip"` the loss scale is told nothing of a loss that was bad
before it was scaled, unless there are too many of them. How many that are is the rule
of scales/test_ignored_losses.py.
"""

import random
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from exact import Trained, heard, of_loss
from installed import families
from models import compiled
from version_1 import running, variable

from lossscale import DynamicLossScale, LossScaleEngine

INF, NAN = float("inf"), float("nan")
#: Scaled, gradients of `LARGE` are finite up to `FITS`.
START, FITS, LARGE = 2.0**20, 2.0**15, 2.0**112


def of_an_eager_step(p):
    """`run_functions_eagerly` for one batch, then a function and an eager apply."""
    compute = tf.function(p.scaled)
    p.apply(p.scaled(NAN))
    assert p.state() == (START, 0, 1)
    assert p.optimizer.nonfinite_loss() == "nan"
    return lambda _: p.apply(compute(tf.constant(LARGE)))


def of_a_dropped_batch(p):
    def step(factor):
        p.scaled(factor)
        p.apply(p.scaled(LARGE))

    return step


def of_another_branch(p):
    @tf.function
    def step(factor):
        first = p.scaled(factor)
        p.apply(first)
        others = lambda: [tf.identity(each) for each in first]  # noqa: E731
        p.apply(tf.cond(tf.constant(True), lambda: p.scaled(LARGE), others))

    return step


@pytest.mark.smoke
@pytest.mark.parametrize(
    "step_of", [of_an_eager_step, of_a_dropped_batch, of_another_branch]
)
def test_a_bad_loss_is_at_fault_of_no_other_gradients(family, step_of):
    """They overflow five times, which the loss scale has to learn."""
    trained = Trained(family, DynamicLossScale(START), nonfinite_loss="skip")
    step = step_of(trained)
    for _ in range(8):
        step(tf.constant(NAN))
    assert trained.state()[:2] == (FITS, 3)
    # In another branch it is at fault of a step of its own.
    has_own = step_of is of_another_branch
    assert trained.optimizer.nonfinite_loss() == ("nan" if has_own else None)


def descend(grads, variables):
    return variables[0].assign_sub(grads[0])


def test_in_a_session_the_tenth_bad_loss_counts_too():
    letters = "N" * 10 + "TN" * 13 + "N"  # the tenth counts, and the last of the 13
    with running("session") as run:
        engine = LossScaleEngine(DynamicLossScale(FITS), nonfinite_loss="skip")
        weight = variable([1.0])

        def build(factor):
            loss = engine.scale_loss(tf.reduce_sum(weight * factor))
            grads = tf.compat.v1.gradients(loss, [weight])
            return engine.apply(grads, [weight], descend)

        step, scale = run.step(build), engine.loss_scale()
        for number, letter in enumerate(letters, 1):
            step(NAN if letter == "N" else 1.0)
            assert run.value(scale) == FITS / 2.0 ** ((number > 9) + (number > 35))


@pytest.mark.parametrize("unscales", [False, True])
def test_a_loss_in_a_branch_of_tensorflow_1_cannot_be_asked_outside_of_it(unscales):
    """So its overflow counts, and its gradients are measured as they are applied."""
    with running("session-of-1") as run:
        engine = LossScaleEngine(DynamicLossScale(START), nonfinite_loss="skip")
        scale, weight = engine.loss_scale, variable([4.0])
        scale.keep_largest()

        def build(factor):
            def compute():
                loss = engine.scale_loss(tf.reduce_sum(weight * factor))
                grads = tf.compat.v1.gradients(loss, [weight])
                return (engine.unscale(grads) if unscales else grads)[0]

            grad = tf.cond(factor > 0.0, compute, compute)
            return engine.apply([grad], [weight], descend)

        step = run.step(build)
        for factor, left, expected in ((1, 3, START), (INF, 3, START / 2)):
            step(factor)
            assert (run.value(weight), run.value(scale())) == (left, expected)
            assert run.value(scale.last_largest) == factor


# Random programs. In each round every optimizer, or only some, scales the losses of a
# few batches, may drop one of them, adds up the gradients of the others and applies
# them. A loss scale is halved by each step that counts as an overflow, and by no other:
# so its value counts them.

HIGH, ROUNDS = 2.0**60, 30
#: A bad loss is ignored unless its optimizer's level comes to the first of these. Each
#: one adds the second, and an applied step takes 1 away.
MOST, ADDED = 40, 4
#: The loss and the largest gradient of a batch.
GOOD, MASKED, OVERFLOW = (1.0, 0.5), (INF, 0.5), (1.0, INF)
BAD_LOSSES = [(NAN, NAN), (INF, NAN), (INF, INF)]
MOODS = {
    "mixed": [GOOD] * 5 + [MASKED, OVERFLOW, OVERFLOW, *BAD_LOSSES],
    "losses": [*BAD_LOSSES, MASKED],
    "often": [GOOD] * 4 + [*BAD_LOSSES, MASKED],
    "overflows": [OVERFLOW],
    "both": [OVERFLOW, *BAD_LOSSES],
}


def turn_of(draw, who, shares):
    """Returns what an optimizer does in a round."""
    unscales = draw.random() < 0.5
    return SimpleNamespace(
        who=who,
        # It first drops a batch whose gradients are one of these.
        drops=draw.choice([None, None, "scaled", "unscaled"]),
        # So many are added up.
        batches=draw.choice([1, 1, 2, 3]),
        # Each batch's gradients are unscaled, and then clipped.
        unscales=unscales,
        # What is applied goes through NumPy, or a variable in a graph.
        is_hidden=draw.random() < 0.25,
        # `LossScale.scale` multiplies the losses.
        by_itself=not (shares or unscales) and draw.random() < 0.3,
    )


class Oracle:
    """Knows of a loss scale how many steps of its optimizers must have lowered it."""

    def __init__(self):
        self.seen, self.levels, self.counted = set(), defaultdict(int), 0
        self.begin()

    def begin(self):
        """Begins a step of the loss scale."""
        self.in_step, self.has_counted = set(), False

    def turn(self, turn, values):
        if turn.who in self.in_step:  # it applies a second time
            self.begin()
        self.in_step.add(turn.who)
        losses, grads = np.array(values).T
        if turn.drops:
            if turn.drops == "unscaled" and not np.isfinite(grads[0]):
                self.seen.add(turn.who)  # an overflow waits until an apply counts it
            losses, grads = losses[1:], grads[1:]
        if np.isfinite(grads).all() and turn.who not in self.seen:
            self.levels[turn.who] = max(self.levels[turn.who] - 1, 0)
            return
        self.seen.discard(turn.who)
        counts = turn.is_hidden or np.isfinite(losses).all()
        if not counts:
            self.levels[turn.who] += ADDED
            counts = self.levels[turn.who] >= MOST
            self.levels[turn.who] *= not counts
        self.counted += bool(counts and not self.has_counted)
        self.has_counted = self.has_counted or counts


class Program:
    """Optimizers, a step of a round's values, and what an oracle knows of it."""

    def __init__(self, family, seed):
        self.draw = draw = random.Random(seed)  # noqa: S311 - no secret
        self.mode = "graph" if seed % 10 == 0 else "eager"
        count = draw.choice([1, 1, 2, 2, 3])
        shares = count > 1 and draw.random() < 0.7
        order = draw.sample(range(count), count)
        self.turns = [turn_of(draw, who, shares) for who in order]
        # Nothing but a bad step moves it.
        rules = [(DynamicLossScale(HIGH, 10**6), Oracle()) for _ in range(count)]
        self.rules = [rules[0]] * count if shares else rules
        self.ours = [
            Trained(family, scale, (2,), nonfinite_loss="skip")
            for scale, _ in self.rules
        ]
        self.held = [tf.Variable([0.0, 0.0]) for _ in range(count)]
        #: A function for each choice of turns that a round takes.
        self.runs = {}

    def step(self, turns, values):
        for turn, batches in zip(turns, values):
            ours, held = self.ours[turn.who], self.held[turn.who]
            optimizer = ours.optimizer
            by = optimizer.loss_scale.scale if turn.by_itself else optimizer.scale_loss
            total = tf.zeros([2])
            for number, batch in enumerate(tf.unstack(batches)):
                loss, largest = tf.unstack(batch)
                grads = of_loss(by, loss, [tf.stack([largest, 0.25])])
                is_dropped = number == 0 and turn.drops is not None
                if turn.drops == "unscaled" if is_dropped else turn.unscales:
                    grads = optimizer.get_unscaled_gradients(grads)
                    grads = [tf.clip_by_value(grads[0], -1.0, 1.0)]
                total = total if is_dropped else total + grads[0]
            if turn.is_hidden and self.mode == "eager":
                total = tf.constant(total.numpy())
            elif turn.is_hidden:
                held.assign(total)
                total = tf.convert_to_tensor(held)
            ours.apply([total])

    def round(self, mood):
        """Takes some of the turns."""
        draw, turns = self.draw, self.turns
        if draw.random() < 0.5:
            some = draw.sample(turns, draw.randint(1, len(turns)))
            turns = [each for each in turns if each in some]
        counts = [turn.batches + (turn.drops is not None) for turn in turns]
        values = [[draw.choice(MOODS[mood]) for _ in range(takes)] for takes in counts]
        key = tuple(turn.who for turn in turns)
        if key not in self.runs:
            function = lambda values: self.step(turns, values)  # noqa: E731
            self.runs[key] = compiled(function, self.mode)
        self.runs[key](list(map(tf.constant, values)))
        for _, oracle in self.rules if self.mode == "graph" else []:
            oracle.begin()  # a graph is one step of all who share the loss scale
        for turn, batches in zip(turns, values):
            self.rules[turn.who][1].turn(turn, batches)

    def offence(self):
        """Returns where a loss scale and the oracle differ, or None."""
        mood = "mixed"
        for number in range(ROUNDS):
            if self.draw.random() < 0.15:
                mood = self.draw.choice([*MOODS, "often"])
            self.round(mood)
            for scale, oracle in self.rules:
                found = round(np.log2(HIGH / float(scale.numpy())))
                if found != oracle.counted:
                    return f"round {number}: lowered {found}, not {oracle.counted}"
        return None


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 38), marks=pytest.mark.slow)]
)
def test_a_loss_scale_is_lowered_by_what_an_oracle_says(seeds):
    every = families()
    for seed in seeds:
        with heard():
            program = Program(every[seed % len(every)], seed)
            assert program.offence() is None, (seed, program.mode, program.turns)
