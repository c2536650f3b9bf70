"""One of two ranks of Horovod: a program that test_horovod.py starts on each.

    horovodrun -np 2 python horovod_ranks.py FOLDER

Writes what came of each case to `FOLDER/RANK.json`: the weight, the loss scale, skipped
and applied steps, and those that float64 arithmetic in one process comes to; or what
was raised.
"""

import json
import sys
from functools import partial
from pathlib import Path

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import installed
import numpy as np
import tensorflow as tf
from exact import clip
from trained import RATE, START, ByEngine, ByKeras

import lossscale
from lossscale import DynamicLossScale, LossScaleOptimizer

FAMILIES = {family.name: family for family in installed.families()}


def gather(vector):
    return hvd.allgather(vector[tf.newaxis])


def own(ours, x, **options):
    """Returns the scaled gradients of this rank; with options, of all ranks."""
    with tf.GradientTape() as tape:
        scaled = ours.scale(tf.reduce_sum(ours.weight * x))
    tape = hvd.DistributedGradientTape(tape, **options) if options else tape
    return tape.gradient(scaled, [ours.weight])


def mean(ours, x, **options):
    return own(ours, x, op=hvd.Average, **options)


def rows(ours, x, **options):
    with tf.GradientTape() as tape:
        scaled = ours.scale(tf.reduce_sum(tf.gather(ours.weight, [0, 1]) * x))
    tape = hvd.DistributedGradientTape(tape, **options)
    ours.apply(tape.gradient(scaled, [ours.weight]))


def two_batches(ours, x):
    halves = [ours.unscale(own(ours, x / 2.0)) for _ in range(2)]
    ours.apply(hvd.grouped_allreduce([sum(pair) for pair in zip(*halves)]))


def in_a_loop(ours, x):
    def turn(i):
        ours.apply(ours.unscale(mean(ours, x)))
        return [i + 1]

    tf.while_loop(lambda i: i < 1, turn, [0])


def minimize(ours, x):
    loss = lambda: tf.reduce_sum(ours.weight * x)  # noqa: E731
    ours.optimizer.minimize(loss, [ours.variable])


both = hvd.grouped_allreduce
#: The programs that unscale each rank's own gradients: a step of one rank, whose own
#: true gradient is `x`. The second one hides an overflow from the other rank.
OWN = {
    "unscale, sum": lambda o, x: o.apply(both(o.unscale(own(o, x)))),
    "unscale, clip, sum": lambda o, x: o.apply(both(clip(o.unscale(own(o, x))))),
    "two batches": two_batches,
}
SUMMED = {
    "tape": lambda o, x: o.apply(mean(o, x)),
    "tape, unscale": lambda o, x: o.apply(o.unscale(mean(o, x))),
    "tape, unscale, clip": lambda o, x: o.apply(clip(o.unscale(mean(o, x)))),
    "fp16": lambda o, x: o.apply(mean(o, x, compression=hvd.Compression.fp16)),
    "by hand": lambda o, x: o.apply(both(own(o, x))),
    "rows": rows,
    "rows, dense": partial(rows, sparse_as_dense=True),
    "in functions": lambda o, x: tf.function(o.apply)(
        tf.function(lambda: mean(o, x))()
    ),
    "in a loop": in_a_loop,
    "eager": lambda o, x: o.apply(o.unscale(mean(o, x))),
    "minimize": minimize,
}
#: Those that each Keras runs, too.
OF_KERAS = {"tape", "minimize", "rows", "unscale, clip, sum"}
#: A step: the true gradient of each rank. 1e38 overflows once it is scaled, but the
#: loss is finite.
GOOD, OTHER = ([2.0, 0.5], [-1.0, 0.25]), ([0.5, 0.5], [0.25, -2.0])
OVERFLOW = ([2.0, 0.5], [1e38, 0.5])
BAD_LOSS = ([2.0, 0.5], [np.nan, 0.5])
BOTH = ([1e38, 0.5], [np.nan, 0.5])
SKIP = {"nonfinite_loss": "skip"}
#: What happens: the steps, the options, and whether the ranks agree by `gather`.
HAPPENS = {
    "an overflow": ([GOOD, OVERFLOW, OTHER, GOOD], {}, False),
    "an overflow, agreed": ([GOOD, OVERFLOW, OTHER], {}, True),
    "a bad loss, agreed": ([GOOD, BAD_LOSS, OTHER], SKIP, True),
    "a bad loss and an overflow, agreed": ([GOOD, BOTH, OTHER], SKIP, True),
    "a bad loss, not agreed": ([GOOD, BAD_LOSS, OTHER], SKIP, False),
}


def expected(steps, options, name):
    """Returns the state after all steps, in plain Python and float64."""
    weight, scale, good, skipped = np.float64(START), 64.0, 0, 0
    for step in steps:
        grads = np.float64(step)
        grads = np.clip(grads, -1.0, 1.0) if name == "unscale, clip, sum" else grads
        mean = grads.mean(axis=0)
        mean = np.clip(mean, -1.0, 1.0) if name == "tape, unscale, clip" else mean
        if step in (GOOD, OTHER):
            weight, good = weight - RATE * mean, good + 1
            if good == 2:
                scale, good = scale * 2.0, 0
            continue
        skipped += 1
        # A rank's own overflow is seen only if its own gradients were, in one list. In
        # another function than that of the loss nobody knows the loss.
        is_seen = name in OWN and name != "two batches"
        is_bad_loss = step == BAD_LOSS or (step == BOTH and not is_seen)
        if not (is_bad_loss and options) or name == "in functions":
            scale, good = scale / 2.0, 0
    return weight.tolist(), [scale, skipped, len(steps) - skipped]


