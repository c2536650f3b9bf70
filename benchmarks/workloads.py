"""What the benchmarks measure: workloads, contenders, and their steps."""

from __future__ import annotations

import collections
import functools
import importlib
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import timing
from tensorflow.python.eager import context

import lossscale

try:
    import tf_keras
except ImportError:
    tf_keras = None


def _imported_from(folder):
    """Returns the lossscale of another checkout, beside the one that is imported."""
    own = {name: sys.modules.pop(name) for name in _modules_of_lossscale()}
    sys.path.insert(0, str(Path(folder).resolve()))
    try:
        other = importlib.import_module("lossscale")
    finally:
        sys.path.pop(0)
        for name in _modules_of_lossscale():
            del sys.modules[name]
        sys.modules.update(own)
    return other


def _modules_of_lossscale():
    return [name for name in sys.modules if name.split(".")[0] == "lossscale"]


#: The folder of another checkout. Its lossscale is imported, too, for the contenders
#: whose wrapper is called "before".
BEFORE = os.environ.get("BEFORE")
lossscale_before = BEFORE and _imported_from(BEFORE)

INNER = {"sgd": ("SGD", 1e-6), "adam": ("Adam", 1e-6)}
#: Name -> the optimizer's family, what wraps it, and the contender to compare it with.
CONTENDERS = {
    "bare": ("keras3", None, None),
    "keras3": ("keras3", "theirs", "bare"),
    "ours": ("keras3", "dynamic", "bare"),
    "ours-fixed": ("keras3", 1024.0, "bare"),
    "ours-headroom": ("keras3", "headroom", "bare"),
    "ours-unrecorded": ("keras3", "unrecorded", "bare"),
    "floor": ("keras3", "floor", "bare"),
    "before": ("keras3", "before", "bare"),
    "tf_keras-bare": ("keras2-new", None, None),
    "tf_keras": ("keras2-new", "theirs", "tf_keras-bare"),
    "ours-tf_keras": ("keras2-new", "dynamic", "tf_keras-bare"),
    "before-tf_keras": ("keras2-new", "before", "tf_keras-bare"),
    "legacy-bare": ("keras2-legacy", None, None),
    "legacy": ("keras2-legacy", "theirs", "legacy-bare"),
    "ours-legacy": ("keras2-legacy", "dynamic", "legacy-bare"),
}
RIVAL = {
    "ours": "keras3",
    "ours-fixed": "keras3",
    "ours-headroom": "ours",
    "ours-unrecorded": "ours",
    "floor": "ours",
    "ours-tf_keras": "tf_keras",
    "ours-legacy": "legacy",
}


class Family(NamedTuple):
    """One kind of optimizer: the modules and functions that belong to it."""

    optimizers: Any
    make_variable: Callable[..., Any]
    wrap: Callable[..., Any]


def families():
    """Returns each kind of optimizer that is installed, as a `Family`, by name.

    It does not use lossscale for this, as another checkout may have it elsewhere.
    """
    is_3 = keras.__version__.startswith("3")
    found = {}
    if is_3:
        of_3 = keras.optimizers
        found["keras3"] = Family(of_3, keras.Variable, of_3.LossScaleOptimizer)
    keras2 = tf_keras or (None if is_3 else tf.keras)
    if keras2 is None:
        return found
    rest = tf.Variable, keras2.mixed_precision.LossScaleOptimizer
    legacy = getattr(keras2.optimizers, "legacy", None)
    if legacy is not None:
        # TensorFlow 2.10 has the new optimizers under another name.
        is_default = not issubclass(legacy.Adam, keras2.optimizers.Adam)
        new = keras2.optimizers if is_default else keras2.optimizers.experimental
        found["keras2-new"] = Family(new, *rest)
    found["keras2-legacy"] = Family(legacy or keras2.optimizers, *rest)
    return found


