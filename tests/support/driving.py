"""Drives a loss scale through a run of finite and bad steps, each way it can run."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from models import compiled

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


def finite(run):
    """Returns the flags of a run written as "TTF"."""
    return [letter == "T" for letter in run]


def run(loss_scale, flags):
    """Returns the scale after each step of a run, adjusted eagerly."""
    seen = []
    for flag in flags:
        loss_scale.adjust(flag)
        seen.append(float(loss_scale))
    return seen


def drive(make, flags, mode, mirrored=None):
    """Returns what is seen after each step of a run.

    Args:
      make: Returns a new loss scale.
      flags: Whether each step is finite. On two replicas the infinity of a bad step is
        on the last one only.
      mode: One of `MODES`.
      mirrored: The strategy of the modes with replicas.

    Returns:
      `(scales, applied)`, two lists.
    """
    if mode == "v1":
        return _drive_session(make, flags)
    if "replica" in mode:
        return _drive_replicas(make, flags, mode, mirrored)
    loss_scale = make()

    def update(grad):
        return loss_scale.update([grad, None])[1]

    if mode != "eager":
        update = compiled(update, mode)
    scales, applied = [], []
    for flag in flags:
        applied.append(bool(update(tf.constant(_gradient(flag)))))
        scales.append(float(loss_scale()))
    return scales, applied


def _drive_session(make, flags):
    scales, applied = [], []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loss_scale = make()
        grad = tf.compat.v1.placeholder(tf.float32, [2])
        update_op, should_apply = loss_scale.update([grad, None])
        current = loss_scale()
        session.run(tf.compat.v1.global_variables_initializer())
        for flag in flags:
            fetched = [should_apply, update_op]
            if should_apply is True:
                fetched[0] = tf.constant(True)
            applied.append(bool(session.run(fetched, {grad: _gradient(flag)})[0]))
            scales.append(float(session.run(current)))
    return scales, applied


def _drive_replicas(make, flags, mode, mirrored):
    with mirrored.scope():
        loss_scale = make()

    def gradients(flag):
        context = tf.distribute.get_replica_context()
        last = context.replica_id_in_sync_group == context.num_replicas_in_sync - 1
        bad = tf.logical_and(last, tf.logical_not(flag))
        return [tf.where(bad, _gradient(False), _gradient(True)), None]

    def in_replica(flag):
        return loss_scale.update(gradients(flag))[1]

    def step(flag):
        if mode.startswith("replica"):
            return mirrored.run(in_replica, args=(flag,))
        grads = mirrored.run(gradients, args=(flag,))
        with mirrored.scope():
            return loss_scale.update(grads)[1]

    if mode.endswith("graph"):
        step = tf.function(step)
    scales, applied = [], []
    for flag in flags:
        answers = mirrored.experimental_local_results(step(tf.constant(flag)))
        assert len({bool(answer) for answer in answers}) == 1
        applied.append(bool(answers[0]))
        scales.append(float(loss_scale.numpy()))
        for variable in loss_scale.variables:
            copies = mirrored.experimental_local_results(variable)
            assert len({copy.numpy().item() for copy in copies}) == 1
    return scales, applied


def _gradient(flag):
    return np.array([1.0, 2.0 if flag else np.inf], np.float32)
