"""What the optimizer step's benchmark measures: workloads, contenders, their steps."""

from __future__ import annotations

import gc
import time

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import lossscale

try:
    import tf_keras
except ImportError:
    tf_keras = None

INNER = {"sgd": ("SGD", 1e-6), "adam": ("Adam", 1e-6)}
#: Name -> the Keras of the optimizer, what wraps it, and whom it is compared with.
CONTENDERS = {
    "bare": (keras, None, None),
    "keras3": (keras, "theirs", "bare"),
    "ours": (keras, "dynamic", "bare"),
    "ours-fixed": (keras, 1024.0, "bare"),
    "ours-unrecorded": (keras, "unrecorded", "bare"),
    "tf_keras-bare": (tf_keras, None, None),
    "tf_keras": (tf_keras, "theirs", "tf_keras-bare"),
    "ours-tf_keras": (tf_keras, "dynamic", "tf_keras-bare"),
}
RIVAL = {
    "ours": "keras3",
    "ours-fixed": "keras3",
    "ours-unrecorded": "ours",
    "ours-tf_keras": "tf_keras",
}


def resnet50():
    """Returns the 161 shapes of ResNet-50's variables, 25.6 million numbers."""
    shapes = [(7, 7, 3, 64), (64,), (64,)]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convs = [(1, width_in, width), (3, width, width), (1, width, 4 * width)]
            if block == 0:
                convs.append((1, width_in, 4 * width))
            for size, inputs, outputs in convs:
                shapes += [(size, size, inputs, outputs), (outputs,), (outputs,)]
            width_in = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


#: Name -> the variables' shapes, of an embedding the rows that a step touches, and the
#: dtype of variables and gradients.
WORKLOADS = {
    "resnet50": (resnet50(), None),
    "large": ([(10_000_000,)] * 4, None),
    "large-float16": ([(10_000_000,)] * 4, None, tf.float16),
    "tiny": ([(100,)] * 4, None),
    "small-1000": ([(32, 32)] * 1000, None),
    "small-10000": ([(16,)] * 10_000, None),
    "embedding-1e4": ([(10_000, 32)], 64),
    "embedding-1e6": ([(1_000_000, 32)], 64),
}


class Gradients:
    """Where the gradients of a workload come from, the same for all contenders."""

    def __init__(self, mode, shapes, rows, dtype=tf.float32):
        self.rows = rows
        self.shapes = [(rows, *shape[1:]) for shape in shapes] if rows else shapes
        self.dense_shapes = shapes
        self.value = tf.Variable(tf.constant(32.0, dtype), trainable=False)
        self.indices = tf.range(rows) * 7 if rows else None
        self.stored = None
        if mode == "xla":
            fill = self.value.value()
            self.stored = [tf.Variable(tf.fill(shape, fill)) for shape in self.shapes]

    def __call__(self):
        dense = self.stored or [tf.fill(shape, self.value) for shape in self.shapes]
        if not self.rows:
            return [tf.convert_to_tensor(value) for value in dense]
        shape = self.dense_shapes[0]
        return [tf.IndexedSlices(v, self.indices, shape) for v in dense]

    def count(self):
        """Returns the number of elements."""
        return sum(int(np.prod(shape)) for shape in self.shapes)


