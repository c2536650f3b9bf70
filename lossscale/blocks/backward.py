"""A call whose gradients are computed at a scale of their own."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.blocks.attempts import unscaled_gradients
from lossscale.blocks.nests import Nest
from lossscale.blocks.outside import Outside
from lossscale.gradients.arithmetic import widened
from lossscale.runtime import mode


class Forward(NamedTuple):
    """The parts of a forward pass that its backward pass needs.

    Attributes:
      tape: The tape that recorded the pass.
      inputs: The tensors that have gradients. Those from outside come last.
      results: A nest. Its floating tensors are in `float32` or wider.
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
      function: Any function. It may read and change variables, and draw random numbers.
      given: The nest of its arguments: a tuple, and a dictionary by name.
      outside: The other tensors that it can read.
    """

    function: Callable[..., Any]
    given: Nest
    outside: Outside

    def results(self, tensors: List[Any]) -> Nest:
        """Calls the function, with these tensors in the places of the given ones."""
        args, kwargs = self.given.with_tensors(tensors)
        with self.outside.noting_reads(tensors):
            found = self.function(*args, **kwargs)
        return Nest(found).map_tensors(widened)

    def forward(self, tensors: List[Any]) -> Forward:
        """Calls the function, and keeps what the backward pass needs."""
        # Persistent, since a backward pass that overflows runs again.
        with tf.GradientTape(persistent=True) as tape:
            # A copy for each place, since one tensor may be in two places.
            inputs = [tf.identity(tensor) for tensor in tensors]
            # Watch after copying: an attribute may hold the tensor of an argument.
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

    The backward pass multiplies the gradients of the results by a power of two that
    fits them into float16. It divides the gradients of arguments and variables by the
    same number, in `float32`.

    Args:
      function: The function. It is called once.
      args: A nest of anything.
      kwargs: A nest of anything.
      headroom: How many doublings below float16's largest number the largest gradient
        of the results shall be.
      outside: The other tensors that `function` can read. They get gradients, too.
      again: The backward pass calls it to compute the forward pass again. None: the
        values that `function` computed are kept for the backward pass.
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
    # Not earlier: tapes were stopped, and did not say what they record.
    outside.check_reads(tapes[-1])
    return results[0].with_tensors(outputs)


def _backward(forward: Callable[[List[Any]], Forward], headroom: int) -> Any:
    """Returns the function that `tf.custom_gradient` wants, given the forward pass."""

    def backward(*grads: Any, variables: Optional[List[Any]] = None) -> Any:
        dense = [tf.convert_to_tensor(grad) for grad in grads]
        passed = forward(dense)
        found = unscaled_gradients(
            lambda scaled: passed.gradients(variables or [], scaled), dense, headroom
        )
        count = len(passed.inputs)
        # Here TensorFlow takes sparse gradients only for variables.
        of_inputs = [g if g is None else tf.convert_to_tensor(g) for g in found[:count]]
        return (of_inputs, found[count:]) if variables else of_inputs

    return backward


def _unrecorded(call: Call, tensors: List[Any]) -> Nest:
    """Makes a call, and lets no tape keep its intermediate values."""
    if not mode.current().knows_values:  # a graph keeps only values that are used again
        return call.results(tensors)
    found: List[Nest] = []

    def run(*tensors: Any) -> Any:
        found.append(call.results(list(tensors)))
        return found[0].tensors

    # Nothing else that is public stops all tapes. Its gradient is not used.
    tf.recompute_grad(run)(*tensors)
    return found[0]


def _after(grads: List[Any], tensors: Any) -> List[Any]:
    """Returns `tensors` with a dependence on `grads`, so that they are computed again.

    Otherwise a compiler would see that both passes compute the same, and would keep the
    values of the first. `tf.recompute_grad` does the same.
    """
    if mode.current().knows_values or not grads:
        return list(tensors)
    first = tf.reduce_max(tf.reshape(tf.math.real(grads[0]), [-1])[:1])
    flag = tf.cast(first, tf.bool)
    # This is always 0, but no compiler can see that.
    zero = tf.where(tf.equal(flag, flag), 0.0, float("nan"))
    return [tensor + tf.cast(zero, tensor.dtype) for tensor in tensors]
