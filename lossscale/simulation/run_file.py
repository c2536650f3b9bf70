"""A recorded run: its file format, and its picture.

The format is NumPy's `.npz`, a zip archive of plain arrays, which NumPy reads and
writes without this package. Its keys are the attributes of `Run`, with their dtypes and
shapes; all but `is_finite` may be missing. Steps are in order and without gaps, skipped
steps included. Any program that records can add other keys, which are ignored. Nothing
is ever unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zipfile
from typing import Any, Dict, Optional

import numpy as np

from lossscale import arguments
from lossscale.arguments import shown
from lossscale.plotting import pyplot, scale_text
from lossscale.runtime.aliases import Array
from lossscale.scales.headroom import FLOAT16_MAX

#: The names of the arrays in a file, and their dtypes. The file format: never rename.
_ARRAYS = {
    "is_finite": np.bool_,
    "loss_scale": np.float32,
    "largest": np.float32,
    "bad_losses": np.bool_,
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Run:
    """What happened at each step of a run: what `load_run` reads from a file.

    `simulate(loss_scale, is_finite=run.is_finite)` tries another loss scale on the same
    overflows. That is right only for scales near those of this run. For others pass
    what you know of `limit`, the scale above which each step overflows.

    Attributes:
      is_finite: A `bool` array of shape `[steps]`: whether all gradients of a step were
        finite.
      loss_scale: A `float32` array of shape `[steps]`: what multiplied the loss of a
        step. None if it was not recorded.
      largest: A `float32` array of shape `[steps]`: the largest magnitude among the
        unscaled gradients of a step. None if it was not recorded.
      bad_losses: A `bool` array of shape `[steps]`: whether a step was skipped because
        its loss was not finite before it was scaled. None if it was not recorded.
    """

    is_finite: Array
    loss_scale: Optional[Array] = None
    largest: Optional[Array] = None
    bad_losses: Optional[Array] = None

    def __repr__(self) -> str:
        parts = [f"steps={len(self.is_finite)}", f"skipped={np.sum(~self.is_finite)}"]
        for name in ("loss_scale", "largest"):
            values = getattr(self, name)
            if values is not None and len(values):
                low, high = float(np.min(values)), float(np.max(values))
                parts.append(f"{name}={scale_text(low)} to {scale_text(high)}")
        if self.bad_losses is not None and self.bad_losses.any():
            parts.append(f"bad_losses={np.sum(self.bad_losses)}")
        return f"Run({', '.join(parts)})"

    def plot(self, ax: Any = None) -> Any:
        """Draws the loss scale and the skipped steps.

        If `largest` is known, also draws 65504 / largest: a loss scale above that line
        overflows in float16, and far below it small gradients are lost.

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
        label = "what float16 holds: 65504 / largest gradient"
        lost = ~np.asarray(self.is_finite, bool)
        return draw(ax, self.loss_scale, lost, limit, label)


