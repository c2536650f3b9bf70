"""Branches and order: what a graph must be told, and eager mode does by itself."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag


def group_ops(results: Any) -> Any:
    """Returns one op that runs all `results`, or None in eager mode: they have run."""
    if mode.current().knows_values:
        return None
    graph = tf.compat.v1.get_default_graph()
    # What differs between replicas is one object, which has a part of each.
    parts = tf.distribute.get_strategy().experimental_local_results
    ops = []
    for result in tf.nest.flatten(list(map(parts, tf.nest.flatten(results)))):
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
    condition: Flag, true_fn: Callable[[], Any], false_fn: Callable[[], Any]
) -> Any:
    """Runs one of two functions. Under XLA, too, it runs only one of them.

    By itself XLA turns a `tf.cond` into selects: it runs both sides, and selects each
    result and each variable. Adam's moments are then copied at every step. XLA cannot
    do so if one side draws a random number, as the next number depends on the draw, so
    one is drawn and not used. A `tf.switch_case` of three branches is kept, too, but
    XLA computes constants that come into it while it compiles: minutes for the
    gradients of a convolution.

    Args:
      condition: A `bool` tensor of shape `[]`.
      true_fn: Run if it holds. Returns tensors, or one.
      false_fn: Run if it does not. Returns as many, of the same dtypes and shapes.

    Returns:
      What was returned.
    """
    if mode.current().knows_values:
        return true_fn() if condition else false_fn()
    if mode.current().cond_runs_both:
        return tf.cond(condition, true_fn, lambda: _with_a_draw(false_fn()))
    return tf.cond(condition, true_fn, false_fn)


def rarely(function: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a side of a branch that is rarely taken, as one node of the graph.

    Of the side of a branch that is not taken, TensorFlow still passes over each node.
    A function that is not inlined is one node.

    Args:
      function: Takes nothing, and returns a tensor. Nobody asks for its gradient.
    """
    if not mode.current().branch_saves_time or mode.NOT_INLINED is None:
        return function
    kept = tf.function(function, autograph=False, **mode.NOT_INLINED)
    return lambda: _called(kept.get_concrete_function())


def _called(function: Any) -> Any:
    """Returns the one result of a concrete function, and keeps no graph of it.

    What is called as usual keeps the graph that it was traced in, for gradients, as
    long as its caller's is kept: that is for ever where the caller registers a gradient
    of its own, as TensorFlow's `all_reduce` in each Keras's optimizers does.
    """
    (result,) = tf.raw_ops.StatefulPartitionedCall(
        args=function.captured_inputs,
        Tout=[output.dtype for output in function.outputs],
        f=function,
    )
    # Not public. Without it TensorFlow makes the graph anew when it is asked for
    # (seen on 2.15 to 2.21). Where there is no such name, nothing is let go.
    atomic: Any = getattr(function, "inference_fn", None)
    if hasattr(atomic, "_cached_graph"):
        atomic._cached_graph = None
    result.set_shape(function.outputs[0].shape)
    return result


def _with_a_draw(results: Any) -> Any:
    """Returns `results`, of which the first seems to depend on a random number."""
    first, *others = tf.nest.flatten(results)
    # Never so, which XLA does not know. The seed keeps it out of the user's numbers.
    is_two = tf.random.uniform([], seed=1) > 2.0
    first = tf.where(is_two, tf.zeros_like(first), first)
    return tf.nest.pack_sequence_as(results, [first, *others])
