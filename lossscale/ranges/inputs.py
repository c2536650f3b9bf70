"""What a tool is given: the model, its loss and loss scale, and the data of `fit`."""

from __future__ import annotations

import itertools
from typing import Any, Iterable, Iterator, Optional, Tuple

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.gradients.check import dense_part
from lossscale.ranges.magnitudes import floats_in, look
from lossscale.runtime import keras_versions
from lossscale.runtime.graphs import is_building
from lossscale.scales.base import LossScale

#: x, y and sample weights; None where there are none.
Batch = Tuple[Any, Any, Any]

_NAMES = ("x", "y", "sample_weight")


def keras_of(model: Any, asked_by: str) -> Any:
    """Returns the Keras of a model. Raises if it is no model that we can compute."""
    owners = [k for k in keras_versions.installed() if isinstance(model, k.Model)]
    if not owners:
        raise TypeError(f"`model` must be a Keras model, got {model!r:.80}.")
    if is_building() or tf.distribute.has_strategy():
        raise RuntimeError(
            f"{asked_by} must be called eagerly and outside strategy.scope(), "
            "got a graph or a strategy. Call it before or after training."
        )
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "`model` must be created outside strategy.scope(), got one with "
            f"{strategy.num_replicas_in_sync} replicas. Create a second one outside, "
            "and copy the weights: second.set_weights(model.get_weights())."
        )
    return owners[0]


def build(model: Any, x: Any) -> None:
    """Creates missing weights by calling the model, or raises a ValueError."""
    if model.built and model.weights:
        return
    if len(keras_versions.layers_of(model)) == 1:
        raise ValueError(f"`model` must have layers, got {model.name!r} with none.")
    try:
        model(x, training=False)
    except Exception as error:
        raise ValueError(
            f"`model` must be built, or take `x`, got {model.name!r}. Calling it "
            f"failed: {error!s:.300}. Call it once on a batch: model(x)."
        ) from error


def scale_of(optimizer: Any) -> float:
    """Returns the number by which an optimizer multiplies the loss now."""
    for name in ("loss_scale", "dynamic_scale", "initial_scale", "loss_scale_factor"):
        # Ours or Keras 2's wrapper; Keras 3's wrapper, built or not; Keras 3's others.
        is_scale = isinstance(optimizer, LossScale)
        value = optimizer if is_scale else getattr(optimizer, name, None)
        if isinstance(value, LossScale):
            return value._to_show()
        if value is not None:
            return float(value.numpy() if hasattr(value, "numpy") else value)
    return 1.0


def first_batches(
    data: Batch, batch_size: Optional[int], batches: Optional[int], whole: int = 0
) -> Tuple[Any, Iterator[Any], int]:
    """Returns the first batch, an iterator that begins with it, and its length.

    Batches are as in a `train_step`. Arrays of at most `whole` rows are not cut.
    """
    count = arguments.or_none(arguments.count)
    batches, batch_size = count("batches", batches), count("batch_size", batch_size)
    chosen, length = _all_batches(data, batch_size, whole)
    if length is None and batches is None:
        raise ValueError(
            "`batches` must be a number if the length of the data is unknown or "
            "infinite, got None. Say how many batches to look at."
        )
    chosen = itertools.islice(chosen, batches)
    chosen = (tf.nest.map_structure(_tensor, batch) for batch in chosen)
    first = next(chosen, None)
    if first is None:
        raise ValueError("`x` must hold at least one batch, got none.")
    return first, itertools.chain([first], chosen), min(filter(None, (length, batches)))


def triple(batch: Any) -> Batch:
    """Returns a batch as x, y and sample weights."""
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    x, y, sample_weight = (*parts, None, None)[:3]
    return x, y, sample_weight


