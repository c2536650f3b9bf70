"""Gradients at a scale of their own, and again at a smaller one if they overflowed."""

from __future__ import annotations

from typing import Any, Callable, List

import tensorflow as tf

from lossscale.blocks import block_scale
from lossscale.gradients.arithmetic import divide
from lossscale.gradients.check import all_finite, checked
from lossscale.runtime import mode
from lossscale.runtime.autograph import do_not_convert
from lossscale.runtime.control import either
from lossscale.runtime.op_types import as_number

#: The most retries after an overflow, each at a smaller scale.
RETRIES = 3

#: Returns the gradients that leave a block, given those that enter it.
Backward = Callable[[List[Any]], List[Any]]


@do_not_convert
def unscaled_gradients(backward: Backward, grads: List[Any], headroom: int) -> Any:
    """Returns `backward(grads)`, computed at the scale that fits `grads`.

    ```
    scale = the power of two that brings the largest of grads to 65504 / 2**headroom
    found = backward(grads * scale)
    up to three times, while found is not finite although grads are:
      scale = scale / 2**8
      found = backward(grads * scale)
    return found / scale
    ```

    Args:
      backward: A linear function. It returns a list of gradients, some of which may be
        None or `tf.IndexedSlices`. It runs again only if its results are not finite.
      grads: A list of dense gradients of `float32` or wider.
      headroom: How many doublings are left free for the results of `backward`.
    """
    scale = block_scale.of(grads, headroom)
    found = backward(block_scale.multiply(grads, scale))
    if mode.current().knows_values:
        scale, found = _again_eagerly(backward, grads, scale, found)
    else:
        scale, found = _again(backward, grads, scale, found)
    return divide(found, scale)


def _again_eagerly(backward: Backward, grads: Any, scale: Any, found: Any) -> Any:
    for _ in range(RETRIES):
        if all_finite(found) or not all_finite(grads):
            break
        scale = block_scale.lower(scale)
        found = backward(block_scale.multiply(grads, scale))
    return scale, found


def _again(backward: Backward, grads: Any, scale: Any, found: Any) -> Any:
    """The same in a graph: a branch, seldom taken, holds a loop of retries."""
    first = (scale, *_parts(found))
    results = either(
        as_number(checked(found).quick),
        lambda: first,
        lambda: _loop(backward, grads, *first),
    )
    # These gradients have the derivative of the first attempt, since XLA cannot
    # differentiate a loop in a branch. The stop hides weights, which TensorFlow seeks.
    stopped = [tf.stop_gradient(each) for each in results]
    pass_through = tf.custom_gradient(lambda *_: (stopped, lambda *grads: grads))
    scale, *parts = pass_through(*first)
    remaining = iter(tf.nest.pack_sequence_as(_given(found), parts, True))
    return scale, [None if grad is None else next(remaining) for grad in found]


def _loop(backward: Backward, grads: Any, *first: Any) -> Any:
    """Returns the scale and the parts of the last attempt, given those of the first.

    One loop, since each copy of the backward pass takes time to trace and to compile.
    """
    can_be_finite = all_finite(grads)

    def is_to_be_tried(_: Any, *parts: Any) -> Any:
        finite = checked(list(parts)).exact_in_branch()
        return as_number(tf.logical_and(can_be_finite, tf.logical_not(finite)))

    def attempt(scale: Any, *parts: Any) -> Any:
        scale = block_scale.lower(scale)
        again = _parts(backward(block_scale.multiply(grads, scale)))
        for new, old in zip(again, parts):
            new.set_shape(old.shape)
        return (scale, *again)

    return tf.while_loop(is_to_be_tried, attempt, first, maximum_iterations=RETRIES)


def _given(grads: List[Any]) -> List[Any]:
    return [grad for grad in grads if grad is not None]


def _parts(grads: List[Any]) -> List[Any]:
    """Returns the tensors that gradients consist of. Sparse ones have several."""
    return list(tf.nest.flatten(_given(grads), expand_composites=True))
