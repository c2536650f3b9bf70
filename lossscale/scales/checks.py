"""Checks of what a user's loss scale or guard returns, and what `adjust` is given."""

from __future__ import annotations

import collections.abc
import contextlib
from typing import Any, Dict, Optional, Tuple, Type

import numpy as np
import tensorflow as tf

from lossscale.arguments import shown
from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Scalar, Tensor, Variable

#: A loss scale of `base`, which imports this module.
LossScale = Any


def variable_of(loss_scale: LossScale, name: str) -> Variable:
    """Returns the variable that is the attribute `name`, or raises."""
    value = getattr(loss_scale, name, None)
    if isinstance(value, tf.Variable):
        return value
    cls = type(loss_scale).__name__
    create = f"self.{name} = self._add_weight({name!r}, 0)"
    if hasattr(value, "assign"):
        raise TypeError(
            f"`{name}` of {cls} must be a tf.Variable, got {shown(value)}. Create it "
            f"in the constructor: {create}"
        )
    variables = [k for k, v in vars(loss_scale).items() if isinstance(v, tf.Variable)]
    raise AttributeError(
        f"{cls} must have the variables that its rule names, "
        f"{', '.join(sorted(variables))}, got {name!r}. Correct the name, or create "
        f"the variable in the constructor: {create}"
    )


def checked_values(
    loss_scale: LossScale, wanted: str, values: Any
) -> Tuple[Dict[str, Tensor], bool]:
    """Returns new values by name as tensors, or an error that `wanted` begins.

    Also returns whether a shape is not known yet: if it is wrong, the run raises.
    """
    if not isinstance(values, collections.abc.Mapping):
        raise TypeError(
            f"{wanted} a dictionary of new values by the names of variables, got "
            f"{shown(values)}."
        )
    checked, may_fail = {}, False
    for name, value in values.items():
        if not isinstance(name, str):
            raise TypeError(
                f"{wanted} a dictionary of new values by the names of variables, got "
                f"the key {shown(name)}. Write the name as a string."
            )
        variable = variable_of(loss_scale, name)
        dtype, shape = variable.dtype.base_dtype, variable.shape
        new = value if isinstance(value, tf.Tensor) else _converted(value, dtype)
        # A graph takes an eager tensor of any dtype.
        if new is None or new.dtype != dtype or not shape.is_compatible_with(new.shape):
            raise TypeError(
                f"{wanted} {dtype.name} of shape {shape} for {name!r}, got "
                f"{shown(value)}. tf.cast changes a dtype, tf.reshape a shape."
            )
        if not new.shape.is_fully_defined():
            new, may_fail = tf.ensure_shape(new, shape), True
        checked[name] = new
    return checked, may_fail


def _converted(value: Any, dtype: tf.DType) -> Optional[Tensor]:
    """Returns a value as a tensor, None if it has no such dtype."""
    if not isinstance(value, (tf.IndexedSlices, tf.SparseTensor)):
        with contextlib.suppress(TypeError, ValueError):
            return tf.convert_to_tensor(value, dtype)
    return None


def checked_verdict(guard: Any, verdict: Any) -> Tuple[Tensor, Dict[str, Tensor]]:
    """Returns what a guard's `judge` has returned, a flag and new values, or raises."""
    wanted = f"`judge` of {type(guard).__name__} must return (should_apply, values)"
    if not isinstance(verdict, (tuple, list)) or len(verdict) != 2:
        raise TypeError(
            f"{wanted}, got {shown(verdict)}. Write return should_apply, {{}} if no "
            "variable changes."
        )
    flag = f"{wanted} whose `should_apply` is a bool, or a bool tensor of one element"
    fix = "Write a comparison such as `largest < 100.0`"
    should_apply = _one_element(flag, verdict[0], "a bool", fix, TypeError)
    values, _ = checked_values(guard, f"{wanted} whose `values` are", verdict[1])
    return should_apply, values


def checked_step(
    is_finite: Any, largest: Optional[Any], is_used: bool
) -> Tuple[Flag, Optional[Scalar]]:
    """Returns the arguments of `adjust` as tensors of shape `[]`, or raises.

    A step whose `largest` is no magnitude is not finite. `is_used`: whether it counts.
    """
    must = "`{}` must be {}, or a tensor of one element"
    wanted = must.format("is_finite", "a bool")
    is_finite = _one_element(wanted, is_finite, "a bool", "Pass a flag")
    if largest is None or not is_used:
        return is_finite, largest
    wanted, value = must.format("largest", "a number"), largest
    largest = _one_element(wanted, largest, "a number", "Pass a magnitude")
    wide = largest if largest.dtype == tf.float32 else tf.cast(largest, tf.float64)
    # Infinity as a constant would stop a run that looks for infinities.
    is_magnitude = tf.logical_and(wide >= 0.0, wide <= wide.dtype.max)
    if mode.current().knows_values and is_finite and not is_magnitude:
        raise ValueError(
            "`largest` must be a finite number from 0 on if the gradients were "
            f"finite, got {shown(value)}. If not, pass is_finite=False."
        )
    is_finite = tf.logical_and(is_finite, is_magnitude)
    return is_finite, tf.cast(tf.minimum(wide, tf.float32.max), tf.float32)


def _one_element(
    wanted: str, value: Any, kind: str, fix: str, of_shape: Type[Exception] = ValueError
) -> Tensor:
    """Returns what is "a bool" or "a number" as a tensor of shape `[]`, or raises."""

    def refused(error: Type[Exception]) -> Exception:
        return error(
            f"{wanted}, got {shown(value)}. {fix}; to reduce several to one, "
            "tf.reduce_all is for flags, tf.reduce_max for numbers."
        )

    # TensorFlow would keep a tensor for each Python number that it was ever given.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        tensor = tf.convert_to_tensor(np.asarray(float(value)) if is_number else value)
    except (TypeError, ValueError, OverflowError) as error:
        raise refused(TypeError) from error
    dtype = tensor.dtype
    is_real = dtype.is_floating or dtype.is_integer
    if not (dtype.is_bool if kind == "a bool" else is_real):
        raise refused(TypeError)
    if tensor.shape.num_elements() not in {None, 1}:
        raise refused(of_shape)
    return tensor if tensor.shape.rank == 0 else tf.reshape(tensor, [])
