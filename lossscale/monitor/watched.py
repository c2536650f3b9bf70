"""What is remembered between looks: of one optimizer, and of one training."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Dict, List, Optional, Set, Tuple

import tensorflow as tf

from lossscale.monitor import model as models
from lossscale.monitor.batches import Batches
from lossscale.monitor.reading import Reading, read
from lossscale.monitor.statistics import Statistics
from lossscale.runtime import keras_versions
from lossscale.runtime.aliases import Variable

BAD_LOSSES = 3  # so many losses in a row that were bad before scaling are a stall
#: A largest scaled gradient so many doublings below 65504 is far below it. The
#: doublings that remain suffice for all gradients that change a weight.
_FAR_BELOW = 16
#: What is read of the model once after each look, if it is asked for.
_OF_A_LOOK = ("faults", "bad_loss", "bad_weights", "bad_sums", "bad_layer")


class Run:
    """One training, the `training`-th that the monitor watches.

    Attributes:
      epoch: The number of the epoch, from 0 on, None if nobody told it.
      looked_after: The batch after which it looked last in this epoch.
      infinite: The ids of variables, not trained, that are infinite from the first, as
        the least value of a layer of one's own.
    """

    name = ""
    epoch: Optional[int] = None
    epochs = 0
    logs: Any = None
    looked_after = -1
    statistics: Optional[Statistics] = None
    is_begun = False
    batches_in_call = 1

    def __init__(self, monitor: Any, watched: List[Watched], training: int = 1) -> None:
        self.monitor, self.model, self.watched = monitor, monitor.model, watched
        self.training = training
        self.infinite: Set[int] = set()
        self.said: Dict[Any, Any] = {}
        for w in watched:
            w.run = self

    def begin(self) -> None:
        """Reads the starting values, after other callbacks may have restored state."""
        self.is_begun = True
        for w in self.watched:
            w.begin(read(w.optimizer))
        self.begin_epoch()
        if self.model.built:
            untrained = keras_versions.statistics_of(self.model)
            faults = models.nonfinite(self.model, untrained)
            self.infinite = {id(variable) for variable, kind in faults if kind == "inf"}
        # Keras 2 keeps the number in a variable with a private name.
        for name in ("steps_per_execution", "_steps_per_execution"):
            number = int(tf.convert_to_tensor(getattr(self.model, name, None) or 1))
            self.batches_in_call = max(self.batches_in_call, number)

    def look(self) -> None:
        for w in self.watched:
            w.see(read(w.optimizer))

    def begin_epoch(self) -> None:
        self.epochs += 1
        self.looked_after = -1
        params = getattr(self.monitor, "params", None) or {}
        for w in self.watched:
            w.begin_epoch(params.get("steps"))

    @property
    def in_epoch(self) -> str:
        # Keras counts epochs from 0, and shows them from 1 on.
        return "" if self.epoch is None else f"Epoch {self.epoch + 1}: "

    @property
    def has_skipped(self) -> bool:
        """Whether steps were skipped between the last two looks."""
        return any(w.last.skipped != w.before.skipped for w in self.watched)

    def nonfinite(self, variables: List[Variable]) -> List[models.Fault]:
        """Returns those that hold inf or NaN, but for `infinite`."""
        found = [v for v in variables if id(v) not in self.infinite]
        return models.nonfinite(self.model, found)

    @cached_property
    def data(self) -> models.Data:
        return models.data_of_fit(self.model)


class Watched:
    """One optimizer, through all trainings that a monitor watches.

    Attributes:
      name: The prefix of its messages and logs; empty if it is the only one.
      shares: Whether another watched optimizer shares its loss scale.
      first, before, last: The readings as the training began, the last but one, and
        the last.
      epoch_began: The reading as the epoch began.
      lowest, highest: The loss scales that were read since the training began.
      largest, headroom: The last ones that were known. NaN: none was.
      room: The least headroom that was read since an epoch skipped a step or had
        little room, infinite if all gradients were zero; `roomy_epochs` were since.
    """

    name, shares = "", False
    largest = headroom = math.nan
    room, roomy_epochs = math.inf, 0
    run: Run
    first: Reading
    epoch_began: Reading
    batches: Batches

    def __init__(self, optimizer: Any, patience: int) -> None:
        self.optimizer, self.patience = optimizer, patience
        self.said: Dict[Any, Any] = {}

    def begin(self, reading: Reading) -> None:
        """Begins a training."""
        self.first = self.before = self.last = reading
        self.lowest = self.highest = reading.loss_scale
        self.begin_epoch()

    def begin_epoch(self, batches: Optional[int] = None) -> None:
        self.epoch_began, self.batches = self.last, Batches(self.optimizer, batches)

    def see(self, reading: Reading) -> None:
        for name in _OF_A_LOOK:
            vars(self).pop(name, None)
        self.before, self.last = self.last, reading
        self.lowest = min(self.lowest, reading.loss_scale)
        self.highest = max(self.highest, reading.loss_scale)
        if reading.headroom is not None and reading.largest is not None:
            self.largest = reading.largest
            self.room = min(self.room, reading.headroom)
            if self.largest > 0.0:
                self.headroom = reading.headroom

    def end_epoch(self) -> None:
        before, now = self.epoch_began, self.last
        # A scale that overflows is not too low: gradients of activations count, too.
        if now.skipped != before.skipped or self.room <= _FAR_BELOW:
            self.room, self.roomy_epochs = math.inf, 0
        elif now.headroom is not None and now.applied != before.applied:
            self.roomy_epochs += 1

    @property
    def applied(self) -> int:
        """How many steps were applied in this training."""
        return self.last.applied - self.first.applied

    @property
    def skipped_in_epoch(self) -> List[Tuple[int, str]]:
        """The numbers of its skipped steps in this epoch, and why: the last ones."""
        return [pair for pair in self.last.last if pair[0] >= self.epoch_began.own]

    @property
    def run_of_skips(self) -> Tuple[int, int]:
        """What tells a run of skipped steps from others: how many were before it."""
        return self.run.training, self.last.nonfinite - self.last.in_a_row

    @property
    def is_stalled(self) -> bool:
        """Whether training stalls: `patience` skipped steps in a row.

        Until the first step is applied, only steps count that did not lower the loss
        scale, since a scale that starts too high must fall until it fits. That does not
        mend a loss that is not finite: the third such loss in a row is a stall, too.
        """
        is_search = not self.last.applied and self._stuck < self.patience
        is_long = self.last.in_a_row >= self.patience and not is_search
        return is_long or self.last.bad_losses >= BAD_LOSSES

    @property
    def _stuck(self) -> float:
        """How many steps were skipped in this training, but for those that lowered it.

        A rule of the user's own is stuck if the last look found it as the one before.
        """
        high, low = self.first.loss_scale, self.last.loss_scale
        backoff = getattr(self.scale, "backoff_factor", None)
        backoff = backoff or 1 / getattr(self.scale, "multiplier", 1)
        lowered = 0.0
        if low < high and backoff < 1:
            lowered = math.ceil(math.log(high / low) / -math.log(backoff) - 1e-6)
        elif low < self.before.loss_scale:
            lowered = math.inf
        lowered *= getattr(self.scale, "hysteresis", 1)
        return self.last.nonfinite - self.first.nonfinite - lowered

    @property
    def left_out(self) -> int:
        """How many finite steps the guard has left out in this training."""
        return self.last.left_out - self.first.left_out

    @property
    def scale(self) -> Any:
        return self.optimizer.loss_scale

    @cached_property
    def faults(self) -> List[models.Fault]:
        """The variables whose gradients were not finite at the last such step."""
        return [(f.variable, f.kind) for f in self.optimizer.nonfinite_gradients()]

    @cached_property
    def bad_loss(self) -> Any:
        """What the unscaled loss was at that step, "inf" or "nan", or None."""
        return self.optimizer.nonfinite_loss()

    @cached_property
    def bad_weights(self) -> List[models.Fault]:
        model = self.run.model
        frozen = models.untrained(model, of_frozen=True)
        return self.run.nonfinite([*model.trainable_weights, *frozen])

    @cached_property
    def bad_sums(self) -> Dict[str, Variable]:
        """The model's variables, by name, that may add such gradients up."""
        return models.accumulators(self.run.model, self.faults)

    @cached_property
    def bad_layer(self) -> Optional[Tuple[str, str]]:
        """The kernel and the bias of a layer whose input was not finite, or None."""
        return models.layer_with_bad_input(self.run.model, self.faults)

    @property
    def computes_in_float16(self) -> bool:
        """Whether a layer does, or gradients are added up in it. No layers: perhaps."""
        dtypes = models.dtypes_of(self.run.model)
        added_up = getattr(self.optimizer, "communication_dtype", None)
        return "float16" in [*dtypes, added_up] or not dtypes

    @property
    def is_all_float16(self) -> bool:
        """Whether each layer computes in it, so also that which feeds the loss."""
        return {*models.dtypes_of(self.run.model)} == {"float16"}

    @property
    def unit(self) -> str:
        steps = getattr(self.optimizer, "gradient_accumulation_steps", None)
        text = f" (each a batch, with gradient_accumulation_steps={steps})"
        return text if steps else ""

    def skipped(self, reading: Reading) -> int:
        """Returns the skipped steps: only its own ones if the loss scale is shared."""
        return reading.nonfinite if self.shares else reading.skipped

    def add_to(self, logs: Dict[str, Any]) -> None:
        prefix, last = f"{self.name}_" if self.name else "", self.last
        logs[f"{prefix}loss_scale"] = last.loss_scale
        logs[f"{prefix}skipped_steps"] = self.skipped(last)
        logs[f"{prefix}nonfinite_losses"] = last.losses
        if last.spikes is not None:
            logs[f"{prefix}spikes"] = last.spikes
        if last.largest is not None:
            logs[f"{prefix}headroom"] = self.headroom
            logs[f"{prefix}largest_gradient"] = self.largest
