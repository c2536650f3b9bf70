"""One optimizer that a monitor watches: when to warn, and what its messages say."""

from __future__ import annotations

import math
from typing import Any, Dict, Optional, Sequence

from lossscale.monitor import diagnosis, texts
from lossscale.monitor.reading import Batches, Reading, Readings
from lossscale.optimizer.record import GRADIENTS, LEFT_OUT
from lossscale.plotting import scale_text
from lossscale.ranges.magnitudes import WORDS
from lossscale.scales.spike_guard import SpikeGuard

_BAD_LOSSES = 3  # warn after so many losses in a row that were bad before scaling
_DOUBLINGS = 40  # in float16's range, from 2**-24 to 65504
#: The largest scaled gradient may be this many doublings below 65504. The doublings
#: that remain suffice for all gradients that change a weight.
_FAR_BELOW = 16


class Watched:
    """One optimizer that a monitor watches: its readings, and when to warn.

    Attributes:
      name: The prefix of its messages and logs; empty if it is the only one.
      shares: Whether another watched optimizer shares its loss scale.
    """

    readings: Readings
    batches: Batches

    name = ""

    def __init__(self, optimizer: Any, patience: int) -> None:
        self.optimizer = optimizer
        self.shares = self.skipped_in_epoch = False
        self._patience = patience
        self._stuck = 0.0
        self._epochs, self._least = 0, math.inf
        self._warned_of_underflow = self._warned_of_spike = False
        self._warned_of_losses = self._warned_of_many = False  # in this epoch
        self._judged_skips = 0

    def begin(self, reading: Reading) -> None:
        """Begins, or begins again. Then it reports a stall that continues once more."""
        self.readings = Readings(reading, vars(self).get("readings"))
        self._judged = self._epoch_began = reading
        self._warned_run: Optional[int] = None
        self._warned_of_weights = False
        self.batches = Batches(self.optimizer)
        self._warned_of_losses = self._warned_of_many = False

    def see(self, reading: Reading) -> None:
        self.readings.add(reading)

    def is_stall(self) -> bool:
        """Returns whether to report a stall now, after a new reading.

        A stall is `patience` skipped steps in a row. Until the first step is applied,
        only steps count that did not lower the loss scale, since a scale that starts
        too high must fall until it fits. No scale helps a loss that is not finite
        before it is scaled, so the third such loss is a stall, too.
        """
        before, now = self._judged, self.readings.last
        self._judged, skips = now, now.skips
        is_stall = skips.in_a_row >= self._patience
        if now.applied == 0:
            scale = self.optimizer.loss_scale
            lowered = diagnosis.backoffs(scale, before.loss_scale, now.loss_scale)
            lowered *= int(getattr(scale, "hysteresis", 1))
            stuck = max(skips.nonfinite - before.skips.nonfinite - lowered, 0.0)
            self._stuck = stuck if lowered else self._stuck + stuck
            is_stall = is_stall and self._stuck >= self._patience
        if not is_stall and skips.bad_losses < _BAD_LOSSES:
            return False
        # The number of steps skipped before it identifies each run of skipped steps.
        warned, self._warned_run = self._warned_run, skips.nonfinite - skips.in_a_row
        return warned != self._warned_run

    def stall(self, model: Any, logs: Any, but: Sequence[Any]) -> Optional[str]:
        """Returns the message about a stall, or None. `but`: what began as infinite."""
        if not self.is_stall():
            return None
        skips = self.readings.last.skips
        where = self.batches.where([skips.total - 1])
        first = texts.STALL.format(
            steps=skips.in_a_row,
            unit=self._unit,
            where=where.replace("at", "the last at", 1),
            scale=scale_text(self.readings.last.loss_scale),
        )
        findings = diagnosis.of_stall(
            self.optimizer, model, logs, self.readings, self.batches, but
        )
        return self._named("\n  * ".join([first, *findings]))

    @property
    def until_stall(self) -> int:
        """After how many more steps there may be a stall, if all are skipped."""
        in_a_row = self.readings.last.skips.in_a_row
        is_long = in_a_row >= self._patience  # during the search
        left = self._patience - (int(self._stuck) if is_long else in_a_row)
        return left if left > 0 else self._patience

    def underflow(self, model: Any = None) -> Optional[str]:
        """Returns the message about underflow after an epoch, or None."""
        before, now = self._epoch_began, self.readings.last
        self._epoch_began = now
        self._warned_of_losses = self._warned_of_many = False
        self.batches = Batches(self.optimizer)
        self.skipped_in_epoch = now.skipped != before.skipped
        is_near = now.headroom is not None and now.headroom <= _FAR_BELOW
        # A scale that overflows is not too low: gradients of activations count, too.
        if self.skipped_in_epoch or is_near:
            self._epochs, self._least = 0, math.inf
        elif now.headroom is not None:
            self._epochs += 1
            self._least = min(self._least, now.headroom)
        if self._warned_of_underflow or self._epochs < self._patience:
            return None
        if model and not diagnosis.computes_in_float16(self.optimizer, model):
            return None
        self._warned_of_underflow = True
        least = math.floor(self._least)
        possible = 2.0 ** (math.floor(math.log2(now.loss_scale) + self._least) - 1)
        return self._named(
            texts.UNDERFLOW.format(
                epochs=self._epochs,
                least=least,
                left=max(_DOUBLINGS - least, 0),
                all=_DOUBLINGS,
                scale=scale_text(now.loss_scale),
                possible=scale_text(possible),
            )
        )

    def bad_batches(self, model: Any, epoch: Optional[int], logs: Any) -> Optional[str]:
        """Returns the message about bad losses and left out steps, once an epoch."""
        before, now, scale = (
            self._epoch_began,
            self.readings.last,
            self.optimizer.loss_scale,
        )
        skips, count = now.skips, now.skips.losses - before.skips.losses
        # The skipped steps that are known, by their numbers among all of them, and why.
        first = skips.total - len(skips.last)
        skipped = [(n, why) for n, (_, why) in enumerate(skips.last, first)]
        skipped = [pair for pair in skipped if pair[0] >= before.skips.total]
        bad = [(number, WORDS[why]) for number, why in skipped if why in WORDS]
        # A guard's own spikes have a message of their own.
        reason = self._own_reason
        left_out = [n for n, why in skipped if why == LEFT_OUT and reason]
        is_new, self._judged_skips = skips.total != self._judged_skips, skips.total
        is_overflow = is_new and bool(skipped) and skipped[-1][1] == GRADIENTS
        hidden = None
        if is_overflow:
            hidden = diagnosis.of_input(
                self.optimizer, model, self.readings, self.batches
            )
        if self._warned_of_losses or not (count or left_out or hidden):
            return None
        self._warned_of_losses = True
        said = [f"Epoch {epoch}:"] if epoch is not None else []
        if count:
            where = self.batches.where([number for number, _ in bad])
            # If each loss is bad, it is not the rows: a stall is reported.
            rows = ": look at these rows" if skips.bad_losses < _BAD_LOSSES else ""
            said.append(
                texts.BAD_LOSSES.format(
                    steps=f"{count} {'step was' if count == 1 else 'steps were'}",
                    name=diagnosis.bad_outputs(model, logs),
                    kinds=" or ".join(sorted({kind for _, kind in bad}))
                    or "not finite",
                    where=where
                    if len(bad) == 1
                    else where.replace(" at", " last at", 1),
                    rows=rows,
                )
            )
            if scale._can_change and not self.optimizer.engine.skips_losses:
                said.append(
                    texts.BAD_LOSS_COUNTED.format(
                        before=scale_text(before.loss_scale),
                        now=scale_text(now.loss_scale),
                    )
                )
        if hidden:
            said.append(hidden)
        if left_out:
            where = self.batches.where(left_out)
            said.append(texts.LEFT_OUT.format(reason=reason, where=where))
        return self._named(" ".join(said))

    def many_bad_losses(self) -> Optional[str]:
        """Returns the message about bad losses that counted, once in each epoch."""
        before, now = self._epoch_began, self.readings.last
        count = now.counted_losses - before.counted_losses
        if self._warned_of_many or not count:
            return None
        self._warned_of_many = True
        return self._named(
            texts.MANY_BAD_LOSSES.format(
                counted="1 of them counted as an overflow"
                if count == 1
                else f"{count} of them counted as overflows",
                before=scale_text(before.loss_scale),
                now=scale_text(now.loss_scale),
            )
        )

    def unchecked(self, model: Any) -> Optional[str]:
        """Returns the message about weights that are not finite, once."""
        if self._warned_of_weights or self.optimizer.loss_scale.checks_gradients:
            return None
        finding = diagnosis.of_weights(model)
        self._warned_of_weights = bool(finding)
        return finding and self._named(finding)

    def spike(self) -> Optional[str]:
        if self._warned_of_spike or not self._spikes:
            return None
        self._warned_of_spike = True
        return self._named(texts.SPIKE.format(last=self._last_spike))

    def _named(self, message: str) -> str:
        return f"{self.name}: {message}" if self.name else message

    @property
    def _spikes(self) -> int:
        return (self.readings.last.spikes or 0) - (self.readings.first.spikes or 0)

    @property
    def _last_spike(self) -> str:
        spike = self.optimizer.last_spike()
        if spike is None:  # it was another optimizer's, or came before a restart
            return "of unknown size"
        return texts.LAST_SPIKE.format(
            largest=spike.largest,
            name=spike.name,
            times=spike.largest / spike.limit,
            limit=spike.limit,
        )

    @property
    def _unit(self) -> str:
        steps = getattr(self.optimizer, "gradient_accumulation_steps", None)
        text = f" (each a batch, with gradient_accumulation_steps={steps})"
        return text if steps else ""

    def add_to(self, logs: Dict[str, Any]) -> None:
        prefix, last = f"{self.name}_" if self.name else "", self.readings.last
        logs[f"{prefix}loss_scale"] = last.loss_scale
        logs[f"{prefix}skipped_steps"] = self._skipped(last)
        logs[f"{prefix}nonfinite_losses"] = last.skips.losses
        if last.spikes is not None:
            logs[f"{prefix}spikes"] = last.spikes
        if last.largest is not None:
            logs[f"{prefix}headroom"] = self.readings.headroom
            logs[f"{prefix}largest_gradient"] = self.readings.largest

    def summary(self) -> str:
        start, now = self.readings.first, self.readings.last
        skipped = self._skipped(now) - self._skipped(start)
        scales = [now.loss_scale, self.readings.lowest, self.readings.highest]
        final, low, high = map(scale_text, scales)
        line = (
            f"Loss scale{f' of {self.name}' if self.name else ''}: "
            f"{now.applied - start.applied} steps applied, {skipped} skipped"
            f"{self._unit}; "
        )
        if self.shares:
            bad = now.skipped - start.skipped
            line += f"shared, with {bad} steps skipped for all; "
        line += f"it is {final}, and was read between {low} and {high}."
        losses = now.skips.losses - start.skips.losses
        if losses:
            line += f" Steps skipped for a loss that was not finite: {losses}."
        left_out = now.skips.left_out - start.skips.left_out
        reason = self._own_reason
        if left_out and reason:
            line += f" Steps left out as {reason}: {left_out}."
        if self._spikes:
            line += f" Spikes skipped: {self._spikes}, the last {self._last_spike}."
        if not math.isnan(self.readings.headroom):
            line += f" Headroom: {self.readings.headroom:.1f} doublings."
        return line

    @property
    def _own_reason(self) -> str:
        """What a guard leaves out, unless its reports are those of a SpikeGuard."""
        guard = self.optimizer.guard
        is_own = guard is not None and not isinstance(guard, SpikeGuard)
        return guard.left_out_as if is_own else ""

    def _skipped(self, reading: Reading) -> int:
        """Returns the skipped steps: only its own ones if the loss scale is shared."""
        return reading.skips.nonfinite if self.shares else reading.skipped
