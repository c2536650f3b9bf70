"""What loss scaling adds to a step on 1, 2, 4 and 8 replicas, and what crosses them.

    python benchmarks/replicas.py

The replicas are virtual: parts of this machine's CPU under MirroredStrategy. So figures
for several replicas say how much is computed, not how fast a real cluster is. The table
compares our wrapper with Keras 2's. Keras 3's does not compute the same thing: it looks
at one replica only. All kinds of steps take turns in one process; figures are medians,
± the error (`timing.py`). Each number of replicas has a process of its own, as
TensorFlow reads this number once.
"""

import argparse
import functools
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
import timing

import lossscale
from lossscale.runtime import keras_versions

REPLICAS = (1, 2, 4, 8)
#: The weights: 20 matrices, 5 MB.
SHAPES = [(256, 256)] * 20


# Kinds of steps


def kinds():
    """Returns the kinds of steps: the Keras, and a function that wraps an optimizer.

    Returns:
      A dictionary: name -> (keras, wrap).
    """
    found = {}
    keras_versions.imported("tf_keras")
    for keras in (*keras_versions.keras2()[:1], keras_versions.keras3()):
        if keras is None:
            continue
        is_newest = keras is keras_versions.keras3()
        name = "Keras 3" if is_newest else "Keras 2"
        found[f"{name}, bare"] = keras, lambda optimizer: optimizer
        if not is_newest:
            wrapper = keras.mixed_precision.LossScaleOptimizer
            found["Keras 2, its own wrapper"] = keras, wrapper
        found[f"{name}, lossscale"] = keras, lossscale.LossScaleOptimizer
    return found


def make_optimizer(strategy, keras, wrap):
    """Returns an optimizer, and weights for it, on every replica."""
    make_variable = keras.Variable if keras is keras_versions.keras3() else tf.Variable
    with strategy.scope():
        weights = [make_variable(np.ones(shape, np.float32)) for shape in SHAPES]
        optimizer = wrap(keras.optimizers.SGD(2.0**-10))
    return optimizer, weights


def make_step(strategy, optimizer, weights):
    """Returns a `tf.function` that applies gradients to `weights` on every replica."""
    if hasattr(optimizer, "build"):  # Keras 2's bare legacy optimizers need no build
        with strategy.scope():
            optimizer.build(weights)

    def step_of_one_replica(factor):
        grads = [tf.fill(weight.shape, factor) for weight in weights]
        if hasattr(optimizer, "get_unscaled_gradients"):
            scaled = optimizer.get_scaled_loss(tf.constant(1.0))
            grads = optimizer.get_unscaled_gradients([g * scaled for g in grads])
        optimizer.apply_gradients(list(zip(grads, weights)))

    return tf.function(lambda factor: strategy.run(step_of_one_replica, (factor,)))


def bare_of(name):
    """Returns the bare kind of step with which `name` is compared."""
    return name.split(",")[0] + ", bare"


def measure(steps, seconds):
    """Returns each kind of step's time, and what it adds to a bare step, in ms."""
    factor = tf.constant(2.0**-10)
    calls = {name: functools.partial(step, factor) for name, step in steps.items()}
    runs = {name: timing.timed(call) for name, call in calls.items()}
    times = timing.interleaved(runs, seconds)
    return {
        name: (timing.milliseconds(found), timing.added(found, times[bare_of(name)]))
        for name, found in times.items()
    }


# What crosses replicas


def crossings(function, replicas):
    """Counts in a graph how often a step brings values of all replicas together.

    That is a collective on each replica, or a sum of tensors on several devices. It
    does not count branches of `tf.cond` that change no state, which run only in doubt,
    or the side of a branch that only a skipped step takes.

    Args:
      function: A concrete function.
      replicas: How many replicas this process has.

    Returns:
      An int.
    """
    definition = function.graph.as_graph_def()
    library = {each.signature.name: each for each in definition.library.function}

    def changes_state(nodes):
        return any(
            node.op.startswith(("Assign", "ResourceApply"))
            or any(changes_state(body) for body in bodies(node))
            for node in nodes
        )

    def bodies(node, but=()):
        kept = (value for key, value in node.attr.items() if key not in but)
        names = [value.func.name for value in kept if value.func.name]
        return [library[name].node_def for name in names if name in library]

    def count(nodes):
        device = {node.name: node.device for node in nodes}
        total = 0.0
        for node in nodes:
            if node.op.startswith("Collective"):
                total += 1 / replicas
            elif node.op == "AddN":
                sources = {name.split(":")[0] for name in node.input}
                devices = {device.get(name, "") for name in sources}
                # TensorFlow 2.4 has no devices here; it names all replicas but one.
                others = sum("replica_" in name for name in sources)
                total += len(devices) > 1 or 0 < others < len(sources)
            inside = bodies(node)
            if node.op in ("If", "StatelessIf") and not any(map(changes_state, inside)):
                continue
            total += sum(count(body) for body in bodies(node, but=["else_branch"]))
        return total

    return round(count(definition.node))


# The table


def run_here(replicas, seconds):
    """Measures this number of replicas in this process, and prints JSON."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, parts)
    devices = [f"CPU:{number}" for number in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices)
    steps = {
        name: make_step(strategy, *make_optimizer(strategy, keras, wrap))
        for name, (keras, wrap) in kinds().items()
    }
    spec = tf.TensorSpec([], tf.float32)
    counts = {
        name: crossings(step.get_concrete_function(spec), replicas)
        for name, step in steps.items()
    }
    print(json.dumps({"times": measure(steps, seconds), "counts": counts}))


def table(results):
    """Returns a Markdown table, with the number of crossings in brackets."""
    names = list(next(iter(results.values()))["times"])
    rows = []
    for replicas, result in results.items():
        cells = [str(replicas)]
        for name in names:
            step, more = (timing.Figure(*each) for each in result["times"][name])
            is_bare = name == bare_of(name)
            shown = step.shown(2) if is_bare else more.shown(2, "+")
            cells.append(f"{shown} ({result['counts'][name]})")
        rows.append(cells)
    return timing.markdown(["replicas, ms", *names], rows)


def main():
    """Prints the table, or one row's figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS)
    parser.add_argument("--seconds", type=float, default=10, help="rounds of one row")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    timing.add_plain(parser)
    options = parser.parse_args()
    if options.here:
        run_here(*options.replicas, options.seconds)
        return
    timing.keep_memory(options.plain)
    results = {}
    for count in options.replicas:
        given = ["--here", "--replicas", str(count), "--seconds", str(options.seconds)]
        results[count] = json.loads(timing.printed_last(*given))
    print(table(results))


if __name__ == "__main__":
    main()
