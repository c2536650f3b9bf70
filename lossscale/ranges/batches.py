"""The data that `fit` takes, batch by batch: arrays, datasets and sequences."""

from __future__ import annotations

import itertools
from typing import Any, Iterable, Iterator, Optional, Tuple

import numpy as np
import tensorflow as tf

from lossscale.arguments import shown
from lossscale.runtime import kerases

#: x, y and sample weights, as tensors; None where there are none.
Batch = Tuple[Any, Any, Any]


_NO_DATA = """\
`{name}` must be {wanted}, got {got} of type {kind}. {instead}"""
_WANTED = "arrays, a tf.data.Dataset, or a PyDataset or Sequence of Keras"
_EMPTY = "`x` must hold at least one batch, got none."


def first_batches(
    data: Tuple[Any, Any, Any],
    batch_size: Optional[int],
    batches: Optional[int],
) -> Tuple[Iterator[Batch], Optional[int]]:
    """Returns an iterator over the first batches, in order, and how many there are.

    Args:
      data: `(x, y, sample_weight)` as the user passed them.
      batch_size: The rows of a batch, if `x` holds arrays.
      batches: The most batches to return. None: all.
    """
    x = data[0]
    if _is_dataset(x) or _is_sequence(x):
        _only_x(data, batch_size)
        found, length = _made_by(x)
        if length is None and batches is None:
            raise ValueError(
                "`batches` must be a number if the length of the data is unknown or "
                "infinite, got None. Say how many batches to look at."
            )
    else:
        for name, part in zip(("x", "y", "sample_weight"), data):
            if part is not None:
                _check_arrays(name, part)
        size = batch_size or 32
        length = -(-_rows(data) // size)
        found = _slices(data, size, length)
    if not length and length is not None:
        raise ValueError(_EMPTY)
    limits = [number for number in (length, batches) if number is not None]
    found = map(_tensors, itertools.islice(found, batches))
    first = next(found, None)  # an empty dataset may have an unknown length
    if first is None:
        raise ValueError(_EMPTY)
    return itertools.chain([first], found), min(limits, default=None)


def with_progress(
    keras: Any, batches: Iterable[Batch], length: Optional[int], verbose: int
) -> Iterator[Batch]:
    """Yields batches, with Keras's own progress bar."""
    bar, number = keras.utils.Progbar(length, verbose=verbose), 0
    for number, batch in enumerate(batches, 1):
        yield batch
        bar.update(number, finalize=False)
    bar.update(number, finalize=True)


def _is_dataset(x: Any) -> bool:
    return isinstance(x, tf.data.Dataset)


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
        kind = type(thing).__name__
        wanted = _WANTED if name == "x" else "an array"
        raise TypeError(
            _NO_DATA.format(
                name=name, wanted=wanted, got=shown(thing), kind=kind, instead=instead
            )
        )


def _only_x(data: Tuple[Any, Any, Any], batch_size: Optional[int]) -> None:
    given = dict(zip(("y", "sample_weight", "batch_size"), (*data[1:], batch_size)))
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"`{name}` must be None where `x` is a {type(data[0]).__name__}, got "
                f"{value!r:.60}. Let `x` yield whole batches: (x, y) or "
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
    x, y, sample_weight = (
        None if part is None else tf.nest.map_structure(_tensor, part) for part in batch
    )
    return x, y, sample_weight


def _tensor(part: Any) -> Any:
    # float64 becomes float32, as in fit. Ragged and sparse tensors stay unchanged.
    if not tf.is_tensor(part):
        part = np.asarray(part)
        if part.dtype == np.float64:
            part = part.astype(np.float32)
        return tf.convert_to_tensor(part)
    is_dense = isinstance(part, tf.Tensor)
    return tf.cast(part, tf.float32) if is_dense and part.dtype == "float64" else part
