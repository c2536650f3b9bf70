"""Random programs whose losses and gradients are bad, and an oracle that knows why.

In each round every optimizer scales the losses of a few batches, may drop one of them,
adds up the gradients of the others and applies them. A loss scale is halved by each
step that it is told of, and by no other: so its value counts them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Optional

import numpy as np
import tensorflow as tf
from exact import heard, of_loss
from models import compiled, variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer

INF, NAN = float("inf"), float("nan")
START = 2.0**60
ROUNDS = 12
#: Of so many steps in a row that are skipped the rule is told of one.
TENTH = 10
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
        "overflows": [OVERFLOW],
        "both": [OVERFLOW, *BAD_LOSSES],
    }
    return [draw.choice(every[mood]) for turn in turns for _ in range(turn.takes)]


class Oracle:
    """Knows of a loss scale which of its optimizers' steps it must have been told."""

    def __init__(self):
        self.seen, self.in_a_row, self.told = set(), 0, 0

    def round(self, turns, values):
        """Takes a round: one step, of all who share the loss scale."""
        is_good, is_told = True, False
        for turn in turns:
            losses, grads = np.array([next(values) for _ in range(turn.takes)]).T
            if turn.drops:
                if turn.drops == "unscaled" and not np.isfinite(grads[0]):
                    self.seen.add(
                        turn.who
                    )  # an overflow waits until an apply counts it
                losses, grads = losses[1:], grads[1:]
            if np.isfinite(grads).all() and turn.who not in self.seen:
                continue
            is_good = False
            self.seen.discard(turn.who)
            is_of_loss = not turn.is_hidden and not np.isfinite(losses).all()
            is_told = is_told or not is_of_loss
        self.in_a_row = 0 if is_good else self.in_a_row + 1
        self.told += not is_good and (is_told or self.in_a_row % TENTH == 0)


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
        self.run = compiled(self.step, self.mode)

    def step(self, values):
        values = iter(tf.unstack(values))
        for turn in self.turns:
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
        """Returns what a loss scale was told that it should not have been, or None."""
        mood = "mixed"
        for number in range(ROUNDS):
            if self.draw.random() < 0.1:
                mood = self.draw.choice(["mixed", "losses", "overflows", "both"])
            values = values_of(self.draw, self.turns, mood)
            self.run(tf.constant(values))
            given, shares = iter(values), len(self.oracles) < len(self.optimizers)
            for turn in [self.turns] if shares else [[each] for each in self.turns]:
                oracle = self.oracles[0 if shares else turn[0].who]
                oracle.round(turn, given)
            for scale, oracle in zip(self.scales, self.oracles):
                told = round(np.log2(START / float(scale.numpy())))
                if told != oracle.told:
                    return f"round {number}: told {told} times, not {oracle.told}"
        return None


def offence(family, seed):
    """Returns what is wrong with the program of a seed, None if nothing is."""
    with heard():
        program = Program(family, seed)
        found = program.offence()
    text = f"{family.name}, seed {seed}, {program.mode}, {program.turns}: {found}"
    return None if found is None else text
