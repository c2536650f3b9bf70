"""A training run that may be killed at any moment, started by a test.

    python trainee.py KERAS FOLDER

Starts a process that saves every few steps, and starts another if that one is killed,
which goes on from the newest checkpoint. Each prints its number first, then a line
before each step and before each checkpoint, so that it can be killed within either.
After the last step it writes FOLDER/end.npz and waits to be told to end.

TensorFlow is imported once: nothing of it has run yet when a process splits off.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import installed
import numpy as np
import tensorflow as tf
from models import data, regression, training_state, with_infinity

from lossscale import DynamicLossScale, LossScaleOptimizer

STEPS = 150
SAVE_EVERY = 3


def flags():
    """Returns whether each step is finite."""
    return np.random.default_rng(5).random(STEPS) < 0.8


def make(family):
    scale = DynamicLossScale(
        2.0**10, 3, hysteresis=2, hysteresis_reset=["backoff"], max_loss_scale=2.0**20
    )
    return regression(family, LossScaleOptimizer(family.optimizers.Adam(0.01), scale))


def ignore(step):
    """Does nothing at a step."""


def train(model, first, before=ignore, after=ignore):
    """Trains from a step to the end."""
    x, y = data(np.random.default_rng(7), 16)
    bad, all_flags = with_infinity(x), flags()
    for step in range(first, STEPS):
        before(step)
        batch = x if all_flags[step] else bad
        model.train_on_batch(np.roll(batch, step, axis=1), y)
        after(step)


def state(model):
    """Returns all that must be equal at the end."""
    scale = model.optimizer.loss_scale
    return [np.array(v.numpy()) for v in scale.variables] + training_state(model)


def live(family, folder):
    """Trains to the end, from where the process before this one was killed."""
    model, done = make(family), tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, done=done)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
    manager.restore_or_initialize()
    first = int(done.numpy())
    print("from", first, os.getpid(), flush=True)

    def before(step):
        print("step", step, flush=True)

    def after(step):
        if (step + 1) % SAVE_EVERY == 0:
            print("saving", step, flush=True)
            done.assign(step + 1)
            manager.save()

    train(model, first, before, after)
    np.savez(str(folder / "end.npz"), *state(model))
    print("end", flush=True)
    sys.stdin.readline()


def main():
    family = {each.name: each for each in installed.families()}[sys.argv[1]]
    while True:
        number = os.fork()
        if number == 0:
            live(family, Path(sys.argv[2]))
            return
        _, status = os.waitpid(number, 0)
        if status != signal.SIGKILL:
            sys.exit(status)


if __name__ == "__main__":
    main()
