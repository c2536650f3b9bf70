"""What helps against a fault of a training step, as far as running it again confirms.

One thing is tried, in eager mode: float32 in the layer at fault, or in the loss, and in
what must be float32 with it.

```
the alarm is gone, and gradients reach the layers before:  this is written
the alarm is gone, and they do not:      this is written, and that it is undecided
the same fault is left:                  what its operation needs (causes.py)
another fault is left:                   both are written
the model does not run with it:          this is written, and that it is undecided
```
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, List, Optional, Tuple

from lossscale.ranges import causes
from lossscale.ranges.advice import Advice, Attempt, Fault
from lossscale.ranges.magnitudes import look
from lossscale.ranges.model_state import SIXTEEN_BITS
from lossscale.ranges.step import Step

#: Runs a training step as if some advice had been followed, up to a loss scale.
Run = Callable[[Attempt, float], Step]
#: A loss scale at which gradients are finite that are only too large for float16.
_LOW = 2.0**-24

_TRIED = "float32 was tried in {place}, and does not help."
_WIDE = "It computes in float32 already."
_CASTS_ITSELF = """\
float32 was tried in {place}, which computes in {dtype} nevertheless: look there for \
casts to {dtype}."""
_ANOTHER = "This alone is not enough. With it, another fault is left: {seen}"
_NO_RUN = """\
Whether this is enough could not be tried, since the model does not run with it as it \
is now: {error}"""
_NO_GRADIENT = """\
With it all values are finite, but the layers before get no gradient, or only zeros. \
Whether it is enough is undecided."""
_NO_SCALE = "No loss scale helps."


class Remedy:
    """What to write against a fault, and what was found out about that."""

    def __init__(
        self, keras: Any, fault: Fault, run: Run, describe: Callable[[Fault], str]
    ) -> None:
        self._keras, self._fault, self._run = keras, fault, run
        self._describe, self._is_confirmed = describe, False
        said, rest = self._said()
        if fault.is_backward:
            lowest = self._run(Attempt(Advice(self._keras)), _LOW)
            may_help = self._is_confirmed or fault.operation == "Cast"
            if lowest.bad:
                rest = rest if self._is_confirmed else [_NO_SCALE, *rest]
            elif may_help and reaches(lowest, fault):
                rest.append(causes.LOWER_SCALE)
        self._text = "\n".join(filter(None, [said, " ".join(filter(None, rest))]))

    def __str__(self) -> str:
        return self._text

    def _said(self) -> Tuple[str, List[str]]:
        """Returns the advice, and sentences, without what a loss scale can do."""
        fault = self._fault
        if fault.dtype not in SIXTEEN_BITS:
            return "", [_WIDE, *said_of_cause(fault)]
        advice, after = Advice(self._keras, [fault]), None

        def faults_in(attempt: Attempt) -> List[Fault]:
            nonlocal after
            after = None
            after = self._run(attempt, 1.0)
            left = first_fault(after)
            return [left] if left and left.dtype in SIXTEEN_BITS else []

        error = advice.complete(Attempt, faults_in)
        if after is None:
            return str(advice), [_NO_RUN.format(error=error)]
        left = first_fault(after)
        if left is None:
            self._is_confirmed = reaches(after, fault)
            return str(advice), [] if self._is_confirmed else [_NO_GRADIENT]
        if _is_same(left, fault):
            text = _CASTS_ITSELF if left.dtype in SIXTEEN_BITS else _TRIED
            place = "this layer" if fault.call else "the loss"
            tried = text.format(place=place, dtype=left.dtype)
            return "", [tried, *said_of_cause(fault)]
        # What was added for the fault that is left is not advised.
        kept = [other for other in advice.faults if not _is_same(other, left)]
        other = _ANOTHER.format(seen=self._describe(left))
        wide = "" if left.dtype in SIXTEEN_BITS else _WIDE
        return str(Advice(self._keras, kept)), [other, wide, *said_of_cause(left)]


def said_of_cause(fault: Fault) -> List[str]:
    """Returns what the table says: what was seen, what is usual, what to write."""
    if fault.operation == "Cast" and fault.call is not None:
        return []
    cause = causes.cause_of(fault.of, fault.kinds, fault.is_backward, fault.held)
    if fault.call is None and fault.dtype in SIXTEEN_BITS and not cause.operations:
        return [causes.LOSS_IN_FLOAT16]
    # 1e-6 is lost beside larger numbers in float16, and its inverse overflows.
    small = "1e-3" if fault.meets_16_bits else "1e-6"
    return [cause.seen, cause.usual, cause.to_write.format(small=small)]


def first_fault(step: Step) -> Optional[Fault]:
    """Returns what made a loss or gradient bad, else an overflow, else None."""
    attempt: Any = step.watcher
    bad = step.bad
    if not bad:
        return next(iter(attempt.overflows), None)
    roots = {key for tensor in bad for key in attempt.origins(tensor)}
    unknown = Fault(
        None, kinds=look(bad[0]).kinds, dtype=bad[0].dtype.name, is_backward=True
    )
    faults = (fault for key, fault in attempt.faults.items() if key in roots)
    return next(faults, unknown)


def reaches(step: Step, fault: Fault) -> bool:
    """Whether finite gradients, not all zero, reach the layers before a fault."""
    path = fault.call and fault.call.path
    before = itertools.takewhile(
        lambda call: path not in [c.path for c in (call, *call.around)],
        step.watcher.calls,
    )
    weights = [getattr(call.layer, "trainable_variables", ()) for call in before]
    ids = map(id, itertools.chain(*weights))
    grads = [step.gradients[i] for i in ids if i in step.gradients]
    arrive = not grads or any(look(grad).largest > 0 for grad in grads)
    return arrive and not step.bad


def _path_of(fault: Fault) -> Optional[str]:
    call = fault.call
    return None if call is None or call.parent is None else call.path


def _is_same(one: Fault, other: Fault) -> bool:
    if _path_of(one) != _path_of(other) or one.is_backward != other.is_backward:
        return False
    return one.is_backward or one.operation == other.operation
