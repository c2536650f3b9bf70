"""A training run that may be killed at any moment, started by a test.

    python trainee.py KERAS FOLDER

Starts a process that saves every few steps, and starts another if that one is killed,
which goes on from the newest checkpoint. Each prints its number first, then a line
before each step and before each checkpoint, so that it can be killed within either.
After the last step it writes FOLDER/end.npz and waits to be told to end.

TensorFlow is imported once: nothing of it has run yet when a process splits off.
"""

import os
import signal
import sys
from pathlib import Path

import installed
import numpy as np
import tensorflow as tf
from models import data, regression, whole_state, with_infinity

from lossscale import DynamicLossScale, LossScaleOptimizer

STEPS = 150
SAVE_EVERY = 3


def make(family):
    scale = DynamicLossScale(
        2.0**10, 3, hysteresis=2, hysteresis_reset=["backoff"], max_loss_scale=2.0**20
    )
    return regression(family, LossScaleOptimizer(family.optimizers.Adam(0.01), scale))


def train(model, first=0):
    """Trains from a step to the end, and yields the number of each step before it."""
    x, y = data(np.random.default_rng(7), 16)
    bad = with_infinity(x)
    is_finite = np.random.default_rng(5).random(STEPS) < 0.8
    for step in range(first, STEPS):
        yield step
        batch = x if is_finite[step] else bad
        model.train_on_batch(np.roll(batch, step, axis=1), y)


def live(family, folder):
    """Trains to the end, from where the process before this one was killed."""
    model, done = make(family), tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, done=done)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
    manager.restore_or_initialize()
    first = int(done.numpy())
    print("from", first, os.getpid(), flush=True)
    for step in train(model, first):
        if step > first and step % SAVE_EVERY == 0:
            print("saving", step, flush=True)
            done.assign(step)
            manager.save()
        print("step", step, flush=True)
    np.savez(str(folder / "end.npz"), *whole_state(model))
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
