"""The variables of loss scales, and how a rule reads and assigns them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Scalar, Variable


class Unsaved:
    """State of a loss scale that no file holds: tf.Module does not search this object.

    Attributes:
      largest: The variable `LossScale.last_largest`, or None.
    """

    largest: Scalar = None


def scalar(name: str, initial_value: Any, dtype: Any) -> Any:
    """Returns a new variable that has the same value on all replicas."""
    with tf.init_scope():  # a loss scale may be created while a function is traced
        settings = {
            "name": name,
            "dtype": dtype,
            "trainable": False,
            # Every replica computes the same value, so any of them will do.
            "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA,
        }
        if mode.current().knows_values:
            return tf.Variable(initial_value, **settings)
        # With tf.Variable a graph's collections would hold each replica's copy.
        return tf.compat.v1.Variable(initial_value, use_resource=True, **settings)


def described(loss_scale: Any) -> str:
    """Returns the `repr` of a loss scale: its state and its arguments."""
    kinds = (tf.Variable,) if mode.current().knows_values else ()
    variables = {k: v for k, v in vars(loss_scale).items() if isinstance(v, kinds)}
    state = {k: v.numpy() for k, v in variables.items() if not v.shape.rank}
    shown = {**state, **loss_scale.get_config()}
    # A loss scale within shows its own state, not its config.
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
    """Returns a counter's value: a Python number in eager mode, else a tensor."""
    value = tf.convert_to_tensor(variable)
    return int(value) if mode.current().knows_values else value


def assign(variable: Variable, value: Any) -> Any:
    """Assigns a counter's new value, a tensor or a Python number."""
    if isinstance(value, int):
        # TensorFlow caches a tensor for each Python number that it was ever given: 650
        # bytes per step for a counter (seen on 2.21). It caches none for NumPy numbers.
        value = np.int64(value)
    return variable.assign(value, read_value=False)


def where(condition: Flag, one: Any, other: Any) -> Any:
    """Returns `tf.where`, or in eager mode the choice that Python makes.

    In eager mode the rule's few numbers are known, and one operation would take longer
    than the whole rule in Python. So TensorFlow only assigns the variables.
    """
    if isinstance(condition, bool):
        return one if condition else other
    return tf.where(condition, one, other)
