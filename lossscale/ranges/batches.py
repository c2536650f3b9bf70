"""The data that `fit` takes, batch by batch: arrays, datasets and sequences."""

from __future__ import annotations

import itertools
from typing import Any, Iterable, Iterator, Optional, Tuple

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.runtime import kerases

#: x, y and sample weights, as tensors; None where there are none.
Batch = Tuple[Any, Any, Any]

_NAMES = ("x", "y", "sample_weight")
_WANTED = "arrays, a tf.data.Dataset, or a PyDataset or Sequence of Keras"


def first_batches(
    data: Batch, batch_size: Optional[int], batches: Optional[int]
) -> Tuple[Batch, Iterator[Batch], int]:
    """Returns the first batch, an iterator that begins with it, and its length.

    Raises a TypeError or ValueError unless `data`, which is `(x, y, sample_weight)` as
    the user passed them, and the other arguments are such as the public tools take.
    """
    batches = arguments.optional(arguments.count, "batches", batches)
    batch_size = arguments.optional(arguments.count, "batch_size", batch_size)
    found, length = _all_batches(data, batch_size)
    if length is None and batches is None:
        raise ValueError(
            "`batches` must be a number if the length of the data is unknown or "
            "infinite, got None. Say how many batches to look at."
        )
    found = map(_tensors, itertools.islice(found, batches))
    first = next(found, None)
    if first is None:
        raise ValueError("`x` must hold at least one batch, got none.")
    limits = [number for number in (length, batches) if number is not None]
    return first, itertools.chain([first], found), min(limits)


def with_progress(
    keras: Any, batches: Iterable[Batch], length: int, verbose: int
) -> Iterator[Batch]:
    """Yields batches, with Keras's own progress bar."""
    bar, number = keras.utils.Progbar(length, verbose=verbose), 0
    for number, batch in enumerate(batches, 1):
        yield batch
        bar.update(number, finalize=False)
    bar.update(number, finalize=True)


def _all_batches(
    data: Batch, batch_size: Optional[int]
) -> Tuple[Iterator[Any], Optional[int]]:
    """Returns an iterator, and its length. None: it is unknown or infinite."""
    x = data[0]
    is_dataset = isinstance(x, tf.data.Dataset)
    if is_dataset or _is_sequence(x):
        given = dict(zip((*_NAMES[1:], "batch_size"), (*data[1:], batch_size)))
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"`{name}` must be None where `x` is a {type(x).__name__}, got "
                    f"{value!r:.60}. Let `x` yield whole batches: (x, y) or "
                    "(x, y, sample_weight)."
                )
    if is_dataset:
        length = int(tf.data.experimental.cardinality(x).numpy())
        return iter(x), None if length < 0 else length
    if _is_sequence(x):
        return (x[number] for number in range(len(x))), len(x)
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
    rows, size = lengths.pop(), batch_size or 32
    return (_rows(data, n, n + size) for n in range(0, rows, size)), -(-rows // size)


def _is_sequence(x: Any) -> bool:
    # A sequence of any Keras will do, since it yields whole batches.
    kinds = [
        getattr(keras.utils, name, ())
        for keras in kerases.installed()
        for name in ("PyDataset", "Sequence")
    ]
    return any(isinstance(x, kind) for kind in kinds)


def _check_arrays(name: str, x: Any) -> None:
    """Raises unless `x` is an array, or a nest of arrays.

    Call this before NumPy: it would read an object with `__len__` and `__getitem__`,
    but without an end, for ever.
    """
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
        raise TypeError(
            f"`{name}` must be {_WANTED if name == 'x' else 'an array'}, got "
            f"{arguments.shown(thing)} of type {type(thing).__name__}. {instead}"
        )


def _rows(data: Batch, start: int, end: int) -> Any:
    return tf.nest.map_structure(
        lambda part: None if part is None else part[start:end], data
    )


def _tensors(batch: Any) -> Batch:
    if not isinstance(batch, (tuple, list)):
        batch = (batch,)
    x, y, sample_weight = tf.nest.map_structure(_tensor, (*batch, None, None)[:3])
    return x, y, sample_weight


def _tensor(part: Any) -> Any:
    # float64 becomes float32, as in fit. Ragged and sparse tensors stay unchanged.
    if part is None:
        return None
    if not tf.is_tensor(part):
        part = np.asarray(part)
        if part.dtype == np.float64:
            part = part.astype(np.float32)
        return tf.convert_to_tensor(part)
    is_dense = isinstance(part, tf.Tensor)
    return tf.cast(part, tf.float32) if is_dense and part.dtype == "float64" else part
