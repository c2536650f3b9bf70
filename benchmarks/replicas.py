"""What loss scaling adds to a step on 1, 2, 4 and 8 replicas, and what crosses them.

    python benchmarks/replicas.py

The replicas are virtual: parts of this machine's CPU under MirroredStrategy, so figures
for several of them say what is computed, not how fast a real network is. Beside ours
stands Keras 2's wrapper. Keras 3's does not compute the same thing: it looks at one
replica alone. All kinds of steps take turns in one process; the median counts. Each
number of replicas has a process of its own, as TensorFlow reads it once.
"""

import argparse
import json
import os
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import lossscale
from lossscale.runtime import kerases

REPLICAS = (1, 2, 4, 8)
#: The weights: 20 matrices, 5 MB.
SHAPES = [(256, 256)] * 20
#: A round is so many steps of one kind, then the next kind has its turn.
STEPS, ROUNDS = 5, 40


# Kinds of steps


def kinds():
    """Returns each kind of step: its Keras, and what makes an optimizer of a bare one.

    Returns:
      A dictionary: name -> (keras, wrap).
    """
    found = {}
    for keras in (*kerases.keras2()[:1], kerases.keras3()):
        if keras is None:
            continue
        is_newest = keras is kerases.keras3()
        name = "Keras 3" if is_newest else "Keras 2"
        found[f"{name}, bare"] = keras, lambda optimizer: optimizer
        if not is_newest:
            wrapper = keras.mixed_precision.LossScaleOptimizer
            found["Keras 2, its own wrapper"] = keras, wrapper
        found[f"{name}, lossscale"] = keras, lossscale.LossScaleOptimizer
    return found


def make_optimizer(strategy, keras, wrap):
    """Returns an optimizer, and weights for it, on every replica."""
    make_variable = keras.Variable if keras is kerases.keras3() else tf.Variable
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
    """Returns the kind of step that `name` adds something to."""
    return name.split(",")[0] + ", bare"


def measure(steps):
    """Returns each kind of step's median time and what it adds, in seconds.

    They take turns. What is added is the median of the differences within a round: what
    else the machine does meets both.
    """
    factor = tf.constant(2.0**-10)
    times = {name: [] for name in steps}
    for step in steps.values():
        step(factor)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            started = time.perf_counter()
            for _ in range(STEPS):
                step(factor)
            times[name].append((time.perf_counter() - started) / STEPS)
    seen = {name: np.array(values) for name, values in times.items()}
    return {
        name: (np.median(values), np.median(values - seen[bare_of(name)]))
        for name, values in seen.items()
    }


# What crosses replicas


def crossings(function, replicas):
    """Counts in a graph how often a step brings values of all replicas together.

    That is a collective on each replica, or a sum of what is on several devices. What
    is done only in doubt is left out, a branch of `tf.cond` that changes no state, and
    what only a skipped step does, the other side of the branch.

    Args:
      function: A concrete function.
      replicas: How many of them this process has.

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


def run_here(replicas):
    """Measures on so many replicas in this process, and prints the result as JSON."""
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
    print(json.dumps({"times": measure(steps), "counts": counts}))


def run_in_a_process(replicas):
    """Returns what `run_here` prints."""
    answer = subprocess.run(  # noqa: S603 - this very script
        [sys.executable, __file__, "--replicas", str(replicas)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(answer.stdout.splitlines()[-1])


def table(results):
    """Returns the lines of a Markdown table, in brackets the reductions."""
    names = list(next(iter(results.values()))["times"])
    lines = ["| replicas | " + " | ".join(names) + " |"]
    lines.append("| ---: |" + " ---: |" * len(names))
    for replicas, result in results.items():
        cells = [str(replicas)]
        for name in names:
            seconds, more = result["times"][name]
            is_bare = name == bare_of(name)
            shown = f"{1e3 * seconds:.2f} ms" if is_bare else f"{1e3 * more:+.2f} ms"
            cells.append(f"{shown} ({result['counts'][name]})")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main():
    """Prints the table, or one row's figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--replicas", type=int, help="measure here, on so many alone")
    replicas = parser.parse_args().replicas
    if replicas is not None:
        run_here(replicas)
        return
    results = {count: run_in_a_process(count) for count in REPLICAS}
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
