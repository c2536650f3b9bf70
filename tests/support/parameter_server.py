"""A coordinator with two workers and a parameter server, all in this process.

    python parameter_server.py KERAS

Prints what came of each attempt, as JSON. test_processes.py starts it.
"""

from __future__ import annotations

import json
import os
import sys

import installed
import strategies
import tensorflow as tf
from models import variable_of
from processes import free_ports

from lossscale import DynamicLossScale, LossScaleOptimizer


def cluster():
    """Starts the servers, and returns the strategy over them."""
    jobs = ["worker", "worker", "ps"]
    addresses = [f"localhost:{port}" for port in free_ports(len(jobs))]
    spec = tf.train.ClusterSpec({"worker": addresses[:2], "ps": addresses[2:]})
    # On two cores the servers have too few threads to wait for each other, and hang.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=len(jobs) + 1)
    for job, index in (("worker", 0), ("worker", 1), ("ps", 0)):
        tf.distribute.Server(spec, job, index, protocol="grpc", config=config)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, rpc_layer="grpc"
    )
    return tf.distribute.experimental.ParameterServerStrategy(resolver)


def fit(strategy, family, make):
    with strategy.scope():
        model = strategies.linear(family, make(), "float32")
    data = tf.data.Dataset.from_tensor_slices(strategies.rows(strategies.RUN[:1]))
    model.fit(data.batch(strategies.ROWS).repeat(), steps_per_epoch=1, verbose=0)
    return "trained"


def loop(strategy, family, make):
    """Schedules steps on the workers, of which one in three is not finite."""
    with strategy.scope():
        variable = variable_of(family, [1.0, 2.0])
        optimizer = make()
        optimizer.build([variable])

    def each(special):
        grad = tf.stack([special, 1.0])
        grad *= optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply_gradients([(grad, variable)])

    step = tf.function(lambda special: strategy.run(each, (special,)))
    experimental = tf.distribute.experimental.coordinator
    coordinator = experimental.ClusterCoordinator(strategy)
    for special in [1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0]:
        coordinator.schedule(step, (tf.constant(special),))
        # Two steps at one moment lose one of two additions to a counter, Keras's too.
        coordinator.join()
    scale = optimizer.loss_scale
    return {
        "weights": strategies.copies(None, variable)[0].tolist(),
        "skipped": int(scale.skipped_steps.numpy()),
        "scale": float(scale.numpy()),
        "iterations": int(optimizer.iterations.numpy()),
    }


def main():
    name = sys.argv[1]
    strategy = cluster()
    family = {each.name: each for each in installed.families()}[name]

    def ours():
        inner = family.optimizers.SGD(0.25)
        return LossScaleOptimizer(inner, DynamicLossScale(64.0))

    def keras_own():
        inner = strategies.momentum(family)
        if name == "keras3":
            return inner  # a bare one fails too
        return family.keras.mixed_precision.LossScaleOptimizer(inner)

    answers = {}
    for attempt, make in ((fit, ours), (fit, keras_own), (loop, ours)):
        try:
            answer = attempt(strategy, family, make)
        except Exception as error:
            answer = str(error)
        answers[f"{attempt.__name__}-{make.__name__}"] = answer
    print(json.dumps(answers), flush=True)
    os._exit(0)  # the servers never end


if __name__ == "__main__":
    main()
