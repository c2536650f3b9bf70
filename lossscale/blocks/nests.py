"""Any nest of arguments and results, and which of its tensors have gradients."""

from __future__ import annotations

from typing import Any, Callable, List

import tensorflow as tf

#: Keras keeps a tensor's mask here (seen on 2.4 to 2.21, Keras 3.3 to 3.15).
_MASK = "_keras_mask"


class Nest:
    """A nest, split into the tensors that have gradients and everything else.

    Attributes:
      tensors: The tensors of a floating or complex dtype, including those within ragged
        and sparse tensors.
    """

    def __init__(self, nest: Any) -> None:
        nest = tf.nest.map_structure(_as_tensor, nest)
        self._nest = nest
        self._leaves: List[Any] = tf.nest.flatten(nest, expand_composites=True)
        self._places = [i for i, leaf in enumerate(self._leaves) if has_gradient(leaf)]
        self.tensors = [self._leaves[place] for place in self._places]

    def with_tensors(self, tensors: List[Any]) -> Any:
        """Returns the nest with other tensors in their places, and the same masks."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors):
            leaves[place] = tensor
        found = tf.nest.pack_sequence_as(self._nest, leaves, expand_composites=True)
        tf.nest.map_structure(_keep_mask, self._nest, found)
        return found

    def map_tensors(self, function: Callable[[Any], Any]) -> Nest:
        """Returns the nest with `function` applied to each of these tensors."""
        return Nest(self.with_tensors([function(each) for each in self.tensors]))


def _as_tensor(leaf: Any) -> Any:
    # tf.nest would replace a variable by its handle.
    return tf.convert_to_tensor(leaf) if isinstance(leaf, tf.Variable) else leaf


def has_gradient(leaf: Any) -> bool:
    """Tells whether a leaf is a tensor of a floating or complex dtype."""
    # A tensor of this graph, of an outer graph or of eager mode, but no array.
    if not tf.is_tensor(leaf):
        return False
    return bool(leaf.dtype.is_floating or leaf.dtype.is_complex)


def _keep_mask(old: Any, new: Any) -> None:
    mask = getattr(old, _MASK, None)
    if mask is not None and new is not old:
        setattr(new, _MASK, mask)
