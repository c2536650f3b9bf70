"""Small gradients packed into few tensors, so that a step starts few kernels."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import tensorflow as tf

from lossscale.runtime import mode
from lossscale.runtime.aliases import Grad, Grads, Tensor

#: Gradients with more elements stay alone: copying them takes longer than the kernels
#: that are saved. Of 1,000 gradients of 32 x 32, packing saves more than half of what
#: loss scaling adds; of 10 or 100 the limit hardly matters (`benchmarks/packing.py`).
SMALL = 4096


def pack(grads: Grads) -> Tuple[List[Any], List[List[int]]]:
    """Stacks small gradients of equal shape and dtype.

    Args:
      grads: A list of gradients. What is not a small dense floating-point tensor of
        known shape stays as it is.

    Returns:
      packed: A list of gradients, at most as long. Under XLA, which compiles all of
        them into one program anyway, `grads` itself.
      groups: For each of them the positions in `grads` of what it is made of.
    """
    groups = _groups(grads)
    if len(groups) == len(grads):
        return grads, groups
    packed = [
        tf.stack([grads[i] for i in group]) if len(group) > 1 else grads[group[0]]
        for group in groups
    ]
    return packed, groups


def add_up(grads: Grads) -> List[Any]:
    """Adds up small gradients where `pack` stacks them. No infinity or NaN gets lost.

    That is one read of them, where stacking writes them again.
    """
    groups = _groups(grads)
    if len(groups) == len(grads):
        return grads
    return [tf.add_n([grads[i] for i in group]) for group in groups]


def unpack(packed: Grads, groups: List[List[int]]) -> List[Any]:
    """Returns the list that was packed, after the same was done to all of it."""
    if len(packed) == sum(map(len, groups)):
        return packed
    found: Dict[int, Any] = {}
    for group, value in zip(groups, packed):
        # Keras 3 wants all gradients from one graph: no captured ones among others.
        many = len(group) > 1
        parts = tf.unstack(value, len(group)) if many else [in_this_graph(value)]
        found.update(zip(group, parts))
    return [found[i] for i in range(len(found))]


def groups_of_one(count: int) -> List[List[int]]:
    """Returns the groups of gradients of which none are packed."""
    return [[position] for position in range(count)]


def is_small(tensor: Tensor) -> bool:
    """Tells whether a tensor is known to have at most `SMALL` elements."""
    size = tensor.shape.num_elements()
    return size is not None and size <= SMALL


def as_they_are(grads: Grads) -> List[Any]:
    """Returns gradients as they are now. A variable may be changed later."""
    kept = (tf.Tensor, tf.IndexedSlices, type(None))
    return [g if isinstance(g, kept) else tf.convert_to_tensor(g) for g in grads]


def in_this_graph(grad: Grad) -> Any:
    """Returns a gradient as a tensor of the graph that is built now, not captured."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(
            in_this_graph(grad.values), grad.indices, grad.dense_shape
        )
    return tf.identity(grad) if isinstance(grad, tf.Tensor) else grad


def _groups(grads: Grads) -> List[List[int]]:
    """Returns the positions of the gradients that become one."""
    groups: Dict[Any, List[int]] = {}
    packs = mode.current().packs_small
    for position, grad in enumerate(grads):
        key = _key(grad) if packs else position
        groups.setdefault(position if key is None else key, []).append(position)
    return list(groups.values())


def _key(grad: Grad) -> Any:
    """Returns what equal gradients have in common, None if this one stays alone."""
    is_dense = isinstance(grad, tf.Tensor) and grad.dtype.is_floating
    if not is_dense or not is_small(grad):
        return None
    # Where a model is spread over devices, each gradient stays on its own.
    return (grad.dtype, tuple(grad.shape), grad.device)
