"""Counts a model's float32 gradients by their exponents, batch by batch."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf

from lossscale.gradients.check import dense_part
from lossscale.ranges import exponents
from lossscale.ranges.float32_model import SIXTEEN_BITS, outputs_of_layers
from lossscale.ranges.grouping import blocks_of
from lossscale.ranges.losses import Loss
from lossscale.ranges.report import GradientRanges
from lossscale.runtime import kerases, mode


class Row(NamedTuple):
    """A row of the report: its name, its block, and the gradients counted in it."""

    name: str
    block: str
    grads: List[Any]


class GradientCounter:
    """Counts the gradients of batches by their exponents, and adds the counts up."""

    def __init__(
        self, keras: Any, model: Any, loss: Any, significands: Any, activations: bool
    ) -> None:
        self.model, self.keras = model, keras
        self.loss = Loss(keras, model, loss)
        self.significands, self.activations = significands, activations
        self.names: List[str] = []
        self.blocks: List[str] = []
        #: The names of a few operations that compute gradients in 16 bits.
        self.in_16_bits: List[str] = []
        self.counts: Any = 0
        self.largest: Any = 0
        self.batches = 0

    def run(
        self, first: Any, rest: Iterator[Any], length: Optional[int], verbose: int
    ) -> GradientCounter:
        """Counts all batches, with Keras's own progress bar."""
        # As in fit: Keras 2 traces a step with AutoGraph, Keras 3 without.
        count = tf.function(
            self._count, autograph=not kerases.is_keras3(self.keras), **mode.ANY_SHAPES
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
        self.names = [row.name for row in rows]
        self.blocks = [row.block for row in rows]
        tables, maxima = [], []
        for row in rows:
            values = tf.concat([tf.reshape(dense_part(g), [-1]) for g in row.grads], 0)
            found = [exponents.count(values, s) for s in self.significands]
            tables.append(tf.stack([counts for counts, _ in found]))
            maxima.append(found[0][1])
        return tf.stack(tables, 1), tf.stack(maxima)

    def _rows(self, x: Any, y: Any, sample_weight: Any) -> List[Row]:
        """Returns the report's rows, with their gradients."""
        watch = outputs_of_layers if self.activations else _no_outputs
        variables = self.model.trainable_variables
        tensors = [kerases.tensor_of(variable) for variable in variables]
        with tf.GradientTape() as tape, watch(self.model) as watched:
            outputs = self.model(x, training=True)
            loss = self.loss(x, y, outputs, sample_weight)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        # A tensor inside a loop, as in a recurrent layer, belongs to another graph.
        watched = [(layer, t) for layer, t in watched if t.graph is graph]
        grads = tape.gradient(loss, tensors + [tensor for _, tensor in watched])
        self.in_16_bits = _in_16_bits(graph, before)
        sources = [*variables, *(layer for layer, _ in watched)]
        names = [path_of(self.model, variable) for variable in variables]
        names += [f"output of {layer.name}" for layer, _ in watched]
        return _rows_of(sources, names, blocks_of(self.model, names, sources), grads)

    def report(self, scale: float) -> GradientRanges:
        """Returns the result. Warns if some gradients were not computed in float32."""
        if self.in_16_bits:
            warnings.warn(
                "These operations compute gradients in 16 bits under any policy of the "
                "model, so part of the report is not about float32: "
                f"{self.in_16_bits}.",
                stacklevel=3,
            )
        by_significand = dict(zip(self.significands, self.counts))
        return GradientRanges(
            tuple(self.names),
            by_significand,
            self.largest,
            scale,
            self.batches,
            tuple(self.blocks),
        )


@contextlib.contextmanager
def _no_outputs(_: Any) -> Iterator[List[Any]]:
    yield []


def _rows_of(
    sources: List[Any], names: List[str], blocks: List[str], grads: List[Any]
) -> List[Row]:
    """Returns a row, with a unique name, for each variable or layer with a gradient."""
    rows: Dict[int, Row] = {}
    used: Dict[str, int] = {}
    for source, name, block, grad in zip(sources, names, blocks, grads):
        if grad is None:
            continue
        if id(source) not in rows:
            used[name] = used.get(name, 0) + 1
            unique = name if used[name] == 1 else f"{name} ({used[name]})"
            rows[id(source)] = Row(unique, block, [])
        rows[id(source)].grads.append(grad)
    if not rows:
        raise ValueError(
            "`loss` must depend on the model's weights, got a loss without gradients."
        )
    return list(rows.values())


def _in_16_bits(graph: Any, first: int) -> List[str]:
    """Returns the names of up to three operations with float16 or bfloat16 outputs."""
    found = [
        op.name
        for op in graph.get_operations()[first:]
        if any(output.dtype.base_dtype.name in SIXTEEN_BITS for output in op.outputs)
    ]
    return found[:3]


def path_of(model: Any, variable: Any) -> str:
    """Returns the names of a variable's layer and of the variable: dense/kernel."""
    found = kerases.variable_name(variable)
    prefix = f"{model.name}/"  # only Keras 3 has it
    return found[len(prefix) :] if found.startswith(prefix) else found
