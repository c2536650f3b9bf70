"""LossScaleMonitor: a Keras callback that shows what the loss scale is doing."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Iterator, List, Optional

import tensorflow as tf

from lossscale import arguments
from lossscale.arguments import or_none
from lossscale.monitor import diagnosis, reading
from lossscale.monitor.reading import given_optimizers, optimizers_of
from lossscale.monitor.statistics import Statistics
from lossscale.monitor.watched import Watched
from lossscale.optimizer import LossScaleOptimizer, LossScaleWarning
from lossscale.ranges import inputs
from lossscale.runtime import keras_versions
from lossscale.runtime.graphs import is_building

_ARGUMENTS = arguments.Declared(
    patience=arguments.count,
    on_stall=partial(arguments.choice, allowed=("warn", "raise", "stop")),
    every=or_none(arguments.count),
    verbose=partial(arguments.count, least=0),
    check_underflow=arguments.boolean,
    restore_statistics=arguments.boolean,
    optimizers=or_none(given_optimizers),
)

_NOT_CHECKED = """\
`check_underflow` must be False with a loss scale that does not look at the gradients, \
got a {}. FixedLossScale(S, skip_nonfinite=True) looks at them."""
_SHARPNESS = """\
SharpnessAwareMinimization of Keras computes its gradients without the loss scale, \
and adds them to the weights before anything checks them. An infinite one makes \
weights infinite, and no optimizer can undo that. docs/recipes.md has a step that \
scales the loss, and restores the weights to the last bit."""
_BACKUP = """\
BackupAndRestore deletes its backup when training ends, even if on_stall="stop" ends \
it. So a run that the monitor stopped cannot be resumed. Write \
LossScaleMonitor(on_stall="raise"), since an error keeps the backup{other}."""
_UNBUILT = """\
`restore_statistics` has no copy from before the first batch: the model is not built, \
and calling it on `x` failed: {error}. Call it on a batch before `fit`: model(x)."""
_REPLACED = """\
In this epoch {names} made no step, and `model.optimizer` is Keras's own \
LossScaleOptimizer, which `compile` puts around an optimizer without a wrapper, also \
when you compile again. Write model.compile(lossscale.LossScaleOptimizer(Adam(...), \
old_optimizer.loss_scale), ...), which keeps the loss scale."""
_OTHER = ", or BackupAndRestore(..., delete_checkpoint=False)"

_Callback: Any = keras_versions.callback_class()


