"""forward_ranges: which layers overflow in float16, before you train in it."""

from __future__ import annotations

import warnings
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.ranges import asking
from lossscale.ranges.batches import first_batches
from lossscale.ranges.float32_model import in_float16, in_float32, unchanged
from lossscale.ranges.forward_report import ForwardRanges
from lossscale.ranges.layer_calls import Call, CallStack
from lossscale.ranges.origins import Origins
from lossscale.ranges.passes import Float16Pass, Float32Pass, Key
from lossscale.runtime import kerases


def forward_ranges(
    model: Any,
    x: Any,
    *,
    batches: Optional[int] = 10,
    batch_size: Optional[int] = None,
    verbose: int = 1,
) -> ForwardRanges:
    """Finds the layers of a model that must stay in float32, while others use float16.

    Computes the outputs of every layer for some batches in float32, under any policy of
    the model, with `training=True`, and counts how many would overflow or underflow in
    float16. Then it runs each layer in float16 on the inputs that the layer has in
    float32. So it also finds overflows in sums that a layer does not return: in a
    variance, a norm, the logits of attention. A mask of -inf or -1e9 is no overflow.

    It runs your model itself, in eager mode, and leaves weights, moving statistics,
    seeds and policies as they were. (It creates missing weights.) It does not run a
    custom `train_step`. Memory does not grow with the number of batches.

    >>> import lossscale
    >>> import numpy as np
    >>> dense = tf.keras.layers.Dense
    >>> names = ("large", "small")
    >>> model = tf.keras.Sequential([dense(1, use_bias=False, name=n) for n in names])
    >>> x = np.full([8, 1], 2.0**10)
    >>> _ = model(x)
    >>> model.set_weights([np.full([1, 1], 2.0**8), np.full([1, 1], 2.0**-8)])
    >>> ranges = lossscale.forward_ranges(model, x, verbose=0)
    >>> ranges.names
    ('large, inputs', 'large', 'small')
    >>> ranges.largest_exponent.tolist(), ranges.overflowing.tolist()
    ([10.0, 18.0, 10.0], [0.0, 1.0, 0.0])
    >>> ranges.need_float32  # the first for its output, the second for its input
    ('large', 'small')

    Args:
      model: Any Keras model.
      x: Arrays, a `tf.data.Dataset`, or a `PyDataset` or `Sequence` of Keras. The last
        three may yield targets, too, which are ignored.
      batches: The number of batches to look at, from the first. None: all.
      batch_size: Rows per batch if `x` holds arrays. None: 32, as in Keras's `fit`.
      verbose: 1 shows a progress bar, 0 nothing.

    Returns:
      `ForwardRanges`: print it, read its arrays, `plot` it.

    Raises:
      TypeError: `model` is no Keras model, its layers return no float tensors, or an
        argument has the wrong type.
      ValueError: The model has no layers, or cannot be built; `x` is empty or not
        finite, or never ends and `batches` is None; the model belongs to a strategy
        with several replicas.
      RuntimeError: Called in a graph or under a `tf.distribute` strategy.
    """
    keras = asking.keras_of(model, "forward_ranges")
    batches = arguments.optional(arguments.count, "batches", batches)
    batch_size = arguments.optional(arguments.count, "batch_size", batch_size)
    found, length = first_batches((x, None, None), batch_size, batches)
    first = next(found)
    asking.finite_data(first[0])
    asking.build(model, first[0])
    with unchanged(model):
        return _Counter(keras, model).run(first, found, length, verbose)


class _Counter:
    """Counts the outputs of layers, batch by batch, and adds up the counts."""

    def __init__(self, keras: Any, model: Any) -> None:
        self._keras, self._model = keras, model
        self._rows: Dict[Key, Tuple[Any, float]] = {}
        #: By path, the layers that need float32, and those that overflow inside.
        self._needed: Dict[str, Any] = {}
        self._inside: Dict[str, Any] = {}
        self._order: Dict[str, int] = {}
        self._batches, self._can_try = 0, True

    def run(
        self, first: Any, rest: Iterator[Any], length: Optional[int], verbose: int
    ) -> ForwardRanges:
        """Counts all batches, with Keras's own progress bar."""
        bar = self._keras.utils.Progbar(length, verbose=verbose)
        for x, _, _ in (batch for part in ([first], rest) for batch in part):
            asking.finite_data(x)
            self._look(x)
            self._batches += 1
            bar.update(self._batches, finalize=False)
        bar.update(self._batches, finalize=True)
        if not self._rows:
            raise TypeError(
                "`model` must have layers that return float tensors, got "
                f"{self._model.name!r}, which has none."
            )
        return self._report()

    def _look(self, x: Any) -> None:
        stack, first = CallStack(), Float32Pass()
        watched = stack.watched_by(first, self._model)
        with in_float32(self._keras, self._model), watched:
            self._model(x, training=True)
        for key, (counts, largest) in first.rows.items():
            before, largest_before = self._rows.get(key, (0, 0.0))
            self._rows[key] = (before + counts, max(largest, largest_before))
        calls = first.calls
        self._note([call for call in calls if id(call) in first.overflowing], False)
        inside = self._overflowing_inside(x, first)
        # A layer whose inputs or outputs overflow needs float32 for that alone.
        self._note([c for c in inside if id(c) not in first.overflowing], True)

    def _overflowing_inside(self, x: Any, first: Float32Pass) -> List[Call]:
        stack = CallStack()
        origins = Origins(stack)
        second = Float16Pass(first, origins)
        with in_float16(self._keras, self._model) as can_try:
            self._can_try = can_try
            if not can_try:
                return []
            try:
                with stack.watched_by(second, self._model), origins.noted():
                    self._model(x, training=True)
            except tf.errors.OpError as error:  # an operation has no float16 kernel
                self._can_try = False
                warnings.warn(
                    "The model could not run in float16, so overflows inside its "
                    f"layers are unknown: {error!s:.300}",
                    stacklevel=5,
                )
        return second.overflowed_inside()

    def _note(self, calls: List[Call], is_inside: bool) -> None:
        for call in calls:
            made = call.owner
            if not made.is_layer:  # Keras 3.6 casts between layers with an operation
                continue
            self._needed.setdefault(made.path, made.layer)
            if is_inside:
                self._inside.setdefault(made.path, made.layer)

    def _report(self) -> ForwardRanges:
        needed = sorted(self._needed, key=self._place)
        layers = [self._needed[path] for path in needed]
        return ForwardRanges(
            tuple(key.name for key in self._rows),
            np.stack([counts for counts, _ in self._rows.values()]),
            np.array([most for _, most in self._rows.values()], np.float32),
            self._batches,
            tuple(needed),
            tuple(path for path in needed if path in self._inside),
            tuple(type(layer).__name__ for layer in layers),
            self._can_try,
            kerases.is_keras3(self._keras),
            tuple(path for layer in layers for path in _paths(layer)),
        )

    def _place(self, path: str) -> int:
        """Returns a layer's place on the way from the input to the output."""
        places = [n for n, key in enumerate(self._rows) if _is_at(key.path, path)]
        return min(places, default=len(self._rows))


def _is_at(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}/")


def _paths(layer: Any) -> List[str]:
    """Returns a layer's path in Keras 3, and the paths of layers that it creates."""
    is_models_own = hasattr(layer, "layers") or hasattr(layer, "layer")
    inner = [layer] if is_models_own else kerases.layers_of(layer)
    # A layer that builds nothing has no path. In Keras 2 no layer has one.
    return [getattr(each, "path", None) or each.name for each in inner]
