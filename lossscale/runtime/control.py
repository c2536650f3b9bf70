"""Branches and order: what a graph must be told, and eager mode does by itself."""

from __future__ import annotations

from typing import Any, Callable, Optional

import tensorflow as tf

from lossscale.runtime import mode


def group_ops(results: Any) -> Any:
    """Returns one op that runs all `results`, or None in eager mode: they have run."""
    if mode.current().knows_values:
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
    condition: Any,
    true_fn: Callable[[], Any],
    false_fn: Callable[[], Any],
    never: Optional[Callable[[], Any]] = None,
) -> Any:
    """Runs one of two functions. What they change changes in place, under XLA too.

    XLA makes a select for each result and variable of a `tf.cond`: it runs both sides,
    and Adam copies its moments at every step, as the new weights need them both as they
    were and as they would be. A conditional of three branches is left as it is, and
    runs one (TensorFlow 2.4 to 2.21).

    Args:
      condition: A `bool` tensor of shape `[]`.
      true_fn: Run if it holds. Returns tensors, or one.
      false_fn: Run if it does not. Returns as many, of the same dtypes and shapes.
      never: The third branch under XLA, which returns as many, too. None: `false_fn`.

    Returns:
      What was returned.
    """
    if not mode.current().cond_runs_both:
        return tf.cond(condition, true_fn, false_fn)
    index = tf.where(condition, 0, 1)
    return tf.switch_case(index, [true_fn, false_fn, never or false_fn])
