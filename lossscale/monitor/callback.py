"""LossScaleMonitor: a Keras callback that shows what the loss scale is doing."""

from __future__ import annotations

import warnings
from typing import Any, List, Optional

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.monitor import diagnosis
from lossscale.monitor.stalls import Reading, Stalls, read
from lossscale.optimizer import LossScaleOptimizer, LossScaleWarning
from lossscale.plotting import scale_text
from lossscale.runtime import kerases
from lossscale.simulation.run_file import save_run

ON_STALL = ("warn", "raise", "stop")

_WRONG_OPTIMIZER = """\
`model.optimizer` must be a lossscale.LossScaleOptimizer, got {optimizer!r}{why}. Write

    model.compile(lossscale.LossScaleOptimizer(optimizer), ...)
"""
_WRAPPED_BY_KERAS = """\
, Keras's own: under mixed_float16 `compile` wraps an optimizer that is not wrapped"""
_SEVERAL_STEPS = """\
`record` must be None if several steps run between two batches that Keras reports, as \
with steps_per_execution: the flags of single steps cannot be known. Got {} steps in \
one. Compile the model with steps_per_execution=1."""
_NOT_CHECKED = """\
`record` must be None with a loss scale that does not look at the gradients, got {!r}. \
FixedLossScale(S, skip_nonfinite=True) does."""


_Callback: Any = kerases.callback_class()


