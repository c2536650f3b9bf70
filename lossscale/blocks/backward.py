"""A call whose gradients are computed at a scale of their own."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.blocks.attempts import unscaled_gradients
from lossscale.blocks.nests import Nest
from lossscale.blocks.outside import Outside
from lossscale.gradients.scaling import widened
from lossscale.runtime import mode


class Forward(NamedTuple):
    """What a forward pass leaves to the backward pass.

    Attributes:
      tape: It recorded the pass.
      inputs: The tensors that have gradients, those from outside last.
      results: A nest, its floating tensors in `float32` or wider.
    """

    tape: Any
    inputs: List[Any]
    results: Nest

    def gradients(self, variables: List[Any], grads: List[Any]) -> List[Any]:
        """Returns the gradients of inputs and variables, given those of results."""
        sources = [*self.inputs, *variables]
        return list(self.tape.gradient(self.results.tensors, sources, grads))


class Call(NamedTuple):
    """A call of a function.

    Attributes:
      function: Any. It may read variables, change some, and draw random numbers.
      given: The nest of its arguments: a tuple, and a dictionary by name.
      outside: What else it can read.
    """

    function: Callable[..., Any]
    given: Nest
    outside: Outside

    def results(self, tensors: List[Any]) -> Nest:
        """Calls it, with these tensors in their places."""
        args, kwargs = self.given.with_tensors(tensors)
        with self.outside.noting_reads(tensors):
            found = self.function(*args, **kwargs)
        return Nest(found).map_tensors(widened)

    def forward(self, tensors: List[Any]) -> Forward:
        """Calls it, and keeps what the backward pass needs."""
        # Persistent: what overflows is tried again.
        with tf.GradientTape(persistent=True) as tape:
            # Each for itself: one tensor may stand in two places.
            inputs = [tf.identity(tensor) for tensor in tensors]
            # Later than those are made: an attribute may hold an argument.
            sources = [*inputs, *self.outside.tensors]
            tape.watch(sources)
            results = self.results(inputs)
        return Forward(tape, sources, results)


def call(
    function: Callable[..., Any],
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
    headroom: int,
    outside: Outside,
    *,
    again: Optional[Callable[..., Any]] = None,
) -> Any:
    """Returns `function(*args, **kwargs)`, floating results in `float32` or wider.

    On the way back the gradients of the results are multiplied by a power of two that
    fits them into float16; those of arguments and variables are divided by it again, in
    `float32`.

    Args:
      function: Called once.
      args: A nest of anything.
      kwargs: The same.
      headroom: How many doublings below float16's largest number the largest gradient
        of the results is.
      outside: What else `function` can read. It has its gradients, too.
      again: Called in the backward pass, to do the same again. None: what `function`
        computed is kept for it.
    """
    first = Call(function, Nest((args, kwargs)), outside)
    count = len(first.given.tensors)
    results: List[Nest] = []
    tapes: List[Any] = [None]

    def scaled(*sources: Any) -> Any:
        tensors = sources[:count]
        if again is None:
            kept = first.forward(list(tensors))
            results.append(kept.results)
            tapes.append(kept.tape)
            return kept.results.tensors, _backward(lambda _: kept, headroom)
        results.append(_unrecorded(first, list(tensors)))
        second = Call(again, first.given, outside)
        return results[0].tensors, _backward(
            lambda grads: second.forward(_after(grads, tensors)), headroom
        )

    sources = [*first.given.tensors, *map(tf.identity, outside.tensors)]
    outputs = tf.custom_gradient(scaled)(*sources)
    # Here, since tapes that are stopped meanwhile do not tell what they record.
    outside.check_reads(tapes[-1])
    return results[0].with_tensors(outputs)


def _backward(forward: Callable[[List[Any]], Forward], headroom: int) -> Any:
    """Returns what `tf.custom_gradient` asks for, given the way to the forward pass."""

    def backward(*grads: Any, variables: Optional[List[Any]] = None) -> Any:
        dense = [tf.convert_to_tensor(grad) for grad in grads]
        passed = forward(dense)
        found = unscaled_gradients(
            lambda scaled: passed.gradients(variables or [], scaled), dense, headroom
        )
        count = len(passed.inputs)
        # TensorFlow takes sparse gradients of variables alone here.
        of_inputs = [g if g is None else tf.convert_to_tensor(g) for g in found[:count]]
        return (of_inputs, found[count:]) if variables else of_inputs

    return backward


def _unrecorded(call: Call, tensors: List[Any]) -> Nest:
    """Calls it, and lets no tape keep what it computes."""
    if not mode.current().knows_values:  # what nothing uses again is not kept
        return call.results(tensors)
    found: List[Nest] = []

    def run(*tensors: Any) -> Any:
        found.append(call.results(list(tensors)))
        return found[0].tensors

    # It stops all tapes, which nothing else public does. Its gradient is not used.
    tf.recompute_grad(run)(*tensors)
    return found[0]


def _after(grads: List[Any], tensors: Any) -> List[Any]:
    """Returns `tensors`, seemingly dependent on `grads`: computed anew from there.

    Else a compiler sees that the same is computed twice, and keeps it from the first
    time. As in `tf.recompute_grad`, whose way this is.
    """
    if mode.current().knows_values or not grads:
        return list(tensors)
    first = tf.reduce_max(tf.reshape(tf.math.real(grads[0]), [-1])[:1])
    flag = tf.cast(first, tf.bool)
    # Always 0, which no compiler sees.
    zero = tf.where(tf.equal(flag, flag), 0.0, float("nan"))
    return [tensor + tf.cast(zero, tensor.dtype) for tensor in tensors]
