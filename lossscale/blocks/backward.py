"""A call whose gradients are computed at a scale of their own.

From top to bottom: the rule (`unscaled_gradients`), the call that it is applied to
(`call`), and what the call may not read (`_refused_gradients`).
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf

from lossscale.gradients.arithmetic import divide, largest_magnitude, widened
from lossscale.gradients.check import all_finite, checked
from lossscale.runtime import kerases, mode, op_callbacks
from lossscale.runtime.aliases import (
    Flag,
    Grad,
    Grads,
    Scalar,
    Tensor,
    Tensors,
    Variable,
)
from lossscale.runtime.control import either
from lossscale.runtime.graphs import (
    captured_by,
    current_graph,
    do_not_convert,
    graph_of,
    is_recorded,
)

#: The most retries after an overflow, each at a smaller scale.
_RETRIES = 3
#: How much smaller the scale is after an overflow: 8 doublings.
_BACKOFF = 2.0**-8
#: The bits of a float32's exponent.
_EXPONENT = 0x7F800000
#: float16's largest number, and its exponent.
_LARGEST, _TOP = 65504.0, 15
#: The bounds of the scale. Their reciprocals are normal numbers, too.
_LEAST, _MOST = 2.0**-126, 2.0**126


@do_not_convert
def unscaled_gradients(
    backward: Callable[[Grads], Grads], grads: Grads, headroom: int
) -> Grads:
    """Returns `backward(grads)`, computed at the scale that fits `grads`.

    The docstring of `ScaledBlock` has the rule.

    Args:
      backward: A linear function. It returns a list of gradients, some of which may be
        None or `tf.IndexedSlices`. It runs again only if its results are not finite.
      grads: A list of dense gradients of `float32` or wider.
      headroom: How many doublings are left free for the results of `backward`.
    """

    def at(scale: Scalar) -> Grads:
        return backward([grad * tf.cast(scale, grad.dtype) for grad in grads])

    scale = fitting_scale(grads, headroom)
    scale, found = _again(at, grads, scale, at(scale))
    return list(divide(found, scale))


def fitting_scale(grads: Grads, headroom: int) -> Scalar:
    """Returns the number that multiplies gradients before they enter a block.

    It is the greatest power of two at which the largest entry is `headroom` doublings
    or more below float16's largest number; 1 if an entry is not finite, so that it
    stays infinite or NaN. It is computed from bits, so it is exact, and on a GPU
    nothing goes to the host. It has no derivative.
    """
    largest = largest_magnitude(grads)
    # With all bits of the exponent flipped, 2**e becomes 2**(1 - e).
    exponent = tf.bitwise.bitwise_and(tf.bitcast(largest, tf.int32), _EXPONENT)
    inverse = tf.bitcast(tf.bitwise.bitwise_xor(exponent, _EXPONENT), tf.float32)
    scale = tf.clip_by_value(inverse * 2.0 ** (_TOP - 1 - headroom), _LEAST, _MOST)
    is_above = largest * scale > _LARGEST * 2.0**-headroom
    scale = tf.where(is_above, tf.maximum(scale / 2.0, _LEAST), scale)
    scale = tf.where(tf.math.is_finite(largest), scale, tf.ones_like(scale))
    return _plain(scale)


def _plain(tensor: Tensor) -> Tensor:
    """Returns a copy without a derivative, which no optimizer takes as scaled."""
    if mode.current().knows_values:
        return tf.constant(tensor.numpy())
    return tf.raw_ops.Snapshot(input=tf.stop_gradient(tensor))


def _again(
    at: Callable[[Scalar], Grads], grads: Grads, scale: Scalar, found: Grads
) -> Tuple[Scalar, Grads]:
    """Tries again if need be: a branch, seldom taken, holds a loop of retries."""

    def parts_of(found: Grads) -> List[Tensor]:
        # Sparse gradients consist of several tensors.
        return list(tf.nest.flatten(_given(found), expand_composites=True))

    def retries() -> Tuple[Tensor, ...]:
        # One loop: each copy of the backward pass takes time to trace and to compile.
        can_be_finite = all_finite(grads)

        def is_to_be_tried(_: Scalar, *parts: Tensor) -> Flag:
            finite = checked(list(parts)).exact_in_branch()
            return _plain(tf.logical_and(can_be_finite, tf.logical_not(finite)))

        def attempt(scale: Scalar, *parts: Tensor) -> Tuple[Tensor, ...]:
            scale = tf.maximum(scale * _BACKOFF, _LEAST)
            again = parts_of(at(scale))
            for new, old in zip(again, parts):
                new.set_shape(old.shape)
            return (scale, *again)

        return tuple(
            tf.while_loop(is_to_be_tried, attempt, first, maximum_iterations=_RETRIES)
        )

    first = (scale, *parts_of(found))
    results = either(_plain(checked(found).quick), lambda: first, retries)
    if results is first:  # in eager mode
        return scale, found
    # These gradients have the derivative of the first attempt, since XLA cannot
    # differentiate a loop in a branch. The stop hides weights, which TensorFlow seeks.
    stopped = [tf.stop_gradient(each) for each in results]
    pass_through = tf.custom_gradient(lambda *_: (stopped, lambda *grads: grads))
    scale, *parts = pass_through(*first)
    remaining = iter(tf.nest.pack_sequence_as(_given(found), parts, True))
    return scale, [None if grad is None else next(remaining) for grad in found]


def _given(grads: Grads) -> Grads:
    return [grad for grad in grads if grad is not None]


class Nest:
    """A nest of arguments or results, and the `tensors` with gradients in it.

    Those have a floating or complex dtype, and may be parts of ragged and sparse ones.
    """

    def __init__(self, nest: Any) -> None:
        def read(leaf: Any) -> Any:  # tf.nest would replace a variable by its handle
            return tf.convert_to_tensor(leaf) if isinstance(leaf, tf.Variable) else leaf

        self._nest = tf.nest.map_structure(read, nest)
        self._leaves: List[Any] = tf.nest.flatten(self._nest, expand_composites=True)
        self._places = [i for i, leaf in enumerate(self._leaves) if _has_gradient(leaf)]
        self.tensors = [self._leaves[place] for place in self._places]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """Returns the nest with other tensors in their places, and the same masks."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors):
            leaves[place] = tensor
        found = tf.nest.pack_sequence_as(self._nest, leaves, expand_composites=True)
        return tf.nest.map_structure(kerases.with_mask, found, self._nest)


