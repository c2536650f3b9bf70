"""What a subclass of LossScale has of its own, also one that was written for 2.x."""

from __future__ import annotations

import functools
from typing import Any, Optional

import tensorflow as tf

from lossscale.runtime.aliases import Flag, Scalar, Tensor
from lossscale.scales.checks import LossScale

#: The methods of which `_overridden` tells whether a subclass has its own.
_OVERRIDABLE = (
    *("update", "adjust", "_adjust", "judge", "next_state"),
    *("scale", "scale_by", "_value"),
)


def adapt(cls: Any, base: Any) -> None:
    """Adapts a class that derives from LossScale, which is `base`, or raises."""
    # Classes that were written for 2.x have these two under other names.
    members = vars(cls)
    named = members.get("left_out_as") or members.get("_left_out_as") or cls.left_out_as
    cls.left_out_as = named or getattr(cls, "_left_out_as", "")
    first = next(c for c in cls.__mro__ if {"judge", "_judge"} & {*vars(c)})
    if first is not base and "_judge" in vars(first):
        cls.judge = _judge_as_in_2
    if cls.judge is not base.judge and not cls.left_out_as:
        raise TypeError(
            "`left_out_as` must say what the steps are that `judge` leaves out, "
            f'as in "all zero", got {cls.left_out_as!r} for {cls.__name__}. Set '
            "it in the class, next to `judge`."
        )
    if "__call__" in members:
        _report_reads(cls, members["__call__"])
    cls._overridden = frozenset(
        name for name in _OVERRIDABLE if getattr(cls, name) is not getattr(base, name)
    )


def _judge_as_in_2(
    self: LossScale, state: Any, is_finite: Flag, largest: Optional[Scalar]
) -> Any:
    """Is the `judge` of a class that overrides `_judge`, which takes no state."""
    del state
    return self._judge(is_finite, largest)


def _report_reads(cls: Any, compute: Any) -> None:
    """Makes a class's own `__call__`, `compute`, report that a program reads it."""

    def _value(self: LossScale) -> Tensor:
        # A user's may return a variable or a number.
        return tf.convert_to_tensor(compute(self))

    @functools.wraps(compute)
    def __call__(self: LossScale) -> Any:  # noqa: N807 - it is the class's
        return self._note_read(_value(self))

    cls._value, cls.__call__ = _value, __call__
