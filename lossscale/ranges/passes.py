"""Two forward passes: in float32, and in float16 with the inputs from float32."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Set, Tuple

import numpy as np
import tensorflow as tf

from lossscale.ranges import exponents
from lossscale.ranges.float32_model import SIXTEEN_BITS
from lossscale.ranges.layer_calls import Call, floats_in
from lossscale.ranges.origins import Origins
from lossscale.runtime import kerases


class Key(NamedTuple):
    """The row in which a tensor is counted."""

    path: str
    number: int
    is_input: bool

    @property
    def name(self) -> str:
        """The row's name: the layer's path, the number of the call, inputs or not."""
        which = f" (call {self.number})" if self.number > 1 else ""
        return f"{self.path}{which}{', inputs' if self.is_input else ''}"


class Float32Pass:
    """A `Watcher` that counts the outputs of each call, and inputs not counted before.

    A tensor that several layers return or pass on counts only once, for the first.
    """

    def __init__(self) -> None:
        #: By row: counts of shape `[BINS]`, and the largest finite magnitude.
        self.rows: Dict[Key, Tuple[Any, float]] = {}
        #: Calls in the order in which they returned.
        self.calls: List[Call] = []
        #: The ids of calls whose inputs or outputs overflow in float16.
        self.overflowing: Set[int] = set()
        self._numbers: Dict[Any, int] = {}
        self._keys: Dict[int, Tuple[str, int]] = {}
        # The tensor is kept, too, since Python reuses the ids of deleted objects.
        self._seen: Dict[int, Tuple[Any, bool]] = {}

    def begin(self, call: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Notes a call that begins."""
        call.inputs = floats_in((args, kwargs))
        if call.parent is not None:
            self._keys[id(call)] = (call.path, self._number_of(call))
            self._look(call, call.inputs, is_input=True)
        return args, kwargs

    def end(self, call: Call, outputs: Any) -> Any:
        """Notes the outputs of a call that returns."""
        call.outputs = floats_in(outputs)
        self.calls.append(call)
        if call.parent is not None:
            self._look(call, call.outputs, is_input=False)
        return outputs

    def _number_of(self, call: Call) -> int:
        """Returns the number of a call of its layer, from 1 on; always 1 in a loop."""
        above = call.parent
        while above is not None:
            if hasattr(above.layer, "cell"):  # a recurrent layer's loop over time
                return 1
            above = above.parent
        key = (call.path, id(call.layer))
        self._numbers[key] = self._numbers.get(key, 0) + 1
        return self._numbers[key]

    def _look(self, call: Call, tensors: List[Any], is_input: bool) -> None:
        for tensor in tensors:
            is_new = id(tensor) not in self._seen
            if is_new:
                self._count(Key(*self._keys[id(call)], is_input), tensor)
            # A layer that only passes the tensor on is not at fault.
            overflows = self._seen[id(tensor)][1]
            is_cast = is_input and kerases.casts_inputs(call.layer)
            if overflows and ((is_new and not is_input) or is_cast):
                self.overflowing.add(id(call))

    def _count(self, key: Key, tensor: Any) -> None:
        found, most = exponents.count(tensor)
        counts, largest = found.numpy().astype(np.int64), float(most.numpy())
        self._seen[id(tensor)] = (tensor, _overflows(tensor.numpy()))
        before, largest_before = self.rows.get(key, (0, 0.0))
        self.rows[key] = (before + counts, max(largest, largest_before))


def _overflows(values: Any) -> bool:
    """Tells whether values overflow in float16. The values of a mask do not count."""
    values = values.astype(np.float32).ravel()
    bad = values[~(np.abs(values) < exponents.INFINITE_FROM)]  # NaN, too
    if not len(bad):
        return False
    # A mask has one negative number, -1e9 or -inf, for all hidden places, and others.
    low, high = bad.min(), bad.max()
    is_one = low == high or low > high * 1.001
    is_mask = high < 0 and is_one and len(bad) < len(values)
    return not is_mask


class Float16Pass:
    """A `Watcher` that runs each layer in float16 on its inputs from the float32 pass.

    It replaces each layer's outputs by those of the first pass, clipped to the dtype's
    range, so that a layer that overflows does not spoil the next ones.
    """

    def __init__(self, first: Float32Pass, origins: Origins) -> None:
        self._first, self._origins = first, origins
        self._place: Dict[int, int] = {}
        self._next, self._in_step = 0, True

    def begin(self, call: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Notes a call that begins."""
        self._origins.enter(call, floats_in((args, kwargs)))
        return args, kwargs

    def end(self, call: Call, outputs: Any) -> Any:
        """Returns the outputs of the same call in float32."""
        place, self._next = self._next, self._next + 1
        calls = self._first.calls
        same = place < len(calls) and calls[place].layer is call.layer
        # If the second pass calls layers in another order, replace nothing from there.
        self._in_step = self._in_step and same
        if not self._in_step:
            return outputs
        self._place[id(call)] = place
        call.outputs = floats_in(outputs)
        return _replaced(outputs, calls[place].outputs)

    def overflowed_inside(self) -> List[Call]:
        """Returns the first pass's calls that overflow in float16, in their order."""
        places = {
            self._place[id(origin.call)]
            for origin in self._origins.found.values()
            if origin.is_overflow and id(origin.call) in self._place
        }
        return [self._first.calls[place] for place in sorted(places)]


def _replaced(outputs: Any, others: List[Any]) -> Any:
    """Returns a nest whose floats are replaced by others, cast to its own dtypes."""
    flat, left = tf.nest.flatten(outputs), list(others)
    if len(floats_in(outputs)) != len(left):
        return outputs
    for at, tensor in enumerate(flat):
        if floats_in(tensor):
            other = left.pop(0)
            if other.shape == tensor.shape:
                flat[at] = _bounded(other, tensor.dtype)
    return tf.nest.pack_sequence_as(outputs, flat)


def _bounded(tensor: Any, dtype: Any) -> Any:
    if dtype.name in SIXTEEN_BITS:
        tensor = tf.clip_by_value(tensor, -exponents.LARGEST, exponents.LARGEST)
        tensor = tf.where(tf.math.is_finite(tensor), tensor, tf.zeros_like(tensor))
    return tf.cast(tensor, dtype)
