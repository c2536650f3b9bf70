"""What `fit` takes as data, batch by batch: arrays, datasets and sequences."""

from __future__ import annotations

import itertools
from typing import Any, Iterator, Optional, Tuple

import numpy as np
import tensorflow as tf

#: x, y and sample weights, as tensors; None where there are none.
Batch = Tuple[Any, Any, Any]


def first_batches(
    keras: Any,
    data: Tuple[Any, Any, Any],
    batch_size: Optional[int],
    batches: Optional[int],
) -> Tuple[Iterator[Batch], Optional[int]]:
    """Returns an iterator over the first batches, in order, and how many it has.

    Args:
      keras: The Keras whose sequences are meant.
      data: `(x, y, sample_weight)` as the user gave them.
      batch_size: Rows of a batch, of arrays only.
      batches: At most so many. None: all.
    """
    x = data[0]
    if _is_dataset(x) or _is_sequence(keras, x):
        _only_x(data, batch_size)
        found, length = _made_by(x)
        if length is None and batches is None:
            raise ValueError(
                "`batches` must be a number for data that never ends or does not say "
                "how long it is, got None. Say how many batches to look at."
            )
    else:
        size = batch_size or 32
        length = -(-_rows(data) // size)
        found = _slices(data, size, length)
    if not length and length is not None:
        raise ValueError("`x` must hold at least one batch, got none.")
    limits = [number for number in (length, batches) if number is not None]
    return map(_tensors, itertools.islice(found, batches)), min(limits, default=None)


def _is_dataset(x: Any) -> bool:
    return isinstance(x, tf.data.Dataset)


def _is_sequence(keras: Any, x: Any) -> bool:
    kinds = [getattr(keras.utils, name, ()) for name in ("PyDataset", "Sequence")]
    return any(isinstance(x, kind) for kind in kinds)


def _only_x(data: Tuple[Any, Any, Any], batch_size: Optional[int]) -> None:
    given = dict(zip(("y", "sample_weight", "batch_size"), (*data[1:], batch_size)))
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"`{name}` must be None where `x` is a {type(data[0]).__name__}, got "
                f"{value!r:.60}. It makes whole batches: (x, y) or "
                "(x, y, sample_weight)."
            )


def _made_by(x: Any) -> Tuple[Iterator[Batch], Optional[int]]:
    if _is_dataset(x):
        length = int(tf.data.experimental.cardinality(x).numpy())
        return map(_unpacked, iter(x)), None if length < 0 else length
    length = len(x)
    return (_unpacked(x[index]) for index in range(length)), length


def _unpacked(batch: Any) -> Batch:
    if not isinstance(batch, (tuple, list)):
        return batch, None, None
    x, y, sample_weight = (*batch, None, None)[:3]
    return x, y, sample_weight


def _rows(data: Tuple[Any, Any, Any]) -> int:
    shapes = [np.shape(part) for part in tf.nest.flatten(data) if part is not None]
    lengths = {shape[0] if shape else 0 for shape in shapes}
    if len(lengths) != 1:
        raise ValueError(
            "`x`, `y` and `sample_weight` must have the same number of rows, got "
            f"shapes {', '.join(map(str, shapes))}."
        )
    return int(lengths.pop())


def _slices(data: Tuple[Any, Any, Any], size: int, length: int) -> Iterator[Batch]:
    for start in range(0, length * size, size):
        yield tf.nest.map_structure(
            lambda part: None if part is None else part[start : start + size],  # noqa: B023 - used at once
            data,
        )


def _tensors(batch: Batch) -> Batch:
    return tuple(map(_structure_of_tensors, batch))


def _structure_of_tensors(part: Any) -> Any:
    return None if part is None else tf.nest.map_structure(_tensor, part)


def _tensor(part: Any) -> Any:
    # float64 becomes float32, as in fit. Ragged and sparse tensors stay what they are.
    if not tf.is_tensor(part):
        part = np.asarray(part)
        if part.dtype == np.float64:
            part = part.astype(np.float32)
        return tf.convert_to_tensor(part)
    is_dense = isinstance(part, tf.Tensor)
    return tf.cast(part, tf.float32) if is_dense and part.dtype == "float64" else part
