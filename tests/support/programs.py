"""Random programs: optimizers, alone or sharing a loss scale, whose steps interleave.

Each optimizer trains a weight of its own with SGD(1.0). A batch's true gradient is a
power of two, so NumPy's sum of what was applied is exact, whatever the loss scale was.
A loss scale grows after two good steps in a row, so it moves while gradients wait.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Optional

import numpy as np
import tensorflow as tf
from exact import START, Trained, gradients, heard
from models import compiled

from lossscale import DynamicLossScale

#: So many steps of each optimizer: an overflow, what it leaves, and a scale that moved.
STEPS = 3


@dataclass
class Recipe:
    """How one optimizer is trained.

    Attributes:
      scale: The number of its loss scale. Those with equal numbers share it.
      scales: Who multiplies its loss: "optimizer" or "loss scale".
      computes: The mode that computes gradients: "eager", "graph" or "xla".
      unscales: Where they are unscaled: "inside" of that, "eager", "function", or None
        for not at all.
      keeps: What keeps the gradients of batches: a "list", or a variable that is added
        to "inside" of the function or "outside".
      batches: How many batches are added up for a step.
      clips: Whether unscaled gradients are clipped, which hides an infinity.
      asks: Whether the true norm is asked before scaled gradients are applied.
      applies: "eager", "function", or "same": in the function that computes.
    """

    scale: int
    scales: str
    computes: str
    unscales: Optional[str]
    keeps: str
    batches: int
    clips: bool
    asks: bool
    applies: str


def drawn(draw: random.Random):
    """Returns a program: recipes, who does a part in which order, true gradients."""
    recipes, count = [], draw.randint(1, 3)
    shares = draw.random() < 0.7
    for number in range(count):
        unscales = draw.choice([None, "inside", "eager", "function"])
        is_shared = shares and count > 1
        # Whose a loss is that `LossScale.scale` scaled, nobody knows elsewhere.
        is_own = is_shared and unscales != "inside"
        # What is added up while another optimizer moves the scale must be unscaled.
        is_one = is_shared and unscales is None
        applies = draw.choice(["eager", "function", "same"])
        batches = 1 if is_one or applies == "same" else draw.randint(1, 3)
        # A total that was unscaled before is not unscaled again.
        later = unscales in ("eager", "function")
        recipes.append(
            Recipe(
                scale=0 if shares else number,
                scales="optimizer"
                if is_own
                else draw.choice(["optimizer", "loss scale"]),
                computes=draw.choice(["eager", "eager", "graph", "graph", "xla"]),
                unscales="inside" if unscales and applies == "same" else unscales,
                keeps=draw.choice(["list", "outside", "list" if later else "inside"]),
                batches=batches,
                clips=unscales is not None and draw.random() < 0.5,
                asks=unscales is None and draw.random() < 0.3,
                applies=applies,
            )
        )
    run = []
    for number, recipe in enumerate(recipes):
        run += [number] * (STEPS * (recipe.batches + 1))
    draw.shuffle(run)
    factors = [draw.choice([0.5, 0.25, 1.0, 2.0, float("inf")]) for _ in run]
    return recipes, run, factors


def clip(grad):
    return tf.clip_by_value(grad, -8.0, 8.0)


class Actor:
    """One optimizer of a program."""

    def __init__(self, family, recipe, loss_scale):
        self.recipe = recipe
        self.trained = Trained(family, loss_scale, (3, 2))
        self.trained.build()
        self.sums = [tf.Variable(tf.zeros([size])) for size in (3, 2)]
        self.kept = []
        self.seen, self.expected = [], START
        whole = recipe.applies == "same"
        compute = self.apply_at_once if whole else self.grads_of
        self.compute = compiled(compute, recipe.computes)
        self.apply = self.trained.apply
        if recipe.applies == "function":
            self.apply = tf.function(self.apply)
        self.unscale = self.trained.optimizer.get_unscaled_gradients
        if recipe.unscales == "function":
            self.unscale = tf.function(self.unscale)

    def grads_of(self, factor):
        optimizer = self.trained.optimizer
        is_own = self.recipe.scales == "optimizer"
        scale = optimizer.scale_loss if is_own else optimizer.loss_scale.scale
        grads = gradients(scale, factor, self.trained.variables)
        if self.recipe.unscales == "inside":
            grads = self.clipped(optimizer.get_unscaled_gradients(grads))
        if self.recipe.keeps == "inside":
            return self.added(grads)
        return grads

    def clipped(self, grads):
        return [clip(grad) for grad in grads] if self.recipe.clips else grads

    def added(self, grads):
        for total, grad in zip(self.sums, grads):
            total.assign_add(grad)
        return [tf.identity(total) for total in self.sums]

    def asked(self, grads):
        if self.recipe.asks:
            tf.linalg.global_norm(self.trained.optimizer.get_unscaled_gradients(grads))
        return grads

    def apply_at_once(self, factor):
        self.trained.apply(self.asked(self.grads_of(factor)))

    def part(self, factor):
        """Does the next part of a step: a batch, or after the last one the apply."""
        recipe = self.recipe
        if len(self.seen) < recipe.batches:
            self.seen.append(factor)
            grads = self.compute(tf.constant(factor))
            if recipe.applies == "same":
                self.end()
                return
            if recipe.unscales in ("eager", "function"):
                grads = self.clipped(self.unscale(grads))
            if recipe.keeps == "outside":
                grads = self.added(grads)
            self.kept.append(grads)
            return
        grads = self.kept[-1]
        if recipe.keeps == "list":
            grads = [tf.add_n(list(each)) for each in zip(*self.kept)]
        self.apply(self.asked(grads))
        self.end()

    def end(self):
        for total in self.sums:
            total.assign(tf.zeros_like(total))
        if np.isfinite(self.seen).all():
            self.expected -= sum(self.seen)
        self.seen, self.kept = [], []

    def is_right(self):
        return all(each == self.expected for each in self.values())

    def values(self):
        return [float(x) for v in self.trained.variables for x in np.array(v.numpy())]


def offence(family, seed):
    """Returns what is wrong with a program of a seed, None if nothing is."""
    recipes, run, factors = drawn(random.Random(seed))  # noqa: S311 - no secret
    scales = {each.scale: DynamicLossScale(1024.0, 2) for each in recipes}
    actors = [Actor(family, each, scales[each.scale]) for each in recipes]
    for at, (number, factor) in enumerate(zip(run, factors)):
        actor = actors[number]
        with heard() as told:
            actor.part(factor)
        if actor.is_right() == bool(told):
            what = f"warned of: {told[0][:60]}" if told else f"{actor.values()}"
            return (
                f"seed {seed}, part {at} of {run} with {factors}, optimizer {number}: "
                f"{what}, expected {actor.expected}: {recipes}"
            )
        if told:
            return None  # what follows is wrong, too
    return None
