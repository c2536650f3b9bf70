"""The variables that loss scales are made of, and how a rule reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Scalar, Variable


class Unsaved:
    """What a loss scale keeps that is in no file: tf.Module does not look in here.

    Attributes:
      largest: The variable `LossScale.last_largest`, or None.
    """

    largest: Scalar = None


def scalar(name: str, initial_value: Any, dtype: Any) -> Any:
    """Returns a new variable of shape `[]`, of one value on all replicas."""
    with tf.init_scope():  # also when constructed while a function is traced
        settings = {
            "name": name,
            "dtype": dtype,
            "trainable": False,
            # Every replica computes the same value, and one must be taken.
            "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA,
        }
        if mode.current().knows_values:
            return tf.Variable(initial_value, **settings)
        # A graph's collections would hold each replica's copy of a tf.Variable.
        return tf.compat.v1.Variable(initial_value, use_resource=True, **settings)


def described(loss_scale: Any) -> str:
    """Returns a loss scale's state and arguments, as `repr` shows them."""
    kinds = (tf.Variable,) if mode.current().knows_values else ()
    variables = {k: v for k, v in vars(loss_scale).items() if isinstance(v, kinds)}
    state = {k: v.numpy() for k, v in variables.items() if not v.shape.rank}
    shown = {**state, **loss_scale.get_config()}
    # In place of its config a loss scale within, which shows its own state.
    shown.update(
        {
            k: v
            for k, v in vars(loss_scale).items()
            if k in shown and isinstance(v, tf.Module)
        }
    )
    listed = ", ".join(f"{name}={value}" for name, value in shown.items())
    return f"{type(loss_scale).__name__}({listed})"


def value_of(variable: Variable) -> Any:
    """Returns what a counter holds: in eager mode a number of Python's."""
    value = tf.convert_to_tensor(variable)
    return int(value) if mode.current().knows_values else value


def assign(variable: Variable, value: Any) -> Any:
    """Assigns a counter's new value, a tensor or a number of Python's."""
    if isinstance(value, int):
        # TensorFlow keeps a tensor of each Python number that it was ever given, 650
        # bytes of a counter's every step (seen on 2.21), and none of NumPy's.
        value = np.int64(value)
    return variable.assign(value, read_value=False)


def where(condition: Flag, one: Any, other: Any) -> Any:
    """Returns `tf.where`, or, in eager mode, Python's own choice.

    There the few numbers of the rule are known, and an operation takes longer than the
    rule in Python: only what changes a variable is left for TensorFlow to do.
    """
    if isinstance(condition, bool):
        return one if condition else other
    return tf.where(condition, one, other)
