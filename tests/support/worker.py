"""One of two workers that train in step: a program that test_processes.py starts.

    python worker.py JSON

The JSON has its "rank", the "ports" of all, a "folder", the "keras" and the "ways" to
train, one after the other: "resumed" goes on from what "loop" has saved after the step
"save_at". After the step "wait_at" it waits to be killed. Writes what it saw to
`FOLDER/RANK.json`.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import benchmark
import installed
import strategies
import tensorflow as tf
from exact import of_loss
from models import variable_of

import lossscale
from lossscale.runtime.keras_versions import tensor_of

#: Worker 0 overflows at step 5, worker 1 at step 9.
RUN = [("none", None)] * 12
RUN[5] = ("first", float("inf"))
RUN[9] = ("last", float("nan"))
SMALL, INF, NAN = 2.0**-20, float("inf"), float("nan")
#: The loss and the gradient of each worker, step by step.
TOLD = [
    ([1.0, 1.0], [SMALL, -(2.0**-12)]),
    ([1.0, 1.0], [SMALL, 2.0**-2]),
    ([1.0, NAN], [SMALL, NAN]),  # a bad loss
    ([1.0, 1.0], [SMALL, INF]),  # an overflow
    ([1.0, NAN], [INF, NAN]),  # both: an overflow
    ([1.0, INF], [SMALL, NAN]),
    ([1.0, 1.0], [SMALL, 2.0**-30]),
]


def interrupted(strategy, family, given, resumes):
    """Trains, saves after one step, and waits to be killed after another."""

    def path(rank):
        return str(Path(given.folder) / f"checkpoint-{rank}" / "state")

    loop, step = strategies.Loop(strategy, family), tf.Variable(0, dtype=tf.int64)
    held = {"variable": tensor_of(loop.variable), "optimizer": loop.optimizer}
    checkpoint = tf.train.Checkpoint(step=step, **held)
    if resumes:  # every worker from the first one's
        checkpoint.read(path(0)).assert_existing_objects_matched()
    for number in loop.steps(RUN, int(step.numpy())):
        if number == given.save_at:
            step.assign(number + 1)
            checkpoint.write(path(given.rank))
        if number == given.wait_at:
            print("waiting", flush=True)
            sys.stdin.read()
    return loop.seen


def half_batches(strategy, rank):
    """Returns a dataset of this worker's half of each batch."""
    half = strategies.ROWS // 2

    def part(values):
        batches = values.reshape(len(RUN), 2, half, -1)[:, rank]
        return batches.reshape(-1, batches.shape[-1])

    def pipeline(_):
        pair = tuple(map(part, strategies.rows(RUN)))
        return tf.data.Dataset.from_tensor_slices(pair).batch(half, True)

    return strategy.distribute_datasets_from_function(pipeline)


def tell(strategy, family, rank):
    """Returns what a loss scale learns of what only one of the workers sees."""
    with strategy.scope():
        scale = lossscale.HeadroomLossScale(2.0**10, half_life=1e4)
        sgd = family.optimizers.SGD(1.0)
        optimizer = lossscale.LossScaleOptimizer(sgd, scale, nonfinite_loss="skip")
        variable = variable_of(family, [1.0, 1.0])
        optimizer.build([variable])

    def replica(loss, grad):
        grads = of_loss(optimizer.scale_loss, loss, [grad * tf.ones([2])])
        grads = optimizer.get_unscaled_gradients(grads)
        grads = [tf.clip_by_norm(grad, 2.0**-6) for grad in grads]
        optimizer.apply_gradients(zip(grads, [variable]))

    step, seen = tf.function(lambda *each: strategy.run(replica, each)), []
    for losses, grads in TOLD:
        step(tf.constant(losses[rank]), tf.constant(grads[rank]))
        state = (scale.last_largest, scale, scale.skipped_steps)
        seen.append([float(each.numpy()) for each in state])
    return {
        "seen": seen,
        "why": [why for _, why in optimizer.engine.record.skipped()[1]],
        "crossings": benchmark.count(strategy, family, [(2,), (3, 4)]),
    }


def errors_of_fit(strategy, family, rank):
    """Returns what `fit` says, which fails, bare and wrapped."""
    found = []
    for wrap in (lambda inner: inner, lossscale.LossScaleOptimizer):
        with strategy.scope():
            inner = wrap(strategies.momentum(family))
            model = strategies.linear(family, inner, "float32")
        try:
            model.fit(half_batches(strategy, rank), steps_per_epoch=len(RUN))
        except Exception as error:
            found.append(str(error))
    return found


def answer(strategy, family, given, way):
    """Returns what is seen one way."""
    if way == "failing-fits":
        return errors_of_fit(strategy, family, given.rank)
    if way == "tell":
        return tell(strategy, family, given.rank)
    if way == "fit":
        data = half_batches(strategy, given.rank)
        seen = strategies.fit(strategy, family, RUN, data)
    elif way == "float16":
        seen = strategies.loop(strategy, family, RUN, communication_dtype=way)
    else:
        seen = interrupted(strategy, family, given, resumes=way == "resumed")
    weights = [[one.tolist() for one in step] for step in seen.weights]
    return {**vars(seen), "weights": weights}


def main():
    given = SimpleNamespace(**json.loads(sys.argv[1]))
    workers = [f"localhost:{port}" for port in given.ports]
    task = {"type": "worker", "index": given.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == len(workers)
    family = {each.name: each for each in installed.families()}[given.keras]
    told = {way: answer(strategy, family, given, way) for way in given.ways}
    Path(given.folder, f"{given.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
