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

import dataclasses
import os
import zipfile
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np

from lossscale import arguments
from lossscale.plotting import scale_text
from lossscale.scales.headroom import FLOAT16_MAX
from lossscale.simulation import picture


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A recorded run. It unpacks as the pair of `is_finite` and `loss_scale`.

    Attributes:
      is_finite: A `bool` array of shape `[steps]`.
      loss_scale: A `float32` array of shape `[steps]`, or None.
      largest: A `float32` array of shape `[steps]`, the greatest magnitudes of the
        unscaled gradients, or None.
    """

    is_finite: Any
    loss_scale: Optional[Any] = None
    largest: Optional[Any] = None

    # It was a tuple of two once.
    def __iter__(self) -> Iterator[Any]:
        return iter((self.is_finite, self.loss_scale))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        return (self.is_finite, self.loss_scale)[index]

    def _replace(self, **changes: Any) -> Run:
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        parts = [f"steps={len(self.is_finite)}", f"skipped={np.sum(~self.is_finite)}"]
        for name in ("loss_scale", "largest"):
            values = getattr(self, name)
            if values is not None and len(values):
                low, high = float(np.min(values)), float(np.max(values))
                parts.append(f"{name}={scale_text(low)} to {scale_text(high)}")
        return f"Run({', '.join(parts)})"

    def plot(self, ax: Any = None) -> Any:
        """Draws the loss scale and the skipped steps.

        With `largest` also the greatest scale at which float16 would have held each
        step's largest gradient, 65504 divided by it. A loss scale above that line
        overflows; far below it small gradients are lost.

        Args:
          ax: matplotlib `Axes` to draw on. None makes a figure.

        Returns:
          The `Axes`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        limit = None
        if self.largest is not None:
            # Nothing is known of a step that was skipped, or had no gradient.
            known = np.isfinite(self.largest) & (self.largest > 0)
            largest = np.where(known, self.largest, np.nan).astype(np.float64)
            limit = FLOAT16_MAX / largest
        lost = ~np.asarray(self.is_finite, bool)
        return picture.draw(
            "Run.plot",
            ax,
            self.loss_scale,
            lost,
            limit=limit,
            limit_label="what float16 holds: 65504 / largest gradient",
        )


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
      ValueError: An array has the wrong shape, or `path` is a folder, or a file that is
        no recorded run: none is overwritten but an empty one.
    """
    file_name = check_writable("path", path)
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
      OSError: The file cannot be opened.
      TypeError: An array in it has the wrong type.
      ValueError: It is no `.npz` file, is damaged, has no `is_finite`, or a shape is
        wrong.
    """
    file_name = arguments.path("path", path)
    with open(file_name, "rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError(
                f"`path` must be a NumPy .npz file, got {file_name!r}, which is "
                "none. lossscale.save_run writes one."
            )
        file.seek(0)
        try:
            arrays, names = _arrays(file)
        except Exception as error:  # zipfile, zlib and NumPy raise a dozen kinds
            raise ValueError(
                f"`path` must be a whole NumPy .npz file, got {file_name!r}, which is "
                f"damaged or holds no plain arrays: {type(error).__name__}: {error}"
            ) from error
    if "is_finite" not in arrays:
        raise ValueError(
            f'`path` must hold an array "is_finite", got {file_name!r} with {names}.'
        )
    is_finite = flags("is_finite", arrays.pop("is_finite"))
    numbers = {n: _numbers(n, each, len(is_finite)) for n, each in arrays.items()}
    return Run(is_finite, **numbers)


def _arrays(file: Any) -> Tuple[Dict[str, Any], List[str]]:
    """Returns what is ours in an open `.npz` file by name, and all names."""
    with np.load(file, allow_pickle=False) as found:
        ours = [
            name for name in ("is_finite", "loss_scale", "largest") if name in found
        ]
        return {name: found[name] for name in ours}, sorted(found)


def check_writable(name: str, value: Any) -> str:
    """Returns the path of a run that may be written, as a string.

    Raises:
      ValueError: It is a folder, in none that exists, or an existing file of another
        kind.
    """
    found = arguments.writable_path(name, value)
    if os.path.exists(found) and os.path.getsize(found) and not _is_run(found):
        raise ValueError(
            f"`{name}` must be a new file or a recorded run, got {found!r}, a file of "
            "another kind, which would be lost. Choose another name, or remove it."
        )
    return found


def _is_run(path: str) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return "is_finite.npy" in file.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


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