class LossScaleMonitor(_Callback):
    """Shows what the loss scale does in `fit`, and says why steps are skipped.

    Put it first in the list of callbacks, since the later ones see the logs that it
    adds. docs/watching.md explains these, docs/warnings.md its warnings.

    ```
    model.fit(x, y, callbacks=[lossscale.LossScaleMonitor(), ...])
    ```

    After each epoch it logs `loss_scale`, `skipped_steps` (of the whole run) and
    `nonfinite_losses` (since the process began); also `largest_gradient` and `headroom`
    if the loss scale needs the largest gradient, and a `SpikeGuard`'s `spikes`. When
    training ends it prints a line.

    Args:
      patience: An integer, how many skipped steps in a row trigger `on_stall`.
      on_stall: A string: `"warn"`, `"raise"` for a `FloatingPointError`, or `"stop"`
        to warn and stop training. After `"raise"` Keras's `BackupAndRestore` keeps its
        backup, after `"stop"` it deletes it.
      every: An integer, to also read after so many batches, or None.
      verbose: An integer. 0 prints no line when training ends.
      check_underflow: A boolean, whether to find the headroom of any loss scale that
        checks gradients. That reads them twice more at each step.
      restore_statistics: A boolean, whether to put back variables that are not trained
        after a bad batch, as docs/bad-batches.md shows.
      optimizers: A `LossScaleOptimizer`, a list or a dict by name of several, or None:
        the model's. With several, logs have the optimizer's name before theirs.

    Raises:
      TypeError: An argument has the wrong type, or, in `fit`, the model has no
        `LossScaleOptimizer` of ours.
      ValueError: An argument is out of range, or, in `fit`, the loss scale checks
        nothing despite `check_underflow`.
      RuntimeError: `fit` runs in a `tf.compat.v1` graph.
      FloatingPointError: Steps are skipped in `fit`, and `on_stall` is `"raise"`.
    """

    def __init__(
        self,
        patience: int = 10,
        *,
        on_stall: str = "warn",
        every: Optional[int] = None,
        verbose: int = 1,
        check_underflow: bool = False,
        restore_statistics: bool = False,
        optimizers: Any = None,
        **others: Any,
    ) -> None:
        for name in others:
            near = arguments.did_you_mean(name, _ARGUMENTS.checks)
            raise TypeError(f"`LossScaleMonitor` takes no argument {name!r}.{near}")
        _ARGUMENTS.keep(
            self,
            patience=patience,
            on_stall=on_stall,
            every=every,
            verbose=verbose,
            check_underflow=check_underflow,
            restore_statistics=restore_statistics,
            optimizers=optimizers,
        )
        super().__init__()
        # Before a method that is overridden, Keras 3 reads all metrics from the device.
        if self.every:
            self.on_train_batch_end = self._after_batch
        self._watched: List[Watched] = []
        self._is_begun = False
        self._epoch: Optional[int] = None
        self._warned_of_compiled = False
        self._statistics: Optional[Statistics] = None

    def __repr__(self) -> str:
        config = _ARGUMENTS.config(self)
        listed = ", ".join(f"{name}={value!r}" for name, value in config.items())
        return f"{type(self).__name__}({listed})"

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        optimizers = self.optimizers or optimizers_of(self.model)
        self._check(list(optimizers.values()))
        _warn(*self._warnings())
        watched_before = {id(w.optimizer): w for w in self._watched}
        self._watched = [
            watched_before.get(id(optimizer)) or Watched(optimizer, self.patience)
            for optimizer in optimizers.values()
        ]
        for watched, name in zip(self._watched, optimizers):
            watched.name = name  # another model may have another for it
        self._is_begun, self._statistics = False, None
        if self.restore_statistics and not self.model.built:
            self._build()
        scales = [w.optimizer.loss_scale for w in self._watched]
        for watched in self._watched:
            watched.shares = (
                sum(watched.optimizer.loss_scale is scale for scale in scales) > 1
            )
        if self.check_underflow and any(scale.last_largest is None for scale in scales):
            with self.model.distribute_strategy.scope():
                for scale in scales:
                    scale.keep_largest()
            self.model.train_function = None  # the old trace does not keep it
            self.model.make_train_function()

    def _build(self) -> None:
        """Builds a model that its first batch would build, so that there is a copy."""
        frame = keras_versions.frame_where(
            lambda at: at.get("self") is self.model and "x" in at
        )
        try:
            with self.model.distribute_strategy.scope():
                data = (frame["x"], None, None)
                first, _, _ = inputs.first_batches(data, None, 1)
                inputs.build(self.model, inputs.triple(first)[0])
        except Exception as error:
            _warn(_UNBUILT.format(error=error))

    def _check(self, optimizers: List[Any]) -> None:
        if is_building():
            raise RuntimeError(
                "`LossScaleMonitor` must read variables between steps, got `fit` in a "
                "tf.compat.v1 graph, where it cannot. Remove this callback."
            )
        for scale in [optimizer.loss_scale for optimizer in optimizers]:
            if self.check_underflow and not scale.checks_gradients:
                raise ValueError(_NOT_CHECKED.format(type(scale).__name__))

    def _warnings(self) -> Iterator[str]:
        if type(self.model).__name__ == "SharpnessAwareMinimization":
            yield _SHARPNESS
        for callback in (
            keras_versions.callbacks_beside(self) if self.on_stall == "stop" else []
        ):
            if any(c.__name__ == "BackupAndRestore" for c in type(callback).__mro__):
                # Without this argument it always deletes the backup, as in Keras 2.4.
                deletes = getattr(callback, "delete_checkpoint", None)
                if deletes is not False:
                    yield _BACKUP.format(other="" if deletes is None else _OTHER)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        self._begin()
        self._epoch = epoch
        self._mend()
        self._looked_after = -1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._begin()
        self._epoch = epoch
        self._mend()
        self._look(logs)
        _warn(*[watched.unchecked(self.model) for watched in self._watched])
        _warn(*[watched.underflow(self.model) for watched in self._watched])
        self._check_compiled()
        if any(watched.skipped_in_epoch for watched in self._watched):
            self._check_statistics()
        self._add_to(logs)

    def _check_compiled(self) -> None:
        """Warns once if the compiled wrapper is Keras's, and ours makes no step."""
        compiled = getattr(self.model, "optimizer", None)
        pairs = [(w.readings.first, w.readings.last) for w in self._watched]
        is_idle = all(
            (first.applied, first.skips.total) == (last.applied, last.skips.total)
            for first, last in pairs
        )
        is_theirs = keras_versions.is_own_wrapper(compiled)
        is_theirs = is_theirs and not isinstance(compiled, LossScaleOptimizer)
        if is_idle and is_theirs and not self._warned_of_compiled:
            self._warned_of_compiled = True
            names = " and ".join(w.name for w in self._watched if w.name)
            _warn(_REPLACED.format(names=names or "the watched optimizer"))

    def on_test_begin(self, logs: Any = None) -> None:
        del logs
        if self._statistics is not None:  # the test that ends an epoch of `fit`
            self._mend()

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        if not self._is_begun:  # no epoch has run
            return
        self._mend()
        self._check_statistics()
        for watched in self._watched:
            watched.see(reading.read(watched.optimizer))
        lines = [watched.summary() for watched in self._watched]
        if self._statistics is not None and self._statistics.times:
            times = self._statistics.times
            lines.append(f"Batches after which statistics were put back: {times}.")
        self._statistics = None  # what happens after training is not its concern
        for line in lines if self.verbose else []:
            print(line, flush=True)  # noqa: T201 - as Keras's own do

    def _begin(self) -> None:
        """Reads the starting values, after other callbacks may have restored state."""
        if not self._watched:
            self.on_train_begin()
        if self._is_begun:
            return
        self._is_begun, self._epoch = True, None
        self._warned_of_compiled = False
        for watched in self._watched:
            watched.begin(reading.read(watched.optimizer))
        self._warned_of_statistics: Optional[str] = None
        self._looked_after = -1
        self._infinite = diagnosis.infinite_statistics(self.model)
        # Keras 2 keeps the number in a variable with a private name.
        names = ("steps_per_execution", "_steps_per_execution")
        numbers = [getattr(self.model, name, None) for name in names]
        calls = [
            tf.convert_to_tensor(number) for number in numbers if number is not None
        ]
        self._batches_in_call = max(map(int, [1, *calls]))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        del logs
        self._begin()
        self._mend()
        if self.every is None and self.on_stall == "raise":
            wait = min(w.until_stall for w in self._watched)
            self._look_if_due(batch - 1, wait)
        for watched in self._watched:
            watched.batches.begin(batch, self._batches_in_call)

    def _after_batch(self, batch: int, logs: Any = None) -> None:
        self._begin()
        self._mend()
        if self.every:
            self._look_if_due(batch, self.every, logs)
            self._add_to(logs)

    def _mend(self) -> None:
        if not self.restore_statistics:
            return
        if self._statistics is None and self.model.built:
            optimizers = [watched.optimizer for watched in self._watched]
            self._statistics = Statistics(self.model, optimizers)
        if self._statistics is not None:
            self._statistics.mend()

    def _add_to(self, logs: Any) -> None:
        if isinstance(logs, dict):  # a train_step of Keras 2 may return anything
            for watched in self._watched:
                watched.add_to(logs)

    def _look_if_due(self, after_batch: int, wait: int, logs: Any = None) -> None:
        # Keras counts from 0, and passes the number of the last batch that ran.
        if after_batch - self._looked_after >= wait:
            self._looked_after = after_batch
            self._look(logs)

    def _look(self, logs: Any) -> None:
        for watched in self._watched:
            watched.see(reading.read(watched.optimizer))
        _warn(*[watched.spike() for watched in self._watched])
        # Keras counts epochs from 0 here, and shows them from 1 on.
        epoch = None if self._epoch is None else self._epoch + 1
        model, but = self.model, self._infinite
        _warn(*[watched.bad_batches(model, epoch, logs) for watched in self._watched])
        _warn(*[watched.many_bad_losses() for watched in self._watched])
        messages = [watched.stall(model, logs, but) for watched in self._watched]
        for message in filter(None, messages):
            if self.on_stall == "raise":
                raise FloatingPointError(message)
            self._warned_of_statistics = diagnosis.of_statistics(model, but)
            _warn(message)
            if self.on_stall == "stop":
                self.model.stop_training = True

    def _check_statistics(self) -> None:
        if self._statistics is not None:
            _warn(self._statistics.restored())
        message = diagnosis.of_statistics(self.model, self._infinite)
        if message != self._warned_of_statistics:
            _warn(message)
        self._warned_of_statistics = message


def _warn(*messages: Optional[str]) -> None:
    for message in filter(None, messages):
        # Level 1, since the caller is Keras's code, which the user does not know.
        warnings.warn(message, LossScaleWarning, stacklevel=1)