def _all_batches(
    data: Batch, batch_size: Optional[int], whole: int
) -> Tuple[Iterator[Any], Optional[int]]:
    """Returns an iterator, and its length. None: it is unknown or infinite."""
    x, *others = data
    is_dataset = isinstance(x, tf.data.Dataset)
    # A sequence of any Keras will do, since it yields whole batches.
    utils = [keras.utils for keras in keras_versions.installed()]
    kinds = [getattr(u, name, ()) for u in utils for name in ("PyDataset", "Sequence")]
    if is_dataset or any(isinstance(x, kind) for kind in kinds):
        for name, value in zip((*_NAMES[1:], "batch_size"), (*others, batch_size)):
            if value is not None:
                raise ValueError(
                    f"`{name}` must be None where `x` is a {type(x).__name__}, got "
                    f"{value!r:.60}. Let `x` yield whole batches: (x, y) or "
                    "(x, y, sample_weight)."
                )
        if not is_dataset:
            return (x[number] for number in range(len(x))), len(x)
        length = int(tf.data.experimental.cardinality(x).numpy())
        return iter(x), None if length < 0 else length
    for name, part in zip(_NAMES, data):
        if part is not None:
            _check_arrays(name, part)
    shapes = [np.shape(part) for part in tf.nest.flatten(data) if part is not None]
    lengths = {shape[0] if shape else 0 for shape in shapes}
    if len(lengths) != 1:
        raise ValueError(
            "`x`, `y` and `sample_weight` must have the same number of rows, got "
            f"shapes {', '.join(map(str, shapes))}."
        )
    rows = lengths.pop()
    size = batch_size or (rows if 0 < rows <= whole else 32)

    def from_row(start: int) -> Any:
        x, y, sample_weight = tf.nest.map_structure(
            lambda part: None if part is None else part[start : start + size], data
        )
        if y is None:
            return (x,) if isinstance(x, (list, tuple)) else x
        return (x, y) if sample_weight is None else (x, y, sample_weight)

    return map(from_row, range(0, rows, size)), -(-rows // size)


def _check_arrays(name: str, x: Any) -> None:
    """Raises unless `x` is a nest of arrays. NumPy may never return from others."""
    leaves = tf.nest.flatten(x)
    for leaf in leaves:
        if hasattr(leaf, "shape") and len(leaf.shape) > 0:
            continue
        is_number = isinstance(leaf, (int, float, np.generic))
        if is_number and isinstance(x, (list, tuple)):
            instead = f"A list stands for several inputs: write np.array({name})."
        elif isinstance(leaf, tf.distribute.DistributedDataset):
            instead = "Pass the dataset that was distributed."
        elif hasattr(leaf, "__next__"):
            instead = "This would use it up. Pass one batch, x, y = next(x)."
        elif hasattr(leaf, "__getitem__") and hasattr(leaf, "__len__"):
            instead = "Pass some of its items: x, y = map(np.stack, zip(*items))."
        else:
            instead = "Pass the data that you pass to `fit`."
        thing = x if len(leaves) > 1 else leaf
        others = ", a tf.data.Dataset, or a PyDataset or Sequence of Keras"
        wanted = f"arrays{others}" if name == "x" else "an array"
        raise TypeError(
            f"`{name}` must be {wanted}, got {arguments.typed(thing)}. {instead}"
        )


def _tensor(part: Any) -> Any:
    # float64 becomes float32, as in fit. Ragged and sparse tensors stay unchanged.
    if part is not None and not tf.is_tensor(part):
        part = tf.convert_to_tensor(np.asarray(part))
    is_double = isinstance(part, tf.Tensor) and part.dtype == tf.float64
    return tf.cast(part, tf.float32) if is_double else part


def check_finite(*batch: Any) -> None:
    """Raises a ValueError if a batch holds inf or NaN."""
    for name, part in zip(_NAMES, batch):
        values = list(map(dense_part, tf.nest.flatten(part)))
        bad = sum(look(tensor).bad for tensor in floats_in(values))
        if bad:
            raise ValueError(
                f"`{name}` must be finite, got {bad:,} values that are inf or NaN. "
                f"Clean the data until np.isfinite({name}).all()."
            )


def with_progress(
    keras: Any, batches: Iterable[Batch], length: int, verbose: int
) -> Iterator[Batch]:
    """Yields batches, with Keras's own progress bar."""
    bar, number = keras.utils.Progbar(length, verbose=verbose), 0
    for number, batch in enumerate(batches, 1):
        yield batch
        bar.update(number, finalize=False)
    bar.update(number, finalize=True)
