"""Which steps an optimizer skipped, as a monitor counts them."""

from __future__ import annotations

from typing import NamedTuple, Tuple

from lossscale.optimizer.record import GRADIENTS, KEPT, LEFT_OUT, Record


class Skips(NamedTuple):
    """Which steps an optimizer itself skipped since this process began, and why."""

    total: int = 0
    #: Those of them at which the unscaled loss was not finite.
    losses: int = 0
    #: Those of them that were finite, and left out by the loss scale.
    left_out: int = 0
    #: How many in a row, up to the last step, were not left out; 0 if it was applied.
    in_a_row: int = 0
    #: The last ones of these for which the unscaled loss was at fault.
    bad_losses: int = 0
    #: Of the last few, oldest first, the number and the reason: see `Record.skipped`.
    last: Tuple[Tuple[int, str], ...] = ()

    @property
    def nonfinite(self) -> int:
        """How many were skipped that were not finite."""
        return self.total - self.left_out


def skips_in(record: Record, applied: int, in_a_row: int) -> Skips:
    """Returns what a record says. `in_a_row` is the loss scale's own count."""
    (gradients, inf, nan, left_out), last = record.skipped()
    total = gradients + inf + nan + left_out
    number, run, losses = applied + total, 0, 0
    for step, reason in reversed(last):
        number -= 1
        if step != number or reason == LEFT_OUT:
            break
        losses += losses == run and reason != GRADIENTS
        run += 1
    # The record has only the last steps. Of more, the loss scale's count is used.
    run, losses = (
        in_a_row if steps == KEPT else min(steps, in_a_row) for steps in (run, losses)
    )
    return Skips(total, inf + nan, left_out, run, losses, tuple(last))
