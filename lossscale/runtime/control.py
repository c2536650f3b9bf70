"""The branches and the order of operations that a graph must be given.

Eager mode has both by itself: Python's `if`, and the order of calls.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Optional

import tensorflow as tf

from lossscale.runtime import mode, replicas
from lossscale.runtime.aliases import Flag, Op, Results, Tensor

v1 = tf.compat.v1
_IS_KNOWN = "experimental_attributes" in inspect.signature(tf.function).parameters
#: The arguments of tf.function that keep its operations out of its caller's graph.
_NOT_INLINED: Any = (
    {"experimental_attributes": {"_noinline": True}} if _IS_KNOWN else {}
)


def group_ops(results: Results) -> Op:
    """Returns one op that runs all `results`, None in eager mode: they have run."""
    if mode.current().knows_values:
        return None
    # A value that differs between replicas is one object with a part for each replica.
    parts = tf.distribute.get_strategy().experimental_local_results
    every = tf.nest.flatten(list(map(parts, tf.nest.flatten(results))))
    ops = [r if isinstance(r, tf.Operation) else getattr(r, "op", None) for r in every]
    # Results of another graph, or of mirrored variables, run elsewhere.
    graph = v1.get_default_graph()
    return tf.group(*[op for op in ops if getattr(op, "graph", None) is graph])


def select(flag: Flag, one: Any, other: Any) -> Any:
    """Returns one of two scalars, as `tf.where` does.

    That broadcasts its arguments, and takes a CPU four times as long for scalars.
    """
    ranks = [getattr(getattr(v, "shape", None), "rank", 0) for v in (flag, one, other)]
    # A rule may be called with many states.
    return (tf.where if any(ranks) else v1.where)(flag, one, other)


def not_inlined(function: Callable[[], Results]) -> Results:
    """Runs what a branch does seldom, as one operation of a graph if that is possible.

    The operations of a branch that is not taken are passed over one by one.
    """
    here = mode.current()
    is_plain = here.knows_values or here.by_xla or here.runs_parts
    if is_plain or not _IS_KNOWN or replicas.count() > 1:
        return function()

    def body() -> None:
        function()  # tf.function runs by itself what changes a variable

    return tf.function(body, autograph=False, **_NOT_INLINED)()


def either(
    condition: Flag,
    true_fn: Callable[[], Results],
    false_fn: Callable[[], Results],
    is_small: bool = False,
) -> Results:
    """Returns the results of one of two functions, and runs only that, under XLA too.

    By itself XLA turns a `tf.cond` into selects: it runs both sides, and copies Adam's
    moments at every step. It keeps the branch if one side draws a random number, since
    the next random number depends on that draw. So one side draws a number here, and
    nobody uses it. XLA would also keep a `tf.switch_case` of three, but computes the
    constants that enter it while compiling: minutes for the gradients of a convolution.

    Both functions return as many tensors, of the same dtypes and shapes. If both
    `is_small`, XLA may run both and select: on a GPU no host has to wait.
    """
    value = _static_value(condition)
    if value is not None:
        return true_fn() if value else false_fn()
    if is_small or not mode.current().by_xla:
        return _cond(condition, true_fn, false_fn)

    def with_a_draw() -> Results:
        results = false_fn()
        first, *others = tf.nest.flatten(results)
        # XLA does not know that no number above 2 is drawn. The seed of its own leaves
        # the user's sequence of random numbers as it is.
        is_two = tf.random.uniform([], seed=1) > 2.0
        first = tf.where(is_two, tf.zeros_like(first), first)
        return tf.nest.pack_sequence_as(results, [first, *others])

    return _cond(condition, true_fn, with_a_draw)


def run_either(
    condition: Flag, true_fn: Callable[[], Results], false_fn: Callable[[], Results]
) -> Results:
    """Runs one of two functions for what they change. `group_ops` takes the result."""
    value = _static_value(condition)
    if value is not None:
        return true_fn() if value else false_fn()

    def after(function: Callable[[], Results]) -> Tensor:
        with tf.control_dependencies([group_ops([function()])]):
            return tf.constant(True)

    return either(condition, lambda: after(true_fn), lambda: after(false_fn))


def _cond(
    condition: Flag, true_fn: Callable[[], Results], false_fn: Callable[[], Results]
) -> Results:
    """Returns `tf.cond(...)`. In a session's graph that is TensorFlow 1's own branch.

    TensorFlow 2's branch is a function. In one, a variable that is no resource is no
    variable, and up to TensorFlow 2.13 an optimizer makes its slots in eager mode if
    `disable_eager_execution` left no other place but the implicit graph. The switch is
    the process's, so that loops that an inner optimizer builds are of the same kind.
    """
    here = mode.current()
    if not here.runs_parts or here.by_xla or not v1.control_flow_v2_enabled():
        return tf.cond(condition, true_fn, false_fn)
    v1.disable_control_flow_v2()
    try:
        return tf.cond(condition, true_fn, false_fn)
    finally:
        v1.enable_control_flow_v2()


def _static_value(condition: Flag) -> Optional[bool]:
    """Returns a condition that is known while a graph is built, or None."""
    if mode.current().knows_values:
        return bool(condition)
    value = tf.get_static_value(condition)
    return None if value is None else bool(value)
