"""Branches and order: what a graph must be told, and eager mode does by itself."""

from __future__ import annotations

from typing import Any, Callable, Tuple

import tensorflow as tf

from lossscale.runtime.mode import in_xla


def group_ops(results: Any) -> Any:
    """Returns one op that runs all `results`, or None in eager mode: they have run."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    ops = []
    for result in tf.nest.flatten(results):
        op = result if isinstance(result, tf.Operation) else getattr(result, "op", None)
        # Results of another graph, or of mirrored variables, ran or will run there.
        if getattr(op, "graph", None) is graph:
            ops.append(op)
    return tf.group(*ops)


def with_dependencies(results: Any, value: Any) -> Any:
    """Returns the tensor `value`, once all `results` have run."""
    op = group_ops(results)
    with tf.control_dependencies([] if op is None else [op]):
        return tf.identity(value)


def either(
    condition: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]
) -> Any:
    """Runs one of two functions, and the variables that it changes change in place.

    XLA makes a select for each variable of a `tf.cond` around an optimizer's step. The
    new weights then need the moments both as they were and as they would be, and Adam
    copies its moments at every step. A loop that runs at most once is left as it is.

    Args:
      condition: A `bool` tensor of shape `[]`.
      true_fn: Run if it holds. Returns a `bool` tensor of shape `[]`.
      false_fn: Run if it does not. Returns a `bool` tensor of shape `[]`.

    Returns:
      A tensor of shape `[]` that depends on what was run.
    """
    if not in_xla():
        return tf.cond(condition, true_fn, false_fn)
    idle = (tf.constant(True),)
    (done,) = xla_only_if(condition, lambda: (true_fn(),), idle)
    with tf.control_dependencies([done]):
        opposite = tf.logical_not(condition)
        return xla_only_if(opposite, lambda: (false_fn(),), idle)[0]


def xla_only_if(
    condition: Any, true_fn: Callable[[], Tuple[Any, ...]], default: Tuple[Any, ...]
) -> Tuple[Any, ...]:
    """Returns what `true_fn` returns if `condition` holds, else `default`.

    For XLA, which runs both sides of a `tf.cond` with several results. This is a loop
    that runs at most once.

    Args:
      condition: A `bool` tensor of shape `[]`.
      true_fn: Returns tensors, as many as `default` and of the same dtypes and shapes.
      default: Tensors.
    """

    def body(*_: Any) -> Tuple[Any, ...]:
        return (tf.constant(False), *true_fn())

    results = tf.while_loop(lambda is_due, *_: is_due, body, (condition, *default))
    return tuple(results[1:])