class LossScaleMonitor(_Callback):
    """Shows what the loss scale is doing, and says why steps are skipped.

    A callback for `fit`, of Keras 2 and Keras 3. Put it first, so that the callbacks
    behind it see what it adds:

    ```
    model.fit(x, y, callbacks=[lossscale.LossScaleMonitor(), ...])
    ```

    It adds `loss_scale` and `skipped_steps` (all since the loss scale was created) to
    the logs of every epoch, and so to the progress bar, `History`, `CSVLogger` and
    `TensorBoard`. It says once, in one warning, why steps are skipped when `patience`
    of them were in a row, and once if a step that overflowed has left inf or NaN in
    statistics such as BatchNormalization's. It prints one line when training ends.

    A loss scale that starts too high falls until it fits: while no step has been
    applied and the scale still falls, nothing is said. Then `patience` counts the
    steps that did not lower it.

    It reads a few scalars from the device once per epoch, so it sees what is so at the
    epoch's end. With `every` it reads, and looks, every so many steps too.

    Args:
      patience: How many steps in a row may be skipped.
      on_stall: What happens then: `"warn"` with a `LossScaleWarning`, `"raise"` a
        `FloatingPointError` with the same message, or `"stop"`: warn, and stop training
        as `EarlyStopping` does.
      every: Also look every so many steps, and add what was read last to the logs of
        batches. Keras's progress bar then shows averages over an epoch's batches.
      record: A path. Keeps whether each step was applied, and the loss scale it was
        taken with, as `lossscale.simulate` and `lossscale.load_run` read them. Written
        at the end of each epoch. Reads the device before and after every batch.
      verbose: 0 prints no line at the end. Warnings come all the same.

    Raises:
      TypeError: An argument has the wrong type; in `fit`, the model's optimizer is not
        a `LossScaleOptimizer` of this package.
      ValueError: An argument is out of range; in `fit`, `record` is given where single
        steps cannot be told apart.
      RuntimeError: In `fit`, in a `tf.compat.v1` graph.
      FloatingPointError: In `fit`, as `on_stall="raise"` asks.
    """

    def __init__(
        self,
        patience: int = 10,
        *,
        on_stall: str = "warn",
        every: Optional[int] = None,
        record: Any = None,
        verbose: int = 1,
    ) -> None:
        self.patience = arguments.count("patience", patience)
        self.on_stall = arguments.choice("on_stall", on_stall, ON_STALL)
        self.every = arguments.optional(arguments.count, "every", every)
        self.record = arguments.optional(arguments.writable_path, "record", record)
        self.verbose = arguments.count("verbose", verbose, least=0)
        super().__init__()
        # Keras asks whether these are overridden, and is faster if none is.
        if self.every or self.record:
            self.on_train_batch_end = self._after_batch
        if self.record:
            self.on_train_batch_begin = self._before_batch
        self._optimizer: Any = None
        self._stalls = Stalls(self.patience)
        self._flags: List[bool] = []
        self._scales: List[float] = []

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        optimizer = self.model.optimizer
        _check(optimizer, self.record)
        if self._flags and optimizer is not self._optimizer:
            raise ValueError(
                f"`record` must hold one run, got a second optimizer for {self.record}."
                " Create a LossScaleMonitor for each."
            )
        self._optimizer = optimizer
        self._start: Optional[Reading] = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del epoch, logs
        self._batch = -1
        # Only now: callbacks behind this one may restore state when training begins.
        if self._start is None:
            self._begin()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del epoch
        self._save()
        self._look()
        if self._last.skipped != self._skipped_when_checked:
            self._check_statistics()
        self._add_to(logs)

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        if self._start is None:  # no epoch at all
            return
        self._save()
        self._read()
        self._check_statistics()
        if self.verbose:
            print(self._summary(), flush=True)  # noqa: T201 - as Keras's own do

    def _before_batch(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        self._taken_with = float(self._optimizer.loss_scale)

    def _after_batch(self, batch: int, logs: Any = None) -> None:
        # Keras counts batches from 0, and names the last of those that ran.
        self._unseen += batch - self._batch
        self._batch = batch
        if self.record:
            self._keep()
        if self.every:
            if self._unseen >= self.every:
                self._look()
            self._add_to(logs)

    def _begin(self) -> None:
        self._start = self._last = read(self._optimizer)
        self._lowest = self._highest = self._start.loss_scale
        self._skipped_when_checked = self._start.skipped
        self._steps_kept = self._start.applied + self._start.skipped
        self._told_of_statistics: Optional[str] = None
        self._unseen = 0
        self._stalls.start(self._start)

    def _read(self) -> None:
        self._last = read(self._optimizer)
        self._lowest = min(self._lowest, self._last.loss_scale)
        self._highest = max(self._highest, self._last.loss_scale)

    def _add_to(self, logs: Any) -> None:
        if isinstance(logs, dict):  # a train_step of Keras 2 may return anything
            logs["loss_scale"] = self._last.loss_scale
            logs["skipped_steps"] = self._last.skipped

    def _look(self) -> None:
        self._unseen = 0
        self._read()
        if not self._stalls.see(self._last, self._optimizer.loss_scale):
            return
        message = diagnosis.of_stall(self._optimizer, self.model, self._last.in_a_row)
        if self.on_stall == "raise":
            raise FloatingPointError(message)
        self._told_of_statistics = diagnosis.of_statistics(self.model)
        _warn(message)
        if self.on_stall == "stop":
            self.model.stop_training = True

    def _check_statistics(self) -> None:
        """Warns of statistics that are not finite, unless the same were named last."""
        self._skipped_when_checked = self._last.skipped
        found = diagnosis.of_statistics(self.model)
        if found is not None and found != self._told_of_statistics:
            _warn(found)
        self._told_of_statistics = found

    def _keep(self) -> None:
        now = read(self._optimizer)
        before, self._steps_kept = self._steps_kept, now.applied + now.skipped
        if self._steps_kept - before > 1:
            raise ValueError(_SEVERAL_STEPS.format(self._steps_kept - before))
        self._scales.append(self._taken_with)
        self._flags.append(now.in_a_row == 0)

    def _save(self) -> None:
        if self.record:
            save_run(self.record, self._flags, np.asarray(self._scales, np.float32))

    def _summary(self) -> str:
        start, now = self._start or self._last, self._last
        scales = [now.loss_scale, self._lowest, self._highest]
        final, low, high = map(scale_text, scales)
        return (
            f"Loss scale: {now.applied - start.applied} steps applied, "
            f"{now.skipped - start.skipped} skipped; it is {final}, and was read "
            f"between {low} and {high}."
        )


def _check(optimizer: Any, record: Any) -> None:
    """Raises unless a monitor can watch `optimizer`."""
    if not isinstance(optimizer, LossScaleOptimizer):
        why = _WRAPPED_BY_KERAS if kerases.is_own_wrapper(optimizer) else ""
        raise TypeError(_WRONG_OPTIMIZER.format(optimizer=optimizer, why=why))
    if not tf.executing_eagerly():
        raise RuntimeError(
            "`LossScaleMonitor` must read variables between steps, got `fit` in a "
            "tf.compat.v1 graph, where it cannot. Leave it out."
        )
    if record and not optimizer.loss_scale.checks_gradients:
        raise ValueError(_NOT_CHECKED.format(optimizer.loss_scale))


def _warn(message: str) -> None:
    # Level 1: what called is Keras's code, which nobody wants to see.
    warnings.warn(message, LossScaleWarning, stacklevel=1)