def case(make, family, name, program, steps, options, agreed):
    options = {**options, "gather": gather} if agreed else options
    if name == "minimize":
        options = {**options, "wrap": hvd_keras.DistributedOptimizer}
    ours = make(DynamicLossScale(64.0, increment_period=2), family, **options)

    def step(x):
        program(ours, x)  # it may return an operation

    if name != "eager":
        step = tf.function(step, autograph=False)
    try:
        step(tf.constant(steps[0][hvd.rank()]))
    except ValueError as error:
        assert ours.state() == (START, [64.0, 0.0, 0.0])
        return str(error)
    for ranks in steps[1:]:
        step(tf.constant(ranks[hvd.rank()]))
    reports = [ours.engine.nonfinite_loss(), len(ours.engine.nonfinite_gradients())]
    return [*ours.state(), reports], [*expected(steps, options, name)]


def fit(family, steps, options, agreed):
    """Fits a model by a wrapper around Horovod's optimizer, as the page says."""
    options = {**options, "gather": gather} if agreed else options
    keras = family.keras
    inner = hvd_keras.DistributedOptimizer(family.optimizers.SGD(RATE))
    scale = DynamicLossScale(64.0, increment_period=2)
    optimizer = LossScaleOptimizer(inner, scale, **options)
    dense = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.layers.InputLayer((2,)), dense])
    model.compile(optimizer, loss=lambda _, y: tf.reduce_sum(y))
    model.set_weights([np.float32(START)[:, None] * (1 + hvd.rank())])
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    x = np.float32([ranks[hvd.rank()] for ranks in steps])
    try:
        quiet = {"batch_size": 1, "shuffle": False, "verbose": 0}
        model.fit(x, x[:, :1], callbacks=[callback], **quiet)
    except ValueError as error:
        return str(error)
    counts = (scale, scale.skipped_steps, optimizer.iterations)
    state = [float(each.numpy()) for each in counts]
    weight = model.get_weights()[0].ravel().tolist()
    return [weight, state, None], [*expected(steps, options, "fit")]


def refusals():
    """Returns what is said of what cannot be right, by what it is."""
    sgd, shape = FAMILIES["keras2-legacy"].optimizers.SGD, tf.constant([1.0, 1.0])
    distributed = hvd_keras.DistributedOptimizer
    ours = LossScaleOptimizer

    def wrong_shape(gather):
        one = ByEngine(DynamicLossScale(64.0), gather=gather)
        try:
            tf.function(partial(SUMMED["tape"], one))(shape)
        finally:
            assert one.state() == (START, [64.0, 0.0, 0.0])

    def v1():
        with tf.Graph().as_default():
            inner = tf.compat.v1.train.GradientDescentOptimizer(1.0)
            inner = hvd.DistributedOptimizer(inner, backward_passes_per_step=2)
            lossscale.compat.v1.LossScaleOptimizer(inner, "dynamic")

    attempts = {
        "passes": lambda: ours(distributed(sgd(), backward_passes_per_step=2)),
        "v1 passes": v1,
        "around ours": lambda: distributed(ours(sgd())),
        "around ours, new": lambda: distributed(
            ours(FAMILIES["keras2-new"].optimizers.SGD())
        ),
        "communication": lambda: ours(
            distributed(sgd()), communication_dtype="float16"
        ),
        "allgather of a vector": lambda: wrong_shape(hvd.allgather),
        "allreduce": lambda: wrong_shape(hvd.allreduce),
        "not a function": lambda: ours(sgd(), gather=hvd),
    }
    return {name: error_of(attempt) for name, attempt in attempts.items()}


def error_of(function):
    try:
        return str(function())
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def broadcast():
    """Returns a loss scale that broadcasting carries to every rank."""
    ours = ByKeras(DynamicLossScale(2.0 ** (6 + hvd.rank())), FAMILIES["keras2-new"])
    ours.engine.loss_scale.good_steps.assign(3 + hvd.rank())
    hvd.broadcast_variables(ours.optimizer.variables(), root_rank=0)
    scale = ours.engine.loss_scale
    return [float(scale), int(scale.good_steps.numpy())]


def largest():
    """Returns what every rank knows of the greatest gradient of all."""
    scale = lossscale.HeadroomLossScale(2.0**10, half_life=1e4)
    guard = lossscale.SpikeGuard(window=4, threshold=8.0)
    ours = ByEngine(scale, guard=guard, gather=gather)
    step, seen = tf.function(partial(OWN["unscale, sum"], ours), autograph=False), []
    for largest in (1.0, 2.0, 1.0, 2.0, 4096.0, 1.0):
        step(tf.constant([0.5, largest if hvd.rank() else 0.25]))
        seen.append([float(scale.last_largest.numpy()), *ours.state()[1]])
    return seen


def main():
    hvd.init()
    kinds = {"engine": (ByEngine, None)}
    kinds.update({name: (ByKeras, family) for name, family in FAMILIES.items()})
    told = {"refused": refusals(), "broadcast": broadcast(), "largest": largest()}
    told["cases"] = cases = {}
    for kind, (make, family) in kinds.items():
        for name, program in {**SUMMED, **OWN}.items():
            if name == "minimize" if family is None else name not in OF_KERAS:
                continue
            for what, happens in HAPPENS.items():
                if name == "unscale, clip, sum" and what == "an overflow":
                    continue  # what the page warns of: the ranks do not agree
                answer = case(make, family, name, program, *happens)
                cases[f"{kind}: {name}: {what}"] = answer
        if family is not None:
            for what, happens in HAPPENS.items():
                cases[f"{kind}: fit: {what}"] = fit(family, *happens)
    Path(sys.argv[1], f"{hvd.rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
