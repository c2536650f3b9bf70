"""The file format of a recorded run: which steps were finite, and what else is known.

The format is NumPy's `.npz`, a zip archive of plain arrays, which NumPy reads and
writes without this package. Its keys:

| key          | dtype     | shape     |                                               |
| ------------ | --------- | --------- | --------------------------------------------- |
| `is_finite`  | `bool`    | `[steps]` | were the step's gradients finite everywhere?  |
| `loss_scale` | `float32` | `[steps]` | the scale the step was taken with; may be     |
|              |           |           | missing                                       |
| `largest`    | `float32` | `[steps]` | the greatest magnitude of its unscaled        |
|              |           |           | gradients; may be missing                     |

Steps are in order and without gaps, skipped steps included. Other keys are allowed and
ignored, so that any program that records can add its own. Nothing is ever unpickled.
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
    """A recorded run. `is_finite, loss_scale = run` works.

    Attributes:
      is_finite: A `bool` array of shape `[steps]`.
      loss_scale: A `float32` array of shape `[steps]`. None if it was not recorded.
      largest: A `float32` array of shape `[steps]`: of each step the greatest magnitude
        of any unscaled gradient. None if it was not recorded.
    """

    is_finite: Any
    loss_scale: Optional[Any] = None
    largest: Optional[Any] = None

    # In older versions a run was a pair, so it still behaves like one.
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

        If `largest` is known, also draws the largest scale at which each step does not
        overflow in float16, 65504 / largest. A loss scale above that line overflows;
        far below it small gradients are lost.

        Args:
          ax: matplotlib `Axes` to draw on. None makes a figure.

        Returns:
          The `Axes`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        limit = None
        if self.largest is not None:
            # There is no limit for a step that was skipped or had no gradient.
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
    """Writes a recorded run to a file that `simulate` and `load_run` can read.

    The file appears whole or not at all: this writes `path + ".part"`, and then moves
    it. If a run dies, the file that it saved last remains.

    Args:
      path: The path of the file. No suffix is added.
      is_finite: A `bool` array of shape `[steps]`.
      loss_scale: A `float32` array of shape `[steps]`, or None.
      largest: A `float32` array of shape `[steps]`, the greatest magnitude of each
        step's unscaled gradients, or None.

    Raises:
      TypeError: An array has the wrong type.
      ValueError: An array has the wrong shape, `path` is a folder, or `path` is a file
        that is neither a recorded run nor empty, which this never overwrites.
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
    """Reads a recorded run that `save_run` or `LossScaleMonitor` wrote.

    Args:
      path: A NumPy `.npz` file that holds `is_finite`, a `bool` array of shape
        `[steps]`, and may hold `loss_scale` and `largest`, `float32` arrays of the same
        shape. Other arrays in it are ignored.

    Returns:
      A `Run`.

    Raises:
      OSError: The file cannot be opened.
      TypeError: An array in it has the wrong type.
      ValueError: The file is no `.npz` file, is damaged, or has no `is_finite`, or an
        array has the wrong shape.
    """
    file_name = arguments.path("path", path)
    with open(file_name, "rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError(
                f"`path` must be a NumPy .npz file, got {file_name!r}, which is no "
                "such file. lossscale.save_run writes one."
            )
        file.seek(0)
        try:
            arrays, names = _arrays(file)
        except Exception as error:  # zipfile, zlib and NumPy raise a dozen kinds
            raise ValueError(
                f"`path` must be an intact NumPy .npz file, got {file_name!r}, which "
                f"is damaged or holds no plain arrays: {type(error).__name__}: {error}"
            ) from error
    if "is_finite" not in arrays:
        raise ValueError(
            f'`path` must hold an array "is_finite", got {file_name!r} with {names}.'
        )
    is_finite = flags("is_finite", arrays.pop("is_finite"))
    numbers = {n: _numbers(n, each, len(is_finite)) for n, each in arrays.items()}
    return Run(is_finite, **numbers)


def _arrays(file: Any) -> Tuple[Dict[str, Any], List[str]]:
    """Returns our arrays in an open `.npz` file by name, and the names of all."""
    with np.load(file, allow_pickle=False) as found:
        ours = [
            name for name in ("is_finite", "loss_scale", "largest") if name in found
        ]
        return {name: found[name] for name in ours}, sorted(found)


def check_writable(name: str, value: Any) -> str:
    """Returns a path as a string if a run may be written there.

    Raises:
      ValueError: It is a folder, its folder does not exist, or it is an existing file
        of another kind.
    """
    found = arguments.writable_path(name, value)
    if os.path.exists(found) and os.path.getsize(found) and not _is_run(found):
        raise ValueError(
            f"`{name}` must be a new file or a recorded run, got {found!r}, a file of "
            "another kind. To keep it, choose another name; else remove it first."
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
            f"numpy.asarray({name}, bool) converts zeros and ones."
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
