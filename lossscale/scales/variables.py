"""The variables that loss scales are made of."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Unsaved:
    """What a loss scale keeps that is in no file: tf.Module does not look in here.

    Attributes:
      largest: The variable `LossScale.last_largest`, or None.
    """

    largest: Any = None


def scalar(name: str, initial_value: Any, dtype: Any) -> Any:
    """Returns a new variable of shape `[]`, of one value on all replicas."""
    with tf.init_scope():  # also when constructed while a function is traced
        return tf.Variable(
            initial_value,
            name=name,
            dtype=dtype,
            trainable=False,
            # Every replica computes the same value, and one must be taken.
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
