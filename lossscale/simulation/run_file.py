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
from typing import Any, Dict, Iterator, Optional

import numpy as np

from lossscale import arguments
from lossscale.arguments import shown
from lossscale.plotting import pyplot, scale_text
from lossscale.runtime.aliases import Array
from lossscale.scales.headroom import FLOAT16_MAX

#: The names of the arrays in a file. The file format: never rename them.
_ARRAYS = ("is_finite", "loss_scale", "largest", "bad_losses")
#: NumPy's kinds of dtypes. For NumPy a timedelta64 is a number, too: not for us.
_KINDS = {"booleans": "b", "floats": "f", "numbers": "iuf"}
#: Up to this many lost steps each get a mark. If there are more, the density is drawn.
_MARKS = 300
_BINS = 200
#: The share of the height that the density takes if every step was lost.
_HEIGHT = 0.4


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Run:
    """What happened at each step of a run: what `load_run` reads from a file.

    `simulate(loss_scale, is_finite=run.is_finite)` tries another loss scale on the same
    overflows. That is right only for scales near those of this run. For others pass
    what you know of `limit`, the scale above which each step overflows.
    `is_finite, loss_scale = run` gives the first two arrays.

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

    # A run still behaves like the pair that it once was.
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
        lost = ~np.asarray(self.is_finite, bool)
        label = "what float16 holds: 65504 / largest gradient"
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
      is_finite: A `bool` array of shape `[steps]`.
      loss_scale: A `float32` array of shape `[steps]`, or None.
      largest: A `float32` array of shape `[steps]`, the greatest magnitude of each
        step's unscaled gradients, or None.
      bad_losses: A `bool` array of shape `[steps]`, the steps skipped because the loss
        was not finite before it was scaled, or None.

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
      path: A NumPy `.npz` file that holds the arrays `is_finite` and perhaps
        `loss_scale`, `largest` and `bad_losses`. Others are ignored.

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
        if not zipfile.is_zipfile(file):
            raise ValueError(
                f"`path` must be a NumPy .npz file, got {file_name!r}, which is no "
                "such file. lossscale.save_run writes one."
            )
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) as stored:
                names = sorted(stored)
                found = {name: stored[name] for name in _ARRAYS if name in names}
        except Exception as error:  # zipfile, zlib and NumPy raise a dozen kinds
            raise ValueError(
                f"`path` must be an intact NumPy .npz file, got {file_name!r}, which "
                f"is damaged or holds no plain arrays: {type(error).__name__}: {error}"
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
    if os.path.isdir(found) or found.endswith(("/", os.sep)):
        raise ValueError(
            f"`{name}` must be the name of a file, got the folder {found!r}. Write, "
            f"for example, {os.path.join(found, 'run.npz')!r}."
        )
    folder = os.path.dirname(found) or os.curdir
    if not os.path.isdir(folder):
        raise ValueError(
            f"`{name}` must be in a folder that exists, got {found!r}. Create {folder}."
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
    for name in _ARRAYS:
        if steps is None or given.get(name) is not None:
            is_float = name in ("loss_scale", "largest")
            holds = "floats" if is_float else "booleans"
            array = per_step(name, given[name], holds, steps)
            arrays[name] = array.astype(np.float32) if is_float else array
            steps = len(array)
    return arrays


def per_step(name: str, value: Any, holds: str, steps: Optional[int] = None) -> Array:
    """Returns an argument that `holds` a key of `_KINDS` as an array, shape `[steps]`.

    If `steps` is None, of any length. Booleans are `bool`, others keep their dtype.
    """
    try:
        array: Array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"`{name}` must be an array, got {shown(value)}.") from error
    if array.size and array.dtype.kind not in _KINDS[holds]:
        fix = f" Pass numpy.asarray({name}, bool)." if holds == "booleans" else ""
        raise TypeError(f"`{name}` must hold {holds}, got dtype {array.dtype}.{fix}")
    if array.ndim != 1 or steps not in {None, array.size}:
        wanted = "steps" if steps is None else steps
        raise ValueError(
            f"`{name}` must have one entry per step, shape [{wanted}], got shape "
            f"{list(array.shape)}."
        )
    return array.astype(np.bool_) if holds == "booleans" else array


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
    """Draws arrays of shape `[steps]` on matplotlib's `Axes`. None makes a figure.

    `lost` are the skipped steps, and `limit` is the largest scale at which each does
    not overflow.
    """
    if ax is None:
        ax = pyplot().subplots(figsize=(8, 3), layout="constrained")[1]
    steps = len(lost)
    if limit is not None:
        ax.plot(limit, color="0.7", label=limit_label)
    if loss_scale is not None and steps:
        # Only the corners are drawn: a million equal values in a row are one line.
        corners = np.flatnonzero(np.diff(loss_scale)) + 1
        x = np.concatenate([[0], corners, [steps]])
        y = np.append(loss_scale[x[:-1]], loss_scale[-1])
        ax.step(x, y, where="post", label="loss scale")
    which = np.flatnonzero(lost)
    label = f"{len(which)} steps lost"
    if len(which) <= _MARKS and loss_scale is not None:
        ax.plot(which, loss_scale[which], "|", color="C3", label=label)
    else:
        edges = np.linspace(0, steps, min(_BINS, max(steps, 1)) + 1)
        per_bin = np.histogram(which, edges)[0]
        share = per_bin / np.maximum(np.histogram(np.arange(steps), edges)[0], 1)
        ax.fill_between(
            edges,
            0,
            _HEIGHT * np.append(share, share[-1]),
            step="post",
            transform=ax.get_xaxis_transform(),  # measured from the bottom
            color="C3",
            alpha=0.5,
            linewidth=0,
            label=f"{label}: up to {np.max(share):.0%} of them at a time",
        )
    if loss_scale is not None or limit is not None:
        ax.set_yscale("log", base=2)
    ax.set_xlabel("step")
    ax.set_ylabel("loss scale")
    ax.legend()
    return ax