def save_run(
    path: Any,
    is_finite: Any,
    loss_scale: Optional[Any] = None,
    largest: Optional[Any] = None,
    bad_losses: Optional[Any] = None,
) -> None:
    """Writes a recorded run to a file that `simulate` and `load_run` can read.

    The file appears whole or not at all: this writes `path + ".part"` and moves it.

    Args:
      path: The path of the file. No suffix is added.
      is_finite: A `bool` array of shape `[steps]`. `Run` says what each array holds.
      loss_scale: A `float32` array of shape `[steps]`, or None.
      largest: A `float32` array of shape `[steps]`, or None.
      bad_losses: A `bool` array of shape `[steps]`, or None.

    Raises:
      TypeError: An array has the wrong type.
      ValueError: An array has the wrong shape, `path` is a folder, or `path` is a file
        that is neither a recorded run nor empty, which this never overwrites.
    """
    file_name = check_writable("path", path)
    given = (is_finite, loss_scale, largest, bad_losses)
    arrays: Dict[str, Any] = _checked(dict(zip(_ARRAYS, given)))
    beside = f"{file_name}.part"
    with open(beside, "wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(beside, file_name)


def load_run(path: Any) -> Run:
    """Reads a recorded run that `save_run` or `LossScaleMonitor` wrote.

    Args:
      path: A NumPy `.npz` file with arrays that are named as those of a `Run`.

    Returns:
      A `Run`.

    Raises:
      OSError: The file cannot be opened.
      TypeError: An array in it has the wrong type.
      ValueError: The file is no intact `.npz` file, or has no `is_finite`, or an array
        has the wrong shape, or a number is NaN or negative.
    """
    file_name = arguments.path("path", path)
    with open(file_name, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as stored:
                names = sorted(stored)
                found = {name: stored[name] for name in _ARRAYS if name in names}
        except Exception as error:  # zipfile, zlib and NumPy raise a dozen kinds
            raise ValueError(
                f"`path` must be a NumPy .npz file, as lossscale.save_run writes it, "
                f"got {file_name!r}, which is another file, damaged, or holds no plain "
                f"arrays: {type(error).__name__}: {error}"
            ) from error
    if "is_finite" not in found:
        raise ValueError(
            f'`path` must hold an array "is_finite", got {file_name!r} with {names}.'
        )
    try:
        arrays = _checked(found)
        for name, array in arrays.items():
            check_not_negative(name, array)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"`path` must be a recorded run, got {file_name!r}: {error}"
        ) from error
    return Run(**arrays)


def check_writable(name: str, value: Any) -> str:
    """Returns a path as a string if a run may be written there, else raises."""
    found = arguments.path(name, value)
    folder, file_name = os.path.split(found)
    if os.path.isdir(found) or not file_name or not os.path.isdir(folder or os.curdir):
        raise ValueError(
            f"`{name}` must be the name of a file in a folder that exists, got "
            f"{found!r}. Create the folder, or write a name such as run.npz."
        )
    if not os.path.exists(found) or not os.path.getsize(found):
        return found
    not_one = (zipfile.BadZipFile, ValueError, NotImplementedError)
    with contextlib.suppress(*not_one), zipfile.ZipFile(found) as file:
        if "is_finite.npy" in file.namelist():
            return found
    raise ValueError(
        f"`{name}` must be a new file or a recorded run, got {found!r}, a file of "
        "another kind. To keep it, choose another name; else remove it first."
    )


def _checked(given: Dict[str, Any]) -> Dict[str, Array]:
    """Returns a run's arrays as the file holds them, without those that are None."""
    arrays: Dict[str, Array] = {}
    steps = None
    for name, dtype in _ARRAYS.items():
        if steps is None or given.get(name) is not None:
            arrays[name] = per_step(name, given[name], dtype, steps)
            steps = len(arrays[name])
    return arrays


def per_step(name: str, value: Any, dtype: Any, steps: Optional[int] = None) -> Array:
    """Returns an argument as an array of shape `[steps]`, of any length if None."""
    # For NumPy a timedelta64 is a number, too: not for us.
    holds, kinds = ("booleans", "b") if dtype is np.bool_ else ("numbers", "iuf")
    try:
        array: Array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"`{name}` must be an array, got {shown(value)}.") from error
    if array.size and array.dtype.kind not in kinds:
        fix = f" Pass numpy.asarray({name}, bool)." if kinds == "b" else ""
        raise TypeError(f"`{name}` must hold {holds}, got dtype {array.dtype}.{fix}")
    if array.ndim != 1 or steps not in {None, array.size}:
        wanted = "steps" if steps is None else steps
        raise ValueError(
            f"`{name}` must have one entry per step, shape [{wanted}], got shape "
            f"{list(array.shape)}."
        )
    with np.errstate(over="ignore"):  # infinity will do
        return array.astype(dtype)


def check_not_negative(name: str, array: Array) -> None:
    """Raises if an array holds a NaN or a negative number."""
    refused = array[~(array >= 0)]
    if refused.size:
        raise ValueError(
            f"`{name}` must hold no NaN and nothing negative, got {refused[0]}."
        )


def draw(
    ax: Any,
    loss_scale: Optional[Any],
    lost: Any,
    limit: Optional[Any] = None,
    limit_label: str = "limit",
) -> Any:
    """Draws a run on matplotlib's `Axes`. Above its `limit` a step overflows."""
    if ax is None:
        ax = pyplot().subplots(figsize=(8, 3), layout="constrained")[1]
    if limit is not None:
        ax.plot(limit, color="0.7", label=limit_label)
    which = np.flatnonzero(lost)
    heights = np.ones(len(which))
    if loss_scale is not None:
        heights = loss_scale[which]
        ends = np.append(loss_scale, loss_scale[-1:])  # the last step ends, too
        ax.step(range(len(ends)), ends, where="post", label="loss scale")
    ax.plot(which, heights, "|", color="C3", label=f"{len(which)} steps lost")
    ax.set_yscale("log", base=2)
    ax.set_xlabel("step")
    ax.set_ylabel("loss scale")
    ax.legend()
    return ax
