"""In which mode TensorFlow is, and what is done differently in each: one table."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import tensorflow as tf

_ARGUMENTS = inspect.signature(tf.function).parameters
#: The argument of tf.function that asks for XLA. TensorFlow 2.4 has an older name.
COMPILED_BY_XLA = {
    "jit_compile" if "jit_compile" in _ARGUMENTS else "experimental_compile": True,
}
#: The argument of tf.function that traces batches of other shapes once, not each.
ANY_SHAPES = {
    "reduce_retracing"
    if "reduce_retracing" in _ARGUMENTS
    else "experimental_relax_shapes": True,
}
#: The argument of tf.function that keeps a function from being inlined. None: there is
#: none. The attribute's name is not public (seen on 2.13 to 2.21; 2.11 has none).
NOT_INLINED: Any = (
    {"experimental_attributes": {"_noinline": True}}
    if "experimental_attributes" in _ARGUMENTS
    else None
)
_VERSION = tuple(map(int, tf.__version__.split(".")[:2]))
#: Whether `tf.vectorized_map` takes operations with attributes that it does not know.
#: On TensorFlow 2.4 it does not, from 2.8 on it does (seen up to 2.21).
VECTORIZES_MARKED = _VERSION >= (2, 8)
#: Whether XLA computes `x * a * b` as it is written: it makes one factor of the two on
#: TensorFlow 2.4 and 2.8, and no longer from 2.10 on (seen up to 2.21).
_XLA_KEEPS_FACTORS = _VERSION >= (2, 10)


class Mode(NamedTuple):
    """What is done differently, one row for each mode.

    Times are what loss scaling adds to a step on two cores, TensorFlow 2.21.

    Attributes:
      knows_values: Python knows what tensors hold: its own `if` decides, and operations
        run in the order in which they are called.
      branch_saves_time: The rule of a loss scale stands in a branch, which is not taken
        at a good step that only has to be counted: 40 us instead of 73 on one tiny
        gradient. What a bad step does is a function that is not inlined: 25 us instead
        of 34, a tiny step. Not in a session: who fetches a result from within a branch
        would run it at every step.
      cond_runs_both: XLA runs both sides of a `tf.cond` and selects each variable, if
        it can: 115 ms instead of 51, four gradients of 10 M with Adam. `control.either`
        keeps it from doing so.
      looks_at_once: Each element is looked at, without a sum as a quick check before.
        On a GPU both take as long, and a branch that waits for the sum makes the host
        wait. On a CPU looking takes longer: 6.4 ms instead of 4.4, four of 10 M.
      checks_anew: The check of gradients that are returned to the user divides them
        once more, so that the quotients need not be stored: in a loop that clips, 9.7
        ms instead of 18.3, 24 million weights with Adam. In a graph it takes longer,
        10.1 ms instead of 5.0: the division cannot reuse the memory of its input.
      divides_by_reciprocal: Gradients are multiplied with 1 / divisor, which XLA fuses
        into what uses the product. It would store a quotient in memory.
      joins_factors: XLA turns `x * a * b` into `x * (a * b)`: an overflow of `x * a`
        is not seen.
      squares_factors: XLA turns `(x * a)**2` into `x**2 * a**2`, which is NaN where `a`
        is so small that its square is 0.
      sums_bfloat16_slowly: A sum of bfloat16 takes longer than looking at each element:
        22.1 ms instead of 16.4, four of 10 M. Without XLA it is 4.8 and 8.0.
      may_not_round: XLA computes float16 in float32, and may leave the rounding out.
      fixes_shapes: Every shape must be known while tracing. There is no `tf.unique`.
      packs_small: Small gradients of one shape are packed into one tensor, to start
        fewer kernels. XLA makes one program of them anyway.
      knows_constants: A compiler turns division by a constant into multiplication.
      runs_parts: A session runs parts of a graph, when it likes: what a variable was
        assigned may come from another run.
      records_faults: What was at fault is kept in a variable that the step creates. A
        session would have to initialize it.
    """

    knows_values: bool = False
    branch_saves_time: bool = False
    cond_runs_both: bool = False
    looks_at_once: bool = False
    checks_anew: bool = False
    divides_by_reciprocal: bool = False
    joins_factors: bool = False
    squares_factors: bool = False
    sums_bfloat16_slowly: bool = False
    may_not_round: bool = False
    fixes_shapes: bool = False
    packs_small: bool = True
    knows_constants: bool = True
    runs_parts: bool = False
    records_faults: bool = True


EAGER = Mode(knows_values=True, knows_constants=False)
GRAPH = Mode(branch_saves_time=True)
SESSION = Mode(runs_parts=True, records_faults=False)
XLA = Mode(
    cond_runs_both=True,
    checks_anew=True,
    divides_by_reciprocal=_XLA_KEEPS_FACTORS,
    joins_factors=not _XLA_KEEPS_FACTORS,
    squares_factors=True,
    sums_bfloat16_slowly=True,
    may_not_round=True,
    fixes_shapes=True,
    packs_small=False,
)
#: `tf.xla.experimental.compile` in a `tf.compat.v1` graph.
XLA_IN_SESSION = XLA._replace(runs_parts=True, records_faults=False)


def current() -> Mode:
    """Returns the row of what is traced now, or of eager mode."""
    if tf.executing_eagerly():
        return EAGER
    in_session = not tf.compat.v1.executing_eagerly_outside_functions()
    if _in_xla():
        row = XLA_IN_SESSION if in_session else XLA
        return row._replace(looks_at_once=True) if _has_gpu() else row
    return SESSION if in_session else GRAPH


def max_drops_nan() -> bool:
    """Tells whether the maximum of values, one of them NaN, may be another of them.

    XLA's is. A CPU's is not on TensorFlow 2.21; nobody has looked at all before, nor
    at every GPU.
    """
    return _VERSION < (2, 21) or _in_xla() or _has_gpu()


def _has_gpu() -> bool:
    """Tells whether what is compiled now is probably to run on a GPU."""
    return bool(tf.config.list_logical_devices("GPU"))


def _in_xla() -> bool:
    """Tells whether what is traced now is compiled: `tf.function(jit_compile=True)`."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        # Not public. TensorFlow's own cond and while_loop ask the same question in the
        # same way (`GraphOrParentsInXlaContext`, seen on 2.4 to 2.21). Where the answer
        # is a wrong False, everything is still right, and slower.
        get_context = getattr(graph, "_get_control_flow_context", None)
        context = get_context() if get_context is not None else None
        is_xla = getattr(context, "IsXLAContext", None)
        if is_xla is not None and is_xla():
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
