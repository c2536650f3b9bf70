"""LossScaleMonitor: a Keras callback that shows what the loss scale is doing."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Dict, Optional, cast

from lossscale import arguments
from lossscale.arguments import or_none
from lossscale.monitor.asking import told
from lossscale.monitor.findings import FINDINGS, summary
from lossscale.monitor.model import given_optimizers, optimizers_of
from lossscale.monitor.statistics import Statistics
from lossscale.monitor.watched import Run, Watched
from lossscale.optimizer import LossScaleWarning
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

_Callback: Any = keras_versions.callback_class()


class LossScaleMonitor(_Callback):
    """Shows what the loss scale does in `fit`, and says why steps are skipped.

    Put it first in the list of callbacks, since the later ones see the logs that it
    adds. https://github.com/lossscale/lossscale/blob/main/docs/watching.md explains
    these, https://github.com/lossscale/lossscale/blob/main/docs/warnings.md its
    warnings.

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
      restore_statistics: A boolean, whether to restore non-trainable variables after a
        bad batch, as
        https://github.com/lossscale/lossscale/blob/main/docs/bad-batches.md shows.
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
        _ARGUMENTS.keep(self, locals())
        super().__init__()
        # Before a method that is overridden, Keras 3 reads all metrics from the device.
        if self.every:
            self.on_train_batch_end = self._after_batch
        self._run: Optional[Run] = None  # since training began
        self._watched: Dict[int, Watched] = {}

    def __repr__(self) -> str:
        config = _ARGUMENTS.config(self)
        listed = ", ".join(f"{name}={value!r}" for name, value in config.items())
        return f"{type(self).__name__}({listed})"

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        if is_building():
            raise RuntimeError(
                "`LossScaleMonitor` must read variables between steps, got `fit` in a "
                "tf.compat.v1 graph, where it cannot. Remove this callback."
            )
        optimizers = self.optimizers or optimizers_of(self.model)
        scales = [optimizer.loss_scale for optimizer in optimizers.values()]
        for scale in scales if self.check_underflow else ():
            if not scale.checks_gradients:
                raise ValueError(
                    "`check_underflow` must be False with a loss scale that does not "
                    f"look at the gradients, got a {type(scale).__name__}. "
                    "FixedLossScale(S, skip_nonfinite=True) looks at them."
                )
        watched = []
        for name, optimizer in optimizers.items():
            new = Watched(optimizer, self.patience)
            w = self._watched.setdefault(id(optimizer), new)
            # Another model may have another name for it.
            w.name, w.shares = name, sum(w.scale is scale for scale in scales) > 1
            watched.append(w)
        training = self._run.training + 1 if self._run else 1
        self._run = run = Run(self, watched, training)
        self._tell(run, "begin")
        if self.check_underflow and any(scale.last_largest is None for scale in scales):
            with self.model.distribute_strategy.scope():
                for scale in scales:
                    scale.keep_largest()
            self.model.train_function = None  # the old trace does not keep it
            self.model.make_train_function()

    def _begun(self) -> Run:
        """Begins, if it has not, and puts back what the last batch has left."""
        if self._run is None:
            self.on_train_begin()
        run = cast(Run, self._run)
        if not run.is_begun:
            run.begin()
        if self.restore_statistics and self.model.built:
            run.statistics = run.statistics or Statistics(self.model)
            run.statistics.mend()
        return run

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        self._begun().epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        del logs
        run = self._begun()
        if self.every is None and self.on_stall == "raise":
            self._look_if_due(run, batch - 1, self.patience)
        for w in run.watched:
            w.batches.begin(batch, run.batches_in_call)

    def _after_batch(self, batch: int, logs: Any = None) -> None:
        run = self._begun()
        self._look_if_due(run, batch, self.every, logs)
        self._add_to(run, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        del logs
        if self._run is not None and self._run.statistics is not None:
            self._begun()  # before the test that ends an epoch of `fit`

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        run = self._begun()
        run.epoch = epoch
        self._look(run, logs)
        for w in run.watched:
            w.end_epoch()
        self._tell(run, "epoch end")
        run.begin_epoch()
        self._add_to(run, logs)

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        if self._run is None or not self._run.is_begun:  # no epoch has run
            return
        run = self._begun()
        run.look()
        if self.verbose:
            for line in summary(run):
                print(line, flush=True)  # noqa: T201 - as Keras's own do
        run.statistics = None  # what happens after training is not its concern

    def _look_if_due(self, run: Run, batch: int, wait: int, logs: Any = None) -> None:
        # Keras counts from 0, and passes the number of the last batch that ran.
        if batch - run.looked_after >= wait:
            run.looked_after = batch
            self._look(run, logs)

    def _look(self, run: Run, logs: Any) -> None:
        run.logs = logs
        run.look()
        self._tell(run, "look")

    def _tell(self, run: Run, when: str) -> None:
        for finding, text in told(run, FINDINGS, when):
            if finding.stops and self.on_stall == "raise":
                raise FloatingPointError(text)
            # Level 1, since the caller is Keras's code, which the user does not know.
            warnings.warn(text, LossScaleWarning, stacklevel=1)
            if finding.stops and self.on_stall == "stop":
                self.model.stop_training = True

    def _add_to(self, run: Run, logs: Any) -> None:
        if isinstance(logs, dict):  # a train_step of Keras 2 may return anything
            for w in run.watched:
                w.add_to(logs)
