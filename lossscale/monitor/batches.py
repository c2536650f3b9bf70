"""In which batches of an epoch an optimizer skipped steps."""

from __future__ import annotations

import bisect
from typing import Any, List, Optional, Sequence, Tuple

_MARKS = 4096  # so many batches of an epoch are told apart


class Batches:
    """In which batches of an epoch an optimizer skipped steps.

    A step writes down which of the skipped ones it is, and the callback knows the
    batch. The count of skipped steps before each batch joins the two: it stays on the
    device, unread, unless there is something to say.
    """

    def __init__(self, optimizer: Any, count: Optional[int] = None) -> None:
        """`count`: how many batches the epoch has, None if nobody knows."""
        self._optimizer, self._count = optimizer, count
        self._begun, self._every, self._next, self._size = 0, 1, 0, 1
        self._marks: List[Tuple[int, Any]] = []  # a batch, and the count before it

    def begin(self, batch: int, size: int) -> None:
        """Notes a batch that begins, the first of `size` in one call."""
        self._next, self._size = batch + size, size
        if self._begun % self._every == 0:
            self._marks.append((batch, self._optimizer.engine.record.counts()))
        self._begun += 1
        if len(self._marks) > _MARKS:  # tell half as many apart
            del self._marks[1::2]
            self._every *= 2

    def where(self, numbers: Sequence[int]) -> str:
        """Returns where some of the skipped steps were, empty if it is unknown."""
        before = [sum(counts.numpy()) for _, counts in self._marks]
        found = [bisect.bisect_right(before, number) - 1 for number in numbers]
        places = dict.fromkeys(self._place(at) for at in found if at >= 0)
        listed = ", ".join(places)
        unit = "batches" if "," in listed or "to" in listed else "batch"
        return f", at {unit} {listed}, counted from 0" if listed else ""

    def _place(self, at: int) -> str:
        (first, _), end = self._marks[at], self._next
        if at + 1 < len(self._marks):
            end, _ = self._marks[at + 1]
        elif self._count is not None:
            end = min(end, self._count)
        elif self._size > 1:  # the last call may run fewer, and no Keras says how many
            return f"{first} or later"
        return f"{first}" if end <= first + 1 else f"{first} to {end - 1}"
