"""A recorded run: which steps were finite, and what else is known. One file format.

The format is NumPy's `.npz`, a zip archive of plain arrays, that NumPy reads and writes
without this package. Its keys:

| key          | dtype     | shape     |                                               |
| ------------ | --------- | --------- | --------------------------------------------- |
| `is_finite`  | `bool`    | `[steps]` | were the step's gradients finite everywhere?  |
| `loss_scale` | `float32` | `[steps]` | the scale the step was taken with; may be     |
|              |           |           | missing                                       |
| `largest`    | `float32` | `[steps]` | the greatest magnitude of its unscaled        |
|              |           |           | gradients; may be missing                     |

Steps are in order and without gaps, the skipped ones among them. Other keys are
allowed and ignored: whoever records may add what it likes. Nothing is ever unpickled.
"""

from __future__ import annotations

import os
import zipfile
from typing import Any, Dict, NamedTuple, Optional

import numpy as np

from lossscale import arguments


class _Flags(NamedTuple):
    """What a `Run` is unpacked into, as it was before it held more."""

    is_finite: Any
    loss_scale: Optional[Any] = None


class Run(_Flags):
    """A recorded run, a pair of `is_finite` and `loss_scale` that may hold more.

    Attributes:
      is_finite: A `bool` array of shape `[steps]`.
      loss_scale: A `float32` array of shape `[steps]`, or None.
      largest: A `float32` array of shape `[steps]`, the greatest magnitudes of the
        unscaled gradients, or None.
    """

    largest: Optional[Any]

    def __new__(  # noqa: PYI034 - Python 3.8 has no Self
        cls,
        is_finite: Any,
        loss_scale: Optional[Any] = None,
        largest: Optional[Any] = None,
    ) -> Run:
        run = super().__new__(cls, is_finite, loss_scale)
        run.largest = largest
        return run


def save_run(
    path: Any,
    is_finite: Any,
    loss_scale: Optional[Any] = None,
    largest: Optional[Any] = None,
) -> None:
    """Writes a recorded run, as `simulate` and `load_run` read it.

    The file appears whole or not at all: it is written as `path + ".part"`,
    and then moved. A run that dies leaves what it last saved.

    Args:
      path: Where to write. No suffix is added.
      is_finite: A `bool` array of shape `[steps]`.
      loss_scale: A `float32` array of shape `[steps]`, or None.
      largest: A `float32` array of shape `[steps]`, the greatest magnitude of each
        step's unscaled gradients, or None.

    Raises:
      TypeError: An array has the wrong type.
      ValueError: An array has the wrong shape.
    """
    file_name = arguments.path("path", path)
    arrays: Dict[str, Any] = {"is_finite": flags("is_finite", is_finite)}
    for name, value in (("loss_scale", loss_scale), ("largest", largest)):
        if value is not None:
            arrays[name] = _numbers(name, value, len(arrays["is_finite"]))
    beside = f"{file_name}.part"
    with open(beside, "wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(beside, file_name)


def load_run(path: Any) -> Run:
    """Reads a recorded run, as `save_run` and `LossScaleMonitor` write it.

    Args:
      path: A NumPy `.npz` file that holds `is_finite`, a `bool` array of shape
        `[steps]`, and may hold `loss_scale` and `largest`, `float32` arrays of the same
        shape. What else is in it is ignored.

    Returns:
      A `Run`.

    Raises:
      OSError: The file cannot be read.
      TypeError: An array in it has the wrong type.
      ValueError: It is no `.npz` file, has no `is_finite`, or a shape is wrong.
    """
    file_name = arguments.path("path", path)
    with open(file_name, "rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError(
                f"`path` must be a NumPy .npz file, got {file_name!r}, which is "
                "none. lossscale.save_run writes one."
            )
        file.seek(0)
        with np.load(file, allow_pickle=False) as found:
            if "is_finite" not in found:
                raise ValueError(
                    f'`path` must hold an array "is_finite", got {file_name!r} '
                    f"with {sorted(found)}."
                )
            is_finite = flags("is_finite", found["is_finite"])
            numbers = {
                name: _numbers(name, found[name], len(is_finite))
                for name in ("loss_scale", "largest")
                if name in found
            }
            return Run(is_finite, **numbers)


def flags(name: str, value: Any) -> Any:
    """Returns `value` as a `bool` array of shape `[steps]`."""
    array = arguments.array(name, value)
    if array.size and array.dtype != np.bool_:
        raise TypeError(
            f"`{name}` must hold booleans, got dtype {array.dtype}. "
            f"numpy.asarray({name}, bool) makes them of zeros and ones."
        )
    return one_dimensional(name, array).astype(np.bool_)


def one_dimensional(name: str, array: Any) -> Any:
    """Returns `array` if it is a sequence of numbers."""
    if array.ndim != 1:
        raise ValueError(
            f"`{name}` must have one entry per step, shape [steps], got shape "
            f"{list(array.shape)}."
        )
    return array


def _numbers(name: str, value: Any, steps: int) -> Any:
    array = arguments.array(name, value)
    if not (np.issubdtype(array.dtype, np.floating) or array.size == 0):
        raise TypeError(f"`{name}` must hold floats, got dtype {array.dtype}.")
    if one_dimensional(name, array).shape != (steps,):
        raise ValueError(
            f"`{name}` must have one entry per step, {steps}, got {array.size}."
        )
    return array.astype(np.float32)
