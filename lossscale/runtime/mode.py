"""The mode TensorFlow is in, and what we do differently in each: one table."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import tensorflow as tf

_ARGUMENTS = inspect.signature(tf.function).parameters
#: The argument of tf.function that asks for XLA. TensorFlow 2.4 has an older name.
COMPILED_BY_XLA = {
    "jit_compile" if "jit_compile" in _ARGUMENTS else "experimental_compile": True,
}
#: The argument of tf.function that makes one trace serve batches of many shapes.
ANY_SHAPES = {
    "reduce_retracing"
    if "reduce_retracing" in _ARGUMENTS
    else "experimental_relax_shapes": True,
}
_VERSION = tuple(map(int, tf.__version__.split(".")[:2]))
#: Whether XLA computes `x * a * b` as it is written, and not `x * (a * b)`.
_XLA_KEEPS_FACTORS = _VERSION >= (2, 10)


class Mode(NamedTuple):
    """What we do differently, one row for each mode. `docs/modes.md` shows the table.

    Attributes:
      knows_values: Python knows what tensors hold, so Python's own `if` decides.
        Operations run in the order in which they are called.
      cond_runs_both: If it can, XLA runs both sides of a `tf.cond` and then selects
        each variable's value, which takes twice as long. `control.either` prevents it.
      looks_at_once: The exact check of each element runs without a quick check (a sum)
        before it. On a GPU both take equally long, and a branch that depends on the sum
        makes the host wait. On a CPU the exact check takes longer.
      checks_anew: The check of gradients that are returned to the user divides them a
        second time, so that the quotients need not be stored. Without XLA that takes
        longer: the division cannot reuse its input's memory.
      divides_by_reciprocal: Gradients are multiplied with 1 / divisor. XLA fuses the
        product into the operation that uses it, but would store a quotient in memory.
      joins_factors: XLA turns `x * a * b` into `x * (a * b)`, which hides an overflow
        of `x * a`.
      sums_bfloat16_slowly: Summing bfloat16 takes longer than the exact check.
      may_not_round: XLA computes float16 in float32, and may leave the rounding out.
      fixes_shapes: Every shape must be known while tracing. There is no `tf.unique`.
      packs_small: Small gradients of one shape are packed into one tensor, so that a
        step starts fewer kernels. XLA makes one program of them anyway.
      knows_constants: A compiler turns division by a constant into multiplication.
      runs_parts: A session runs any part of a graph at any time. The value that a
        variable holds may come from another run.
      records_faults: A variable that the step creates records which gradients were at
        fault. A session would have to initialize that variable.
    """

    knows_values: bool = False
    cond_runs_both: bool = False
    looks_at_once: bool = False
    checks_anew: bool = False
    divides_by_reciprocal: bool = False
    joins_factors: bool = False
    sums_bfloat16_slowly: bool = False
    may_not_round: bool = False
    fixes_shapes: bool = False
    packs_small: bool = True
    knows_constants: bool = True
    runs_parts: bool = False
    records_faults: bool = True


EAGER = Mode(knows_values=True, knows_constants=False)
GRAPH = Mode()
SESSION = Mode(runs_parts=True, records_faults=False)
XLA = Mode(
    cond_runs_both=True,
    checks_anew=True,
    divides_by_reciprocal=_XLA_KEEPS_FACTORS,
    joins_factors=not _XLA_KEEPS_FACTORS,
    sums_bfloat16_slowly=True,
    may_not_round=True,
    fixes_shapes=True,
    packs_small=False,
)
#: `tf.xla.experimental.compile` in a `tf.compat.v1` graph.
XLA_IN_SESSION = XLA._replace(runs_parts=True, records_faults=False)


def current() -> Mode:
    """Returns the row of the mode that this code is traced or run in."""
    if tf.executing_eagerly():
        return EAGER
    in_session = not tf.compat.v1.executing_eagerly_outside_functions()
    if _in_xla():
        row = XLA_IN_SESSION if in_session else XLA
        return row._replace(looks_at_once=True) if _has_gpu() else row
    return SESSION if in_session else GRAPH


def max_drops_nan() -> bool:
    """Tells whether the maximum of numbers may ignore a NaN among them.

    XLA's maximum ignores it, and a CPU's from TensorFlow 2.21 on does not. For all
    others the answer is True.
    """
    return _VERSION < (2, 21) or _in_xla() or _has_gpu()


def _has_gpu() -> bool:
    """Tells whether the code that is compiled now will probably run on a GPU."""
    return bool(tf.config.list_logical_devices("GPU"))


def _in_xla() -> bool:
    """Tells whether XLA will compile this code: `tf.function(jit_compile=True)`."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        # Not public. TensorFlow's own `cond` asks in the same way. A wrong False would
        # only make the step slower.
        get_context = getattr(graph, "_get_control_flow_context", None)
        context = get_context() if get_context is not None else None
        is_xla = getattr(context, "IsXLAContext", None)
        if is_xla is not None and is_xla():
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
