"""gradient_ranges: a model's gradients in float32, as float16 would hold them."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.ranges import exponents
from lossscale.ranges.batches import first_batches
from lossscale.ranges.float32_model import HALF, in_float32, recorded_outputs, unchanged
from lossscale.ranges.report import GradientRanges
from lossscale.runtime import kerases

#: A row of the report: its name, and the gradients that are counted in it.
Row = Tuple[str, List[Any]]


def gradient_ranges(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    loss: Any = None,
    loss_scale: Optional[float] = None,
    batches: Optional[int] = 10,
    batch_size: Optional[int] = None,
    activations: bool = False,
    verbose: int = 1,
) -> GradientRanges:
    """Tells what float16 would do to a model's gradients at a loss scale.

    Computes the gradients of some batches in float32, whatever the model's policy, as
    training would: `training=True`, the compiled loss, regularization. The very model
    computes, with its layers told to use float32 for the while. Afterwards it is what
    it was: weights, moving statistics, seeds, metrics, policies; the optimizer is not
    touched. (Weights that do not exist yet are created.) A custom `train_step` is not
    run. Memory does not grow with the number of batches.

    A gradient of an embedding counts with the rows that it has. Gradients also pass
    through float16 between the layers: with `activations=True` they are in the report
    and in the scale it recommends.

    >>> import lossscale
    >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False)])
    >>> x, y = np.full([8, 1], 2.0**-20), np.ones([8, 1])
    >>> _ = model(x)
    >>> model.set_weights([np.zeros([1, 1])])
    >>> ranges = lossscale.gradient_ranges(model, x, y, loss="mse", verbose=0)
    >>> float(ranges.largest_exponent[0]), ranges.largest_safe_scale == 2.0**34
    (-19.0, True)

    Args:
      model: A Keras model with float32 weights: any, if it is compiled or `loss` given.
      x: Arrays, a `tf.data.Dataset`, or a `PyDataset` or `Sequence` of Keras.
      y: Targets, and None if `x` makes whole batches.
      sample_weight: Weights as `fit` takes them, or None.
      loss: What `compile` takes. None: the compiled one.
      loss_scale: The scale to report on. None: what the model's optimizer has now, 1 if
        it scales no loss.
      batches: How many batches to look at, the first ones in order. None: all.
      batch_size: Rows of a batch, of arrays: 32 if None.
      activations: Whether to report on the gradients of layers' outputs too.
      verbose: 1 shows a progress bar, 0 nothing.

    Returns:
      `GradientRanges`: print it, read its arrays, or `plot` it.

    Raises:
      TypeError: `model` is no Keras model, or an argument has the wrong type.
      ValueError: The model is not compiled and there is no `loss`, it has no trainable
        weights or some in 16 bits, it belongs to a strategy of several replicas, or
        `batches` is None and `x` never ends.
      RuntimeError: Called in a graph or under a `tf.distribute` strategy.
    """
    keras = _checked(model, loss)
    batches = arguments.optional(arguments.count, "batches", batches)
    batch_size = arguments.optional(arguments.count, "batch_size", batch_size)
    scale = _scale(model) if loss_scale is None else loss_scale
    scale = arguments.loss_scale("loss_scale", scale)
    arguments.boolean("activations", activations)
    found, length = first_batches(keras, (x, y, sample_weight), batch_size, batches)
    first = next(found)
    _build(model, first[0])
    significands = sorted({1.0, math.frexp(scale)[0] * 2})
    with unchanged(model), in_float32(keras, model):
        step = _Step(keras, model, loss, significands, activations)
        return step.run(first, found, length, verbose).report(scale)


def _checked(model: Any, loss: Any) -> Any:
    """Returns the Keras of a model that can be asked, else raises."""
    keras = kerases.of_model(model)
    if keras is None:
        raise TypeError(f"`model` must be a Keras model, got {model!r:.80}.")
    if loss is None and getattr(model, "optimizer", None) is None:
        raise ValueError(
            "`model` must be compiled, or `loss` given, got a model without a loss. "
            'Write loss="mse", or what the model is trained with.'
        )
    if not tf.executing_eagerly() or tf.distribute.has_strategy():
        raise RuntimeError(
            "gradient_ranges must be called eagerly and outside strategy.scope(), "
            "got a graph or a strategy. Call it before or after training."
        )
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "`model` must be made outside strategy.scope(), got one of "
            f"{strategy.num_replicas_in_sync} replicas. Make a second one outside, and "
            "give it the weights: second.set_weights(model.get_weights())."
        )
    return keras


def _scale(model: Any) -> float:
    """Returns by what the model's optimizer multiplies the loss now."""
    optimizer = getattr(model, "optimizer", None)
    for name in ("loss_scale", "dynamic_scale", "initial_scale", "loss_scale_factor"):
        # Ours and Keras 2's; Keras 3's, built or not; a bare optimizer of Keras 3.
        value = getattr(optimizer, name, None)
        if value is not None:
            return float(value.numpy() if hasattr(value, "numpy") else value)
    return 1.0


