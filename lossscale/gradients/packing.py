"""Packs small gradients into few tensors, so that a step starts few kernels."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import tensorflow as tf

from lossscale.runtime import mode
from lossscale.runtime.aliases import Grad, Grads, PerGradient, Tensor
from lossscale.runtime.graphs import current_graph, graph_of

#: Gradients with more elements are not packed: a copy takes longer than the kernels
#: that it saves (`benchmarks/packing.py`).
SMALL = 4096


def pack(grads: Grads) -> Tuple[List[Any], List[List[int]]]:
    """Stacks small gradients of equal shape and dtype.

    Only small dense floating-point tensors of known shape are stacked. All others stay
    as they are, and under XLA all gradients do.

    Returns:
      packed: A list of gradients, not longer than `grads`.
      groups: For each of them, the positions in `grads` of the gradients within it.
    """
    groups = _groups(grads)
    packed = [
        tf.stack([grads[i] for i in group]) if len(group) > 1 else grads[group[0]]
        for group in groups
    ]
    return packed, groups


def add_up(grads: Grads) -> List[Any]:
    """Adds up the small gradients that `pack` would stack, and keeps the others."""
    return [tf.add_n([grads[i] for i in group]) for group in _groups(grads)]


def unpack(packed: Grads, groups: List[List[int]]) -> List[Any]:
    """Splits packed gradients, all changed in the same way, into the original list."""
    if len(packed) == sum(map(len, groups)):
        return packed
    found: Dict[int, Any] = {}
    for group, value in zip(groups, packed):
        is_packed = len(group) > 1
        parts = tf.unstack(value, len(group)) if is_packed else [in_this_graph(value)]
        found.update(zip(group, parts))
    return [found[i] for i in range(len(found))]


def in_order(of_groups: List[Tensor], groups: List[List[int]]) -> PerGradient:
    """Returns the numbers of all groups in the order of the gradients."""
    numbers = tf.concat(of_groups or [tf.zeros([0])], 0)
    listed = [position for group in groups for position in group]
    if listed == sorted(listed):
        return numbers
    return tf.gather(numbers, sorted(range(len(listed)), key=listed.__getitem__))


def groups_of_one(count: int) -> List[List[int]]:
    """Returns the groups of gradients that are not packed."""
    return [[position] for position in range(count)]


def is_small(tensor: Tensor) -> bool:
    """Tells whether a tensor is known to have at most `SMALL` elements."""
    size = tensor.shape.num_elements()
    return size is not None and size <= SMALL


def as_they_are(grads: Grads) -> List[Any]:
    """Returns gradients as they are now. Reads variables, which may change later."""
    kept = (tf.Tensor, tf.IndexedSlices, type(None))
    return [g if isinstance(g, kept) else tf.convert_to_tensor(g) for g in grads]


def in_this_graph(grad: Grad) -> Any:
    """Returns a gradient as a tensor of the current graph: Keras 3 wants one graph."""
    if graph_of(grad) is current_graph():
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(
            in_this_graph(grad.values), grad.indices, grad.dense_shape
        )
    return tf.identity(grad) if isinstance(grad, tf.Tensor) else grad


def _groups(grads: Grads) -> List[List[int]]:
    """Returns groups of positions. The gradients of a group are packed into one."""
    groups: Dict[Any, List[int]] = {}
    packs = not mode.current().by_xla  # which makes one program of them anyway
    for position, grad in enumerate(grads):
        key: Any = position
        is_dense = isinstance(grad, tf.Tensor) and grad.dtype.is_floating
        if packs and is_dense and is_small(grad):
            # In a model that is spread over devices, each gradient stays on its own.
            key = (grad.dtype, tuple(grad.shape.as_list()), grad.device)
        groups.setdefault(key, []).append(position)
    return list(groups.values())