def versions():
    """Returns what figures depend on: versions, and the machine."""
    return {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tf_keras": getattr(tf_keras, "__version__", None),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def installed():
    """Returns the names of the contenders whose optimizers are installed."""
    return [
        name
        for name, (family, wrapping, _) in CONTENDERS.items()
        if family in families() and (BEFORE or wrapping != "before")
    ]


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


#: Name -> the variables' shapes, for an embedding the number of rows that a step
#: touches, and the dtype of variables and gradients.
WORKLOADS = {
    "resnet50": (resnet50(), None),
    "large": ([(10_000_000,)] * 4, None),
    "large-float16": ([(10_000_000,)] * 4, None, tf.float16),
    "tiny": ([(100,)] * 4, None),
    "small-160": ([(100,)] * 160, None),
    "small-1000": ([(32, 32)] * 1000, None),
    "small-10000": ([(16,)] * 10_000, None),
    "embedding-1e4": ([(10_000, 32)], 64),
    "embedding-1e6": ([(1_000_000, 32)], 64),
}


class Gradients:
    """The gradients of a workload: its variables, and where their gradients come from.

    Each gradient comes out of a matrix product of its own that has the loss as a
    factor, as the gradients of a layer's weights do: a fresh temporary tensor, which
    XLA does not fuse.
    """

    #: The rows of the batch: with so few, arithmetic takes no longer than writing.
    DEPTH = 8

    def __init__(self, shapes, rows=None, dtype=tf.float32, loss=2.0**-8):
        self.dense_shapes = shapes
        self.shapes = [(rows, *shape[1:]) for shape in shapes] if rows else shapes
        self.dtype = dtype
        self._indices = tf.range(rows) * 7 if rows else None
        self._loss = tf.Variable(loss, trainable=False)
        sides = [_sides(shape) for shape in self.shapes]
        self._left = {
            side: tf.Variable(tf.ones([side, self.DEPTH], dtype)) for side, _ in sides
        }
        self._right = [
            tf.Variable(tf.ones([self.DEPTH, side], dtype)) for _, side in sides
        ]

    def make_variables(self):
        """Returns variables of these shapes, as `shared_by` takes them."""
        make = next(iter(families().values())).make_variable
        return [make(tf.ones(shape, self.dtype)) for shape in self.dense_shapes]

    def __call__(self, scale_loss):
        """Returns the gradients of the scaled loss."""
        loss = tf.cast(scale_loss(self._loss.value()), self.dtype)
        left = {side: value * loss for side, value in self._left.items()}
        dense = [
            tf.reshape(left[_sides(shape)[0]] @ right, shape)
            for shape, right in zip(self.shapes, self._right)
        ]
        if self._indices is None:
            return dense
        shape = tf.constant(self.dense_shapes[0])
        return [tf.IndexedSlices(values, self._indices, shape) for values in dense]

    def count(self):
        """Returns the number of elements."""
        return sum(int(np.prod(shape)) for shape in self.shapes)


def _sides(shape):
    """Returns the sides of a matrix of a shape's elements, nearly a square."""
    count = int(np.prod(shape))
    side = next(n for n in range(int(count**0.5), 0, -1) if count % n == 0)
    return side, count // side


def shared_by(family, variables):
    """Returns variables as a family takes them, which hold the same memory."""
    if family == "keras3":
        return variables
    # Keras 2 takes the TensorFlow variable that a variable of Keras 3 holds.
    return [v if isinstance(v, tf.Variable) else v.value for v in variables]


class Contender:
    """One optimizer, wrapped or bare, and its step.

    Args:
      name: One of `CONTENDERS`.
      inner: One of `INNER`.
      mode: "graph", "xla" or "eager".
      variables: The variables that all contenders share.
      gradients: A function that computes their gradients, of a loss that it scales with
        the function it is given.
    """

    def __init__(self, name, inner, mode, variables, gradients):
        self.name = name
        family, wrapping, self.base = CONTENDERS[name]
        class_name, rate = INNER[inner]
        optimizers, _, wrap = families()[family]
        optimizer = getattr(optimizers, class_name)(rate)
        if wrapping == "theirs":
            optimizer = wrap(optimizer)
        elif wrapping == "unrecorded":  # what a record of faults costs a good step
            optimizer = lossscale.LossScaleOptimizer(optimizer, "dynamic")
            optimizer.engine.record.entry_of = lambda *_: None
        elif wrapping == "headroom":  # what it costs to look at the gradients
            scale = lossscale.HeadroomLossScale()
            optimizer = lossscale.LossScaleOptimizer(optimizer, scale)
        elif wrapping == "before":
            optimizer = lossscale_before.LossScaleOptimizer(optimizer, "dynamic")
        elif wrapping not in {None, "floor"}:
            optimizer = lossscale.LossScaleOptimizer(optimizer, wrapping)
        variables = shared_by(family, variables)
        if hasattr(optimizer, "build"):  # Keras 2's legacy ones have none
            optimizer.build(variables)
        scale_loss = getattr(optimizer, "scale_loss", None)
        if scale_loss is None:
            scale_loss = getattr(optimizer, "get_scaled_loss", lambda loss: loss)
        # Keras 2's convention is that the loop unscales.
        unscales = wrapping is not None and family != "keras3"

        def step():
            grads = gradients(scale_loss)
            if wrapping == "floor":
                grads = read_twice(grads)
            if unscales:
                grads = optimizer.get_unscaled_gradients(grads)
            optimizer.apply_gradients(list(zip(grads, variables)))

        self._optimizer = optimizer
        self._first_loss_scale = self._loss_scale()
        self.function = step
        if mode != "eager":
            by_xla = mode == "xla"
            self.function = tf.function(step, jit_compile=by_xla, autograph=False)
        self.facts = {}

    def _loss_scale(self):
        """Returns the loss scale as a number, None without one."""
        found = getattr(self._optimizer, "loss_scale", None)
        found = getattr(self._optimizer, "dynamic_scale", found)  # Keras 3's own
        found = found() if callable(found) else found
        return None if found is None else float(np.asarray(found))

    def check(self, skips=False):
        """Raises `RuntimeError` if the steps were not as they should be.

        A skipped step takes another time. `skips` tells whether all are skipped.
        """
        ours = getattr(self._optimizer, "loss_scale", None)
        skipped = getattr(ours, "skipped_steps", None)
        now = self._loss_scale()
        fell = now is not None and now < self._first_loss_scale
        was_skipped = fell if skipped is None else int(skipped.numpy()) > 0
        if now is not None and was_skipped != skips:
            found = "skipped" if was_skipped else "applied"
            raise RuntimeError(f"{self.name}: steps were {found}")

    def trace(self):
        """Returns the traced step."""
        return self.function.get_concrete_function()

    def prepare(self, note=str):
        """Traces, compiles and runs the step, and keeps how long that took.

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


def read_twice(grads):
    """Returns gradients, read as loss scaling has to: to add up, and to divide.

    There is no loss scale, no rule, no branch and no record. The divisor depends on the
    sum, as the branch of a step does.
    """
    total = tf.add_n([tf.reduce_sum(getattr(each, "values", each)) for each in grads])
    divisor = tf.where(tf.math.is_finite(total), tf.cast(1.5, total.dtype), 2)
    return [
        tf.IndexedSlices(each.values / divisor, each.indices, each.dense_shape)
        if isinstance(each, tf.IndexedSlices)
        else each / divisor
        for each in grads
    ]


def settle():
    """Waits for the device: a GPU runs behind."""
    if tf.config.list_physical_devices("GPU"):
        tf.test.experimental.sync_devices()


def executed_nodes(function):
    """Returns the nodes that a good step executes; None under XLA, which runs one.

    It counts them in the graph as TensorFlow runs it: optimized, functions inlined, a
    `cond` turned into a Switch for each thing that a branch uses. It leaves out the
    other branch, which in ours is the bad step.

    Args:
      function: A traced `tf.function` that has not run yet.
    """
    nodes = optimized_nodes(function)
    idle = ("Const", "NoOp", "Placeholder", "Identity", "_Arg", "_Retval")
    if not nodes or any(node.op.startswith(("Xla", "_Xla")) for node in nodes):
        return None
    return sum(node.op not in idle and "/else/" not in node.name for node in nodes)


def launches(function):
    """Returns how many kernels a good step starts on a GPU, by the operations' types.

    These are the nodes that it executes, but for those that only hand on what is there:
    constants, reads of variables, and what a `cond` is turned into. A good step that
    neither grows the loss scale nor follows a skipped one takes the first side of a
    `cond`, and the second side of a `cond` in that: where a wrapper of Keras grows it.

    Args:
      function: A traced `tf.function` that has not run yet.
    """

    def is_taken(name):
        outer, *inner = re.findall(r"/(then|else)/_\d", name) or ["then"]
        return outer == "then" and "then" not in inner

    return collections.Counter(
        node.op
        for node in optimized_nodes(function)
        if node.op not in _NO_LAUNCHES and is_taken(node.name)
    )


#: What is no kernel of its own: handing on, constants, reads, and switches.
_NO_LAUNCHES = {
    *("Const", "NoOp", "Placeholder", "Identity", "IdentityN", "_Arg", "_Retval"),
    *("ReadVariableOp", "VarHandleOp", "_EagerConst", "_DeviceArg", "Switch", "Merge"),
}


def optimized_nodes(function):
    """Calls a `tf.function`, and returns the nodes of the graph that TensorFlow ran."""
    # No public name (seen on 2.21).
    context.enable_graph_collection()
    function()
    graphs = context.export_run_metadata().function_graphs
    context.disable_graph_collection()
    return [node for graph in graphs for node in graph.post_optimization_graph.node]


def gpu_peak(function):
    """Returns the megabytes that a step takes on a GPU, None without one."""
    if not tf.config.list_physical_devices("GPU"):
        return None
    tf.config.experimental.reset_memory_stats("GPU:0")
    function()
    settle()
    info = tf.config.experimental.get_memory_info("GPU:0")
    return (info["peak"] - info["current"]) / 1e6


#: A function of a number of calls of a function, that returns the seconds of one.
timed = functools.partial(timing.timed, settle=settle)