def _build(model: Any, x: Any) -> None:
    """Creates the weights, under the model's own policy: it decides what they are."""
    if not model.built or not model.trainable_variables:
        model(x, training=False)
    if not model.trainable_variables:
        raise ValueError("`model` must have trainable weights, got none.")
    for variable in model.trainable_variables:
        dtype = tf.as_dtype(variable.dtype).name
        if dtype in HALF:
            raise ValueError(
                "`model` must have float32 weights, got "
                f"{kerases.path(model, variable)} in {dtype}. The policy "
                '"mixed_float16" computes in float16 and keeps its weights in float32.'
            )


class _Step:
    """One batch's gradients, counted; and the counts of all batches, added up."""

    def __init__(
        self, keras: Any, model: Any, loss: Any, significands: Any, activations: bool
    ) -> None:
        self.model, self.keras = model, keras
        #: Whose compiled loss it is.
        self.owner = model if loss is None else _with_loss(keras, loss)
        self.significands, self.activations = significands, activations
        self.names: List[str] = []
        self.half: List[str] = []
        self.counts: Any = 0
        self.largest: Any = 0
        self.batches = 0

    def run(
        self, first: Any, rest: Iterator[Any], length: Optional[int], verbose: int
    ) -> _Step:
        """Counts all batches, with Keras's own progress bar."""
        # Keras 3 traces a step without AutoGraph, Keras 2 with.
        count = tf.function(
            self._count, autograph=not kerases.is_3(self.keras), **kerases.ANY_SHAPES
        )
        bar = self.keras.utils.Progbar(length, verbose=verbose)
        for batch in (b for part in ([first], rest) for b in part):
            counts, largest = count(*batch)
            self.counts = self.counts + counts.numpy().astype(np.int64)
            self.largest = np.maximum(self.largest, largest.numpy())
            self.batches += 1
            bar.update(self.batches, finalize=False)
        bar.update(self.batches, finalize=True)
        return self

    def _count(self, x: Any, y: Any, sample_weight: Any) -> Tuple[Any, Any]:
        rows = self._rows(x, y, sample_weight)
        self.names = [name for name, _ in rows]
        tables, maxima = [], []
        for _, grads in rows:
            values = tf.concat([tf.reshape(_values(g), [-1]) for g in grads], 0)
            found = [exponents.count(values, s) for s in self.significands]
            tables.append(tf.stack([counts for counts, _ in found]))
            maxima.append(found[0][1])
        return tf.stack(tables, 1), tf.stack(maxima)

    def _rows(self, x: Any, y: Any, sample_weight: Any) -> List[Row]:
        """Returns the report's rows, with their gradients."""
        record = recorded_outputs if self.activations else _nothing
        variables = self.model.trainable_variables
        tensors = [kerases.tensor_of(variable) for variable in variables]
        with tf.GradientTape() as tape, record(self.model) as recorded:
            outputs = self.model(x, training=True)
            loss = self._loss(x, y, outputs, sample_weight)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        # Tensors inside a loop, of a recurrent layer say, belong to another graph.
        recorded = [(one, t) for one, t in recorded if t.graph is graph]
        grads = tape.gradient(loss, tensors + [tensor for _, tensor in recorded])
        self.half = _in_16_bits(graph, before)
        owners = [*variables, *(layer for layer, _ in recorded)]
        names = [kerases.path(self.model, variable) for variable in variables]
        names += [f"output of {layer.name}" for layer, _ in recorded]
        return _grouped(owners, names, grads)

    def _loss(self, *batch: Any) -> Any:
        if self.owner is self.model:
            return kerases.compute_loss(self.model, *batch)
        found = kerases.compute_loss(self.owner, *batch)
        return tf.add_n([found, *self.model.losses])

    def report(self, scale: float) -> GradientRanges:
        """Returns the result, and warns if it is not what was asked for."""
        if self.half:
            warnings.warn(
                "These operations compute gradients in 16 bits whatever the model's "
                f"policy, so not all of the report is about float32: {self.half}.",
                stacklevel=3,
            )
        by_significand = dict(zip(self.significands, self.counts))
        return GradientRanges(
            tuple(self.names), by_significand, self.largest, scale, self.batches
        )


@contextlib.contextmanager
def _nothing(_: Any) -> Iterator[List[Any]]:
    yield []


def _values(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _grouped(owners: List[Any], names: List[str], grads: List[Any]) -> List[Row]:
    """Returns one row for each owner that has a gradient, each under its own name."""
    rows: Dict[int, Row] = {}
    used: Dict[str, int] = {}
    for owner, name, grad in zip(owners, names, grads):
        if grad is None:
            continue
        if id(owner) not in rows:
            used[name] = used.get(name, 0) + 1
            unique = name if used[name] == 1 else f"{name} ({used[name]})"
            rows[id(owner)] = (unique, [])
        rows[id(owner)][1].append(grad)
    if not rows:
        raise ValueError(
            "`loss` must depend on the model's weights, got one that has no gradient."
        )
    return list(rows.values())


def _in_16_bits(graph: Any, first: int) -> List[str]:
    """Names operations that compute gradients in float16 or bfloat16 all the same."""
    found = [
        op.name
        for op in graph.get_operations()[first:]
        if any(output.dtype.base_dtype.name in HALF for output in op.outputs)
    ]
    return found[:3]


def _with_loss(keras: Any, loss: Any) -> Any:
    """Returns an empty model that has compiled `loss`, to compute it with."""
    model = keras.Sequential()
    model.compile(loss=loss)
    return model
