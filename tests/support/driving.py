"""Drives a loss scale through a run of finite and bad steps, each way it can run."""

import numpy as np
import tensorflow as tf
from models import compiled
from strategies import assert_bit_equal, last_replica_gets

#: Every way in which `update` can run.
MODES = [
    "eager",
    "graph",
    "xla",
    "v1",
    "replica",
    "replica-graph",
    "cross-replica",
    "cross-replica-graph",
]
#: The slow ones of them.
EAGER_REPLICAS = ["replica", "cross-replica"]
#: The largest gradient of the replicas before the last.
ON_OTHERS = 2.0**-60


def finite(run):
    """Returns the flags of a run written as "TTF"."""
    return [letter == "T" for letter in run]


def magnitude(number):
    """Returns the greatest magnitude of a step's gradients, by the step's number."""
    return 2.0 ** (number * 5 % 13 - 9)


def run(loss_scale, flags):
    """Returns the scale after each step of a run, adjusted eagerly."""
    seen = []
    for flag in flags:
        loss_scale.adjust(flag)
        seen.append(float(loss_scale))
    return seen


def state(loss_scale):
    return [variable.numpy().tolist() for variable in loss_scale.variables]


def drive(make, run, mode, mirrored=None):
    """Returns what is seen after each step of a run.

    Args:
      make: Returns a new loss scale.
      run: Whether each step is finite, or pairs of that and its largest gradient. On
        two replicas the infinity of a bad step is on the last one only, and so is the
        largest gradient of a good one, if it is at least `ON_OTHERS`.
      mode: One of `MODES`.
      mirrored: The strategy of the modes with replicas, of one or more.

    Returns:
      `(scales, applied)`, two lists.
    """
    pairs = [
        each if isinstance(each, tuple) else (each, magnitude(number))
        for number, each in enumerate(run)
    ]
    grads = [
        np.array([-largest, largest / 4 if flag else np.inf], np.float32)
        for flag, largest in pairs
    ]
    if mode == "v1":
        return _drive_session(make, grads)
    if "replica" in mode:
        return _drive_replicas(make, grads, mode, mirrored)
    loss_scale = make()

    def update(grad):
        return loss_scale.update([grad, None])[1]

    if mode != "eager":
        update = compiled(update, mode)
    scales, applied = [], []
    for each in grads:
        applied.append(bool(update(tf.constant(each))))
        scales.append(float(loss_scale()))
    return scales, applied


def _drive_session(make, grads):
    scales, applied = [], []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loss_scale = make()
        grad = tf.compat.v1.placeholder(tf.float32, [2])
        update_op, should_apply = loss_scale.update([grad, None])
        current = loss_scale()
        session.run(tf.compat.v1.global_variables_initializer())
        for each in grads:
            fetched = [should_apply, update_op]
            if should_apply is True:
                fetched[0] = tf.constant(True)
            applied.append(bool(session.run(fetched, {grad: each})[0]))
            scales.append(float(session.run(current)))
    return scales, applied


def _drive_replicas(make, grads, mode, mirrored):
    with mirrored.scope():
        loss_scale = make()

    def gradients(grad):
        return [last_replica_gets(grad, [0.0, ON_OTHERS]), None]

    def in_replica(grad):
        return loss_scale.update(gradients(grad))[1]

    def step(grad):
        if mode.startswith("replica"):
            return mirrored.run(in_replica, args=(grad,))
        grads = mirrored.run(gradients, args=(grad,))
        with mirrored.scope():
            return loss_scale.update(grads)[1]

    if mode.endswith("graph"):
        step = tf.function(step)
    scales, applied = [], []
    for each in grads:
        answers = mirrored.experimental_local_results(step(tf.constant(each)))
        assert len({bool(answer) for answer in answers}) == 1
        applied.append(bool(answers[0]))
        scales.append(float(loss_scale.numpy()))
        assert_bit_equal(mirrored, loss_scale.variables)
    return scales, applied
