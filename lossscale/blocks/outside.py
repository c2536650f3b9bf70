"""Tensors that a layer reads from outside: they are no arguments of its call.

After `layer.w = v * 2.0`, `layer.w` is one. A block must know such tensors before it
calls the layer, to compute their gradients. It searches the layers' attributes, and
what their functions close over. A read from elsewhere is found too late: an error.
"""

from __future__ import annotations

import functools
import inspect
import types
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set

import tensorflow as tf

from lossscale.blocks import reads
from lossscale.blocks.nests import has_gradient
from lossscale.runtime import tapes
from lossscale.runtime.aliases import Tensor
from lossscale.runtime.graphs import graph_of, is_building, is_in_reach

#: The type that `tf.function` returns.
_FUNCTION = type(tf.function(lambda: None))
_NESTS = (dict, list, tuple, set)
_COMPOSITES = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)
_CALLED = (types.FunctionType, types.MethodType, functools.partial, _FUNCTION)
#: The types that may hold a tensor. Few attributes do, but each call checks them all.
_SEARCHED = (tf.Tensor, *_NESTS, *_CALLED, *_COMPOSITES)
#: Type -> whether it is one of these, and whether it is a nest.
_kinds: Any = {}
#: How deep to search functions that functions close over.
_DEPTH = 2


class _Place(NamedTuple):
    """An attribute that holds tensors, with its value when the layer is called."""

    attributes: Dict[str, Any]
    name: str
    value: Any

    def swap(self, value: Any) -> Any:
        """Sets the attribute, and returns its old value."""
        # Not with __setattr__, by which Keras would track the value.
        before = self.attributes.get(self.name)
        self.attributes[self.name] = value
        return before


class Outside:
    """The tensors that layers can read from outside, in one call.

    Attributes:
      tensors: The tensors that may have a gradient.
    """

    def __init__(self, layers: List[Any]) -> None:
        self._layers = layers
        self._places: List[_Place] = []
        self._read: Optional[Set[int]] = None
        self._others: List[Tensor] = []
        self._is_known = is_building() or tapes.are_open()
        found: Dict[int, Any] = {}
        for place in _places(layers) if self._is_known else ():
            held = [each for each in _tensors(place.value) if _may_count(each)]
            found.update((id(each), each) for each in held)
            if held and place.name:
                self._places.append(place)
        self.tensors: List[Tensor] = list(found.values())

    @contextmanager
    def noting_reads(self, given: List[Any]) -> Iterator[None]:
        """Notes the tensors that are read within.

        Args:
          given: The tensors that the layer is called with.

        Raises:
          ValueError: The first call read other tensors of `tensors`.
        """
        if not self._is_known:
            yield
            return
        with reads.read_within() as read:
            yield
        names = reads.Names()
        found = {names.of(each): each for each in read() if has_gradient(each)}
        own, arguments = names.of_each(self.tensors), names.of_each(given)
        self._others = [found[name] for name in set(found) - own - arguments]
        self._refuse_changed(own & set(found))

    def check_reads(self, tape: Any = None) -> None:
        """Raises if the call read an unknown tensor that has a gradient.

        Args:
          tape: The tape that recorded the call, None if there is none.

        Raises:
          ValueError: Such a tensor is neither an argument nor in `tensors`.
        """
        others, self._others = self._others, []
        for tensor in others:
            if tapes.record_what_uses(tensor) and not _is_of_variables(tensor, tape):
                raise ValueError(
                    "`layer` must read tensors with a gradient from its arguments or "
                    f"attributes, got one of shape {tensor.shape} from elsewhere. "
                    "Pass it to the block as an argument."
                )

    def _refuse_changed(self, names: Set[int]) -> None:
        if self._read is None:
            self._read = names
        elif names != self._read:
            raise ValueError(
                "`layer` must read the same tensors when its forward pass is computed "
                "again, got others: a tensor that is no attribute of it has changed. "
                "Pass that to the block as an argument."
            )

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Gives the attributes the values of the first call until the context ends."""
        now = [place.swap(place.value) for place in self._places]
        try:
            yield
        finally:
            for place, value in zip(self._places, now):
                place.swap(value)


def _may_count(tensor: Tensor) -> bool:
    """Tells whether a program may ask for a gradient of a tensor."""
    if not has_gradient(tensor):
        return False
    if graph_of(tensor) is None:
        return tapes.record_what_uses(tensor)
    if not is_in_reach(tensor.graph):
        return False  # layers keep tensors of old graphs
    # Without a tape `tf.gradients` may still ask for it.
    return tensor.op.type != "Const" or tapes.record_what_uses(tensor)


def _is_of_variables(tensor: Tensor, tape: Any) -> bool:
    """Tells whether a tensor was read from variables within a call.

    In eager mode no listener learns that an operation reads a variable directly.
    """
    if tape is None or graph_of(tensor) is not None:
        return False
    grads = tape.gradient(tensor, tape.watched_variables())
    return any(grad is not None for grad in grads)


def _places(layers: List[Any]) -> Iterator[_Place]:
    """Yields attributes of layers that may hold tensors, and their `call` methods."""
    for layer in layers:
        attributes = vars(layer)
        for name, value in list(attributes.items()):
            if _may_hold(value):
                yield _Place(attributes, name, value)
        yield _Place({}, "", type(layer).call)


def _may_hold(value: Any) -> bool:
    kind = type(value)
    if kind not in _kinds:
        _kinds[kind] = isinstance(value, _SEARCHED), isinstance(value, _NESTS)
    is_searched, is_nest = _kinds[kind]
    return is_searched and (not is_nest or len(value) > 0)


def _tensors(value: Any) -> Iterator[Any]:
    """Yields the tensors in a nest, and those that functions in it close over."""
    seen: Set[int] = set()
    values = [(value, 0)]
    while values:
        value, depth = values.pop()
        if isinstance(value, tf.Tensor):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            depth += isinstance(value, _CALLED)
            parts = _parts(value) if depth <= _DEPTH else []
            values += [(part, depth) for part in parts if _may_hold(part)]


def _parts(value: Any) -> List[Any]:
    """Returns the items of a nest, or the values that a function closes over."""
    if isinstance(value, _NESTS):
        return list(value.values() if isinstance(value, dict) else value)
    if isinstance(value, _COMPOSITES):
        return list(tf.nest.flatten(value, expand_composites=True))
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        value = value.__func__
    function = value.python_function if isinstance(value, _FUNCTION) else value
    return _closed_over(inspect.unwrap(function))


def _closed_over(function: Any) -> List[Any]:
    if not inspect.isfunction(function):
        return []
    found = [function.__globals__.get(name) for name in function.__code__.co_names]
    found += map(_content, function.__closure__ or ())
    return [*found, function.__defaults__, function.__kwdefaults__]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None
