"""find_nonfinite: the first value in one training step that is not finite."""

from __future__ import annotations

from typing import Any, List, Optional

import tensorflow as tf

from lossscale import arguments
from lossscale.ranges import asking
from lossscale.ranges.backward import CallsOnTape, Gradients
from lossscale.ranges.batches import first_batches
from lossscale.ranges.finding import NonfiniteReport, line_for
from lossscale.ranges.float32_model import unchanged
from lossscale.ranges.layer_calls import CallStack, floats_in
from lossscale.ranges.losses import Loss, check_targets, scale_of
from lossscale.ranges.origins import Origin, Origins, is_bad, largest_of
from lossscale.runtime import kerases


def find_nonfinite(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    loss: Any = None,
    batch_size: Optional[int] = None,
) -> NonfiniteReport:
    """Finds the layer that makes a training step infinite or NaN.

    Computes one step on the first batch, with the model's own policy, compiled loss and
    current loss scale, and `training=True`. It looks at every operation in eager mode:

    * If the loss is not finite, it goes back from the loss to the first operation that
      had finite inputs and a result that was not, and names the layer that ran it.
    * If the loss is finite, it looks for the first operation in 16 bits that made inf
      or NaN nevertheless. For example, a variance overflows in a normalization, whose
      output is then 0. A mask of -inf or -1e9 before a softmax is no fault.
    * If gradients are not finite, it names the first layer, on the way back, that got a
      finite gradient and handed back one that is not.

    The step is not applied. Weights, moving statistics, seeds and metrics stay as they
    were, the optimizer is not touched, and nothing is compiled. (Missing weights are
    created.) A custom `train_step` is not run. It is as slow as eager mode.

    >>> import lossscale
    >>> import numpy as np
    >>> dense = tf.keras.layers.Dense
    >>> names = ("small", "large")
    >>> model = tf.keras.Sequential([dense(1, use_bias=False, name=n) for n in names])
    >>> x = np.full([2, 1], 1e30, "float32")
    >>> _ = model(x)
    >>> model.set_weights([np.ones([1, 1]), np.full([1, 1], 1e30)])
    >>> found = lossscale.find_nonfinite(model, x, np.ones([2, 1]), loss="mse")
    >>> found.where, found.layer, found.kind, found.operation
    ('forward', 'large', 'inf', 'MatMul')

    Args:
      model: Any Keras model, compiled unless you pass `loss`.
      x: Arrays, a `tf.data.Dataset`, or a `PyDataset` or `Sequence` of Keras.
      y: Targets, or None if `x` yields them, too.
      sample_weight: Weights as `fit` takes them, or None.
      loss: A loss as `compile` takes it. None: the compiled loss.
      batch_size: Rows of the batch if `x` holds arrays. None: 32, as in Keras's `fit`.

    Returns:
      A `NonfiniteReport`: print it. As a condition, it is false if nothing is at fault.

    Raises:
      TypeError: `model` is no Keras model or does not return tensors, or an argument
        has the wrong type.
      ValueError: The model has no layers, it has no loss and `loss` is None, it cannot
        be built, targets are missing, the batch is empty or not finite, or the model
        belongs to a strategy with several replicas.
      RuntimeError: Called in a graph or under a `tf.distribute` strategy.
    """
    keras = asking.keras_of(model, "find_nonfinite")
    asking.has_loss(model, loss)
    batch_size = arguments.optional(arguments.count, "batch_size", batch_size)
    batch = next(first_batches((x, y, sample_weight), batch_size, 1)[0])
    asking.finite_data(*batch)
    check_targets(model, loss, batch[1], "find_nonfinite")
    asking.build(model, batch[0])
    with unchanged(model):
        return _Step(model, Loss(keras, model, loss)).take(*batch)


class _Step:
    """One step of a model. It looks at every operation."""

    def __init__(self, model: Any, loss: Loss) -> None:
        self._model, self._loss = model, loss
        self._scale = scale_of(model)
        self._stack = CallStack()
        self._origins = Origins(self._stack)
        self._watcher = CallsOnTape(self._origins)

    def take(self, x: Any, y: Any, sample_weight: Any) -> NonfiniteReport:
        """Takes the step on a batch, and returns what was found."""
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(floats_in(x))
            watched = self._stack.watched_by(self._watcher, self._model)
            with watched, self._origins.noted():
                outputs = self._model(x, training=True)
                _check_outputs(outputs)
                loss = self._loss(x, y, outputs, sample_weight)
                loss = tf.cast(loss, tf.float32)
            scaled = loss * self._scale
        if is_bad(loss):
            return self._of_loss(loss, floats_in(x))
        origin = self._origins.first_hidden()
        if origin is not None:
            return self._forward(origin, is_hidden=True)
        return self._of_gradients(tape, loss, scaled)

    def _of_loss(self, loss: Any, data: List[Any]) -> NonfiniteReport:
        origin = self._origins.first_behind(loss)
        if origin is None or origin.call is None:
            operation = origin.operation if origin else None
            return self._report("loss", kind=_kind(origin), operation=operation)
        # The model casts its data, or in Keras 3 its first layer does.
        largest = [largest_of(each) for each in data]
        if origin.is_cast and origin.largest in largest:
            return self._report("data", origin)
        variables = _bad_variables(origin)
        if variables:
            return self._report("weights", origin, variables=variables)
        return self._forward(origin)

    def _forward(self, origin: Origin, **fields: Any) -> NonfiniteReport:
        to_write = line_for(origin.call)
        return self._report("forward", origin, to_write=to_write, **fields)

    def _of_gradients(self, tape: Any, loss: Any, scaled: Any) -> NonfiniteReport:
        calls = self._watcher.calls
        if Gradients(tape, scaled, calls, self._model).are_finite:
            return self._report(None)
        found = Gradients(tape, loss, calls, self._model)
        if found.are_finite:
            return self._report("scale")
        call = found.first_bad()
        if call is None:
            return self._report("gradient", kind="inf")
        kind, largest = found.kind_and_largest(call)
        return self._report(
            "gradient",
            layer=call.path,
            layer_class=type(call.layer).__name__,
            kind=kind,
            dtype=call.dtype,
            largest=largest,
            to_write=line_for(call),
        )

    def _report(
        self, where: Optional[str], origin: Optional[Origin] = None, **fields: Any
    ) -> NonfiniteReport:
        if origin is not None and origin.call is not None:
            of_origin = {
                "layer": origin.call.path if where != "data" else None,
                "layer_class": type(origin.call.layer).__name__,
                "kind": _kind(origin),
                "operation": origin.operation,
                "dtype": origin.dtype,
                "largest": origin.largest,
            }
            fields = {**of_origin, **fields}
        return NonfiniteReport(where, loss_scale=self._scale, **fields)


def _kind(origin: Optional[Origin]) -> str:
    return origin.kinds[0] if origin else "nan"


def _bad_variables(origin: Origin) -> Any:
    """Returns the names of the weights that are not finite and that an origin read."""
    if origin.operation not in {"ReadVariableOp", "ResourceGather", "given"}:
        return ()
    weights = getattr(origin.call.layer, "weights", ()) if origin.call else ()
    bad = [each for each in weights if is_bad(tf.convert_to_tensor(each))]
    return tuple(map(kerases.variable_name, bad))


def _check_outputs(outputs: Any) -> None:
    if not all(map(tf.is_tensor, tf.nest.flatten(outputs))):
        raise TypeError(
            "`model` must return tensors, in any nest, got "
            f"{arguments.shown(outputs):.80}."
        )
