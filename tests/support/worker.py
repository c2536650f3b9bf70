"""One of two workers that train in step: a program that test_processes.py starts.

    python worker.py RANK PORT,PORT FOLDER KERAS WAY,WAY [--save-at N] [--wait-at N]

It trains each way, one after the other: `resumed` goes on from what `loop` has saved.
Writes what it saw to FOLDER/RANK.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import benchmark
import installed
import strategies
import tensorflow as tf
from models import variable_of

import lossscale

#: Worker 0 overflows at step 5, worker 1 at step 9.
RUN = [("none", None)] * 12
RUN[5] = ("first", float("inf"))
RUN[9] = ("last", float("nan"))


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("ports")
    parser.add_argument("folder", type=Path)
    parser.add_argument("keras")
    parser.add_argument("ways", type=lambda ways: ways.split(","))
    parser.add_argument("--save-at", type=int)
    parser.add_argument("--wait-at", type=int)
    return parser.parse_args()


class Interruption:
    """Saves after one step, and waits to be killed after another."""

    def __init__(self, given, resumes):
        self.given, self.resumes = given, resumes

    def path(self, rank):
        return str(self.given.folder / f"checkpoint-{rank}" / "state")

    def begin(self, **trackables):
        self.step = tf.Variable(0, dtype=tf.int64)
        self.checkpoint = tf.train.Checkpoint(step=self.step, **trackables)
        if self.resumes:  # every worker from the first one's
            self.checkpoint.read(self.path(0)).assert_existing_objects_matched()
        return int(self.step.numpy())

    def after(self, step):
        if step == self.given.save_at:
            self.step.assign(step + 1)
            self.checkpoint.write(self.path(self.given.rank))
        if step == self.given.wait_at:
            print("waiting", flush=True)
            sys.stdin.read()


def dataset_of(strategy, rank):
    """Returns a function that makes this worker's half of each batch."""
    x, y = strategies.rows(RUN)
    half = strategies.ROWS // 2

    def part(values, first):
        batches = values.reshape(len(RUN), 2, half, -1)[first:, rank]
        return batches.reshape(-1, batches.shape[-1])

    def make(first):
        def pipeline(_):
            pair = part(x, first), part(y, first)
            return tf.data.Dataset.from_tensor_slices(pair).batch(half, True)

        return strategy.distribute_datasets_from_function(pipeline)

    return make


def look(strategy, family, rank):
    """Returns what a loss scale sees whose largest gradients are the last worker's."""
    with strategy.scope():
        loss_scale = lossscale.HeadroomLossScale(2.0**10, half_life=1e4)
        sgd = family.optimizers.SGD(1.0)
        optimizer = lossscale.LossScaleOptimizer(sgd, loss_scale)
        variable = variable_of(family, [1.0, 1.0])

    def replica(grad):
        grads = optimizer.get_unscaled_gradients([optimizer.scale_loss(grad)])
        grads = [tf.clip_by_norm(grad, 2.0**-6) for grad in grads]
        optimizer.apply_gradients(zip(grads, [variable]))

    @tf.function
    def step(grad):
        strategy.run(replica, args=(grad,))

    seen = []
    for largest in (2.0**-12, 2.0**-2, float("nan"), 2.0**-30):
        step(tf.constant([0.0, -largest if rank == 1 else 2.0**-20]))
        state = (loss_scale.last_largest, loss_scale, loss_scale.skipped_steps)
        seen.append([float(each.numpy()) for each in state])
    return seen


def main():
    given = arguments()
    workers = [f"localhost:{port}" for port in given.ports.split(",")]
    task = {"type": "worker", "index": given.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == len(workers)
    family = {each.name: each for each in installed.families()}[given.keras]
    data = dataset_of(strategy, given.rank)
    told = {way: answer(strategy, family, given, data, way) for way in given.ways}
    (given.folder / f"{given.rank}.json").write_text(json.dumps(told))


def answer(strategy, family, given, data, way):
    """Returns what is seen one way."""
    if way == "failing-fits":
        return {
            name: error_of_fit(strategy, family, data, wrap)
            for name, wrap in (
                ("bare", lambda inner: inner),
                ("wrapped", lossscale.LossScaleOptimizer),
            )
        }
    if way == "tell":
        return {
            "looked": look(strategy, family, given.rank),
            "crossings": benchmark.count(strategy, family, [(2,), (3, 4)]),
        }
    return trained(strategy, family, given, data, way)


def error_of_fit(strategy, family, data, wrap):
    """Returns what `fit` says, which fails."""
    with strategy.scope():
        model = strategies.linear(family, wrap(strategies.momentum(family)), "float32")
    try:
        model.fit(data(0), steps_per_epoch=len(RUN))
    except Exception as error:
        return str(error)
    return ""


def trained(strategy, family, given, data, way):
    """Returns what is seen after each step."""
    hook = Interruption(given, way == "resumed")
    options = {"communication_dtype": "float16"} if way == "float16" else {}
    if way == "fit":
        seen = strategies.fit(strategy, family, RUN, hook=hook, data=data, **options)
    else:
        seen = strategies.loop(strategy, family, RUN, hook=hook, **options)
    return {
        "weights": [[one.tolist() for one in step] for step in seen.weights],
        "states": seen.states,
        "iterations": seen.iterations,
    }


if __name__ == "__main__":
    main()