class Contender:
    """One optimizer, wrapped or bare, with variables of its own, and its step."""

    def __init__(self, name, inner, gradients, mode):
        self.name = name
        keras_of, wrapping, self.base = CONTENDERS[name]
        class_name, rate = INNER[inner]
        optimizer = getattr(keras_of.optimizers, class_name)(rate)
        self._variables = _variables(keras_of, gradients)
        if wrapping == "theirs":
            module = keras if keras_of is keras else keras_of.mixed_precision
            where = module.optimizers if keras_of is keras else module
            optimizer = where.LossScaleOptimizer(optimizer)
        elif wrapping == "unrecorded":  # what a record of faults costs a good step
            optimizer = lossscale.LossScaleOptimizer(optimizer, "dynamic")
            optimizer._fault_record.entry_of = lambda _: None
        elif wrapping is not None:
            optimizer = lossscale.LossScaleOptimizer(optimizer, wrapping)
        optimizer.build(self._variables)
        # Keras 2's convention is that the loop unscales.
        unscales = wrapping is not None and keras_of is not keras

        def step():
            grads = gradients()
            if wrapping is not None:
                scale = getattr(optimizer, "scale_loss", None)
                (scale or optimizer.get_scaled_loss)(tf.constant(1.0))
            if unscales:
                grads = optimizer.get_unscaled_gradients(grads)
            optimizer.apply_gradients(list(zip(grads, self._variables)))

        self.function = tf.function(step, jit_compile=mode == "xla", autograph=False)
        self._mode = mode
        self.facts = {}

    def trace(self):
        """Returns the traced step."""
        return self.function.get_concrete_function()

    def prepare(self, note=str):
        """Traces, compiles and runs the step, and notes what that took.

        Args:
          note: Called with the name of each phase when it begins.
        """
        note("tracing")
        start = time.perf_counter()
        self.trace()
        traced = time.perf_counter()
        note("compiling and the first run")
        self.facts["nodes"] = executed_nodes(self.function)
        self.run = timed(self.function)
        settle()
        first = time.perf_counter()
        self.facts["trace_s"] = traced - start
        # In a graph: what TensorFlow's own optimizer takes, and two steps.
        self.facts["compile_s"] = first - traced
        self.facts["peak_mb"] = gpu_peak(self.function)


_SHARED = {}


def _variables(keras_of, gradients):
    """Returns variables: one set for all contenders of one Keras, to save memory."""
    if keras_of not in _SHARED:
        make = keras.Variable if keras_of is keras else tf.Variable
        one = tf.ones([], gradients.value.dtype)
        values = [tf.fill(shape, one) for shape in gradients.dense_shapes]
        dtype = {"dtype": one.dtype.name} if keras_of is keras else {}
        _SHARED[keras_of] = [make(value, **dtype) for value in values]
    return _SHARED[keras_of]


def share_no_variables():
    """Makes what follows start with new variables."""
    _SHARED.clear()
    gc.collect()


def settle():
    """Waits for the device: a GPU runs behind."""
    if tf.config.list_physical_devices("GPU"):
        tf.test.experimental.sync_devices()


def executed_nodes(function):
    """Returns the nodes that a good step executes, None under XLA: it is one there.

    Counted in the graph as TensorFlow runs it: optimized, functions inlined, a `cond`
    turned into a Switch for each thing that a branch uses. What stands in the other
    branch is left out: in ours, the bad step.

    Args:
      function: A traced `tf.function` that has not run yet.
    """
    # No public name (seen on 2.21).
    context.enable_graph_collection()
    function()
    graphs = context.export_run_metadata().function_graphs
    context.disable_graph_collection()
    idle = ("Const", "NoOp", "Placeholder", "Identity", "_Arg", "_Retval")
    nodes = [node for graph in graphs for node in graph.post_optimization_graph.node]
    if not nodes or any(node.op.startswith(("Xla", "_Xla")) for node in nodes):
        return None
    return sum(node.op not in idle and "/else/" not in node.name for node in nodes)


def gpu_peak(function):
    """Returns the megabytes that a step takes on a GPU, None without one."""
    if not tf.config.list_physical_devices("GPU"):
        return None
    tf.config.experimental.reset_memory_stats("GPU:0")
    function()
    settle()
    info = tf.config.experimental.get_memory_info("GPU:0")
    return (info["peak"] - info["current"]) / 1e6


def timed(function):
    """Returns a function of a number of calls, that returns the seconds of one."""
    function()

    def run(calls):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        settle()
        return (time.perf_counter() - start) / calls

    return run


def interleaved(runs, seconds):
    """Returns each run's seconds per call, in rounds that hold every one of them."""
    slowest = max(run(2) for run in runs.values())
    calls = max(1, min(20, int(0.02 / slowest)))
    times = {name: [] for name in runs}
    names = list(runs)
    end = time.perf_counter() + seconds
    done = 0
    while time.perf_counter() < end or done < 5:
        # Nobody always follows the same neighbour, who leaves the caches as they are.
        np.random.default_rng(done).shuffle(names)
        for name in names:
            times[name].append(runs[name](calls))
        done += 1
    return times