def _has_gradient(leaf: Any) -> bool:
    # A tensor of this graph, of an outer graph or of eager mode, but no array.
    is_tensor = tf.is_tensor(leaf)
    return bool(is_tensor and (leaf.dtype.is_floating or leaf.dtype.is_complex))


def call(
    function: Callable[..., Any],
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
    headroom: int,
    *,
    again: Optional[Callable[..., Any]] = None,
) -> Any:
    """Returns `function(*args, **kwargs)`, floating results in `float32` or wider.

    The backward pass multiplies the gradients of the results by the scale that fits
    them, and divides the gradients of arguments and variables by it, in `float32`.

    Args:
      function: It is called once. It may read and change variables, and draw random
        numbers.
      args: A nest of anything.
      kwargs: A nest of anything.
      headroom: As for `fitting_scale`.
      again: The backward pass calls it to compute the forward pass again. None: the
        values that `function` computed are kept for the backward pass.

    Raises:
      ValueError: `function` read a tensor that has a gradient and is no argument.
    """
    given = Nest((args, kwargs))
    results: List[Nest] = []
    outside: List[Tensor] = []

    def run(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Nest:
        args, kwargs = given.with_tensors(tensors)
        found = Nest(function(*args, **kwargs))
        # A copy, so that an operation reads what the function returns.
        wide = [widened(tf.identity(each)) for each in found.tensors]
        return Nest(found.with_tensors(wide))

    def recorded(
        function: Callable[..., Any], inputs: List[Tensor]
    ) -> Tuple[Any, List[Tensor], Nest]:
        # Persistent, since a backward pass that overflows runs again.
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(inputs)
            return tape, inputs, run(function, inputs)

    def scaled(*sources: Tensor) -> Tuple[List[Tensor], Callable[..., Any]]:
        kept: Optional[Tuple[Any, List[Tensor], Nest]] = None
        with _reads_from_outside(sources, outside) as inputs:
            if again is None:
                kept = recorded(function, inputs)
                results.append(kept[-1])
            else:
                results.append(_unrecorded(lambda each: run(function, each), inputs))

        def backward(*grads: Grad, variables: Optional[List[Variable]] = None) -> Any:
            dense = [tf.convert_to_tensor(grad) for grad in grads]
            forward = kept or recorded(again or function, _after(dense, sources))
            tape, watched, made = forward
            wanted = [*watched, *(variables or [])]

            def gradients(scaled: Grads) -> Grads:
                return list(tape.gradient(made.tensors, wanted, scaled))

            found = unscaled_gradients(gradients, dense, headroom)
            # Here TensorFlow takes sparse gradients only for variables.
            count = len(sources)
            own = [g if g is None else tf.convert_to_tensor(g) for g in found[:count]]
            return (own, found[count:]) if variables else own

        return results[0].tensors, backward

    outputs = tf.custom_gradient(scaled)(*given.tensors)
    return results[0].with_tensors(_refused_gradients(outside, outputs))


def _unrecorded(run: Callable[[Sequence[Tensor]], Nest], tensors: List[Tensor]) -> Nest:
    """Returns `run(tensors)`, and lets no tape keep intermediate values."""
    found: List[Nest] = []

    def noted(*tensors: Tensor) -> List[Tensor]:
        found.append(run(tensors))
        return found[0].tensors

    if mode.current().knows_values:
        # Nothing else that is public stops all tapes. Its gradient is not used.
        tf.recompute_grad(noted)(*tensors)
    else:  # a graph keeps only values that are used again
        noted(*tensors)
    return found[0]


def _after(grads: Grads, tensors: Sequence[Tensor]) -> List[Tensor]:
    """Returns copies that depend on `grads`, as `tf.recompute_grad` does.

    Otherwise a compiler would see that both passes compute the same, and would keep the
    values of the first.
    """
    if mode.current().knows_values or not grads:
        return list(map(tf.identity, tensors))
    first = tf.reduce_max(tf.reshape(tf.math.real(grads[0]), [-1])[:1])
    flag = tf.cast(first, tf.bool)
    # This is always 0, but no compiler can see that.
    zero = tf.where(tf.equal(flag, flag), 0.0, float("nan"))
    return [tensor + tf.cast(zero, tensor.dtype) for tensor in tensors]


@contextmanager
def _reads_from_outside(
    tensors: Sequence[Tensor], found: List[Tensor]
) -> Iterator[List[Tensor]]:
    """Yields copies of `tensors`, one for each place that a tensor may be in.

    Appends to `found` the other tensors that are read within and were made before, if
    their dtype has gradients. Variables are not among them: they are read within.
    """
    graph = current_graph()
    if graph is None:
        listener = _OutsideReads(found)
        copies = list(map(tf.identity, tensors))
        op_callbacks.add(listener)
        yield copies
        listener.is_done = True
        return
    copies = list(map(tf.identity, tensors))
    start = len(graph.get_operations())
    yield copies
    new = graph.get_operations()[start:]
    made = {id(each) for each in [*new, *(copy.op for copy in copies)]}
    read = {id(tensor): tensor for each in new for tensor in each.inputs}
    # The graph has a placeholder, or a constant, for each tensor that it captured.
    captured = {id(inner) for _, inner in getattr(graph, "captures", ())}
    for key, tensor in read.items():
        is_outside = id(tensor.op) not in made or key in captured
        if is_outside and _has_gradient(tensor):
            found.append(tensor)


class _OutsideReads:
    """Adds to a list the older tensors that one thread's eager operations read."""

    def __init__(self, found: List[Tensor]) -> None:
        self.found = found
        self.is_done = False
        self._thread = threading.get_ident()
        # TensorFlow numbers tensors in the order in which they are made.
        self._first = op_callbacks.key_of(tf.constant(0.0))

    def note_op(self, kind: str, inputs: Tensors, outputs: Tensors) -> bool:
        """Notes an operation: an `op_callbacks.OpListener`."""
        del kind, outputs
        if not self.is_done and threading.get_ident() == self._thread:
            for each in inputs:
                if op_callbacks.key_of(each) < self._first and _has_gradient(each):
                    self.found.append(each)
        return not self.is_done


def _refused_gradients(outside: List[Tensor], outputs: List[Tensor]) -> List[Tensor]:
    """Returns `outputs`, whose gradients by tensors from outside are an error.

    Raises:
      ValueError: A tape records what is computed from a tensor from outside.
    """

    def error(tensor: Tensor) -> ValueError:
        return ValueError(
            "`layer` must read tensors with a gradient from the arguments of its call, "
            f"got one of shape {tensor.shape} from elsewhere. Pass it to the block as "
            "an argument."
        )

    def refused(tensor: Tensor) -> Tensor:
        def refuse(_: Grad) -> Any:
            raise error(tensor)

        return tf.custom_gradient(lambda given: (tf.identity(given), refuse))(tensor)

    unknown = []
    for tensor in outside:
        origin = tensor
        while (outer := captured_by(origin)) is not None:  # perhaps by several graphs
            origin = outer
        if is_recorded(origin):
            raise error(tensor)
        # Eager mode's other tensors are constants, and so are a graph's constants. Of
        # any other `tf.gradients` may ask for the gradient, or the function, the loop
        # or the branch that is traced here may.
        if graph_of(origin) is not None and origin.op.type != "Const":
            unknown.append(tensor)
    if not unknown:
        return outputs
    tied = tf.identity_n([*outputs, *map(refused, unknown)])
    return list(tied[: len(outputs)])
