"""Random programs whose losses and gradients are bad, and an oracle that knows why.

In each round every optimizer, or only some, scales the losses of a few batches, may
drop one of them, adds up the gradients of the others and applies them. A loss scale is
halved by each step that counts as an overflow, and by no other: so its value counts
them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Optional

import numpy as np
import tensorflow as tf
from exact import heard, of_loss
from models import compiled, variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer

INF, NAN = float("inf"), float("nan")
START = 2.0**60
ROUNDS = 30
#: A bad loss is ignored unless its optimizer's level comes to the first of these. Each
#: one adds the second, and an applied step takes 1 away.
MOST, ADDED = 40, 4
#: The loss and the largest gradient of a batch.
GOOD, MASKED, OVERFLOW = (1.0, 0.5), (INF, 0.5), (1.0, INF)
BAD_LOSSES = [(NAN, NAN), (INF, NAN), (INF, INF)]


@dataclass
class Turn:
    """What one optimizer does in a round.

    Attributes:
      who: The optimizer.
      drops: Whether it first drops a batch: "scaled", "unscaled", or None.
      batches: How many batches are added up.
      unscales: Whether each batch's gradients are unscaled, and then clipped.
      is_hidden: Whether the gradients go through NumPy, or a variable in a graph.
      by_itself: Whether `LossScale.scale` multiplies the losses.
    """

    who: int
    drops: Optional[str]
    batches: int
    unscales: bool
    is_hidden: bool
    by_itself: bool

    @property
    def takes(self):
        return self.batches + (self.drops is not None)


def drawn(draw):
    """Returns how many optimizers there are, whether they share, and their turns."""
    count = draw.choice([1, 1, 2, 2, 3])
    shares = count > 1 and draw.random() < 0.7
    turns = []
    for who in draw.sample(range(count), count):
        unscales = draw.random() < 0.5
        turns.append(
            Turn(
                who,
                drops=draw.choice([None, None, "scaled", "unscaled"]),
                batches=draw.choice([1, 1, 2, 3]),
                unscales=unscales,
                is_hidden=draw.random() < 0.25,
                by_itself=not (shares or unscales) and draw.random() < 0.3,
            )
        )
    return count, shares, turns


def values_of(draw, turns, mood):
    """Returns the loss and the largest gradient of each batch of a round."""
    every = {
        "mixed": [GOOD] * 5 + [MASKED, OVERFLOW, OVERFLOW, *BAD_LOSSES],
        "losses": [*BAD_LOSSES, MASKED],
        "often": [GOOD] * 4 + [*BAD_LOSSES, MASKED],
        "overflows": [OVERFLOW],
        "both": [OVERFLOW, *BAD_LOSSES],
    }
    return [draw.choice(every[mood]) for turn in turns for _ in range(turn.takes)]


class Oracle:
    """Knows of a loss scale how many steps of its optimizers must have lowered it."""

    def __init__(self):
        self.seen, self.levels, self.counted = set(), defaultdict(int), 0
        self._begin()

    def _begin(self):
        """Begins a step of the loss scale."""
        self.in_step, self.has_counted = set(), False

    def round(self, turns, values, is_eager):
        """Takes a round, which in a graph is one step of all who share the loss scale.

        In eager mode a step ends when an optimizer applies a second time.
        """
        if not is_eager:
            self._begin()
        for turn in turns:
            if turn.who in self.in_step:
                self._begin()
            self.in_step.add(turn.who)
            losses, grads = np.array([next(values) for _ in range(turn.takes)]).T
            if turn.drops:
                if turn.drops == "unscaled" and not np.isfinite(grads[0]):
                    # An overflow waits until an apply counts it.
                    self.seen.add(turn.who)
                losses, grads = losses[1:], grads[1:]
            if np.isfinite(grads).all() and turn.who not in self.seen:
                self.levels[turn.who] = max(self.levels[turn.who] - 1, 0)
                continue
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
        self.draw = random.Random(seed)  # noqa: S311 - no secret
        self.mode = "graph" if seed % 10 == 0 else "eager"
        count, shares, self.turns = drawn(self.draw)
        # Nothing but a bad step moves it.
        self.scales = [
            DynamicLossScale(START, 10**6) for _ in range(1 if shares else count)
        ]
        self.scales = self.scales * (count if shares else 1)
        self.optimizers = [
            LossScaleOptimizer(family.optimizers.SGD(0.5), scale, nonfinite_loss="skip")
            for scale in self.scales
        ]
        self.variables = [variable_of(family, [1.0, 1.0]) for _ in range(count)]
        for optimizer, variable in zip(self.optimizers, self.variables):
            optimizer.build([variable])
            optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for
        self.held = [tf.Variable([0.0, 0.0]) for _ in range(count)]
        self.oracles = [Oracle() for _ in {id(scale) for scale in self.scales}]
        #: A function for each choice of turns that a round takes.
        self.runs = {}

    def run(self, turns, values):
        """Takes a round of some of the turns."""
        key = tuple(turn.who for turn in turns)
        if key not in self.runs:
            self.runs[key] = compiled(
                lambda values: self.step(turns, values), self.mode
            )
        self.runs[key](tf.constant(values))

    def step(self, turns, values):
        values = iter(tf.unstack(values))
        for turn in turns:
            optimizer = self.optimizers[turn.who]
            by = optimizer.loss_scale.scale if turn.by_itself else optimizer.scale_loss

            def scaled(by=by):
                loss, largest = tf.unstack(next(values))
                return of_loss(by, loss, [tf.stack([largest, 0.25])])

            if turn.drops:
                grads = scaled()
                if turn.drops == "unscaled":
                    optimizer.get_unscaled_gradients(grads)
            total = tf.zeros([2])
            for _ in range(turn.batches):
                (grad,) = scaled()
                if turn.unscales:
                    (grad,) = optimizer.get_unscaled_gradients([grad])
                    grad = tf.clip_by_value(grad, -1.0, 1.0)
                total += grad
            if turn.is_hidden and self.mode == "eager":
                total = tf.constant(total.numpy())
            elif turn.is_hidden:
                self.held[turn.who].assign(total)
                total = tf.convert_to_tensor(self.held[turn.who])
            optimizer.apply_gradients([(total, self.variables[turn.who])])

    def offence(self):
        """Returns where a loss scale and the oracle differ, or None."""
        mood, is_eager = "mixed", self.mode == "eager"
        for number in range(ROUNDS):
            if self.draw.random() < 0.15:
                moods = ["mixed", "losses", "often", "often", "overflows", "both"]
                mood = self.draw.choice(moods)
            turns = self.turns
            if self.draw.random() < 0.5:
                some = self.draw.sample(turns, self.draw.randint(1, len(turns)))
                turns = [each for each in turns if each in some]
            values = values_of(self.draw, turns, mood)
            self.run(turns, values)
            given, shares = iter(values), len(self.oracles) < len(self.optimizers)
            for turn in [turns] if shares else [[each] for each in turns]:
                oracle = self.oracles[0 if shares else turn[0].who]
                oracle.round(turn, given, is_eager)
            for scale, oracle in zip(self.scales, self.oracles):
                found = round(np.log2(START / float(scale.numpy())))
                if found != oracle.counted:
                    return f"round {number}: lowered {found}, not {oracle.counted}"
        return None


def offence(family, seed):
    """Returns what is wrong with the program of a seed, None if nothing is."""
    with heard():
        program = Program(family, seed)
        found = program.offence()
    text = f"{family.name}, seed {seed}, {program.mode}, {program.turns}: {found}"
    return None if found is None else text
