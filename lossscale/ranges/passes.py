"""Two forward passes of a batch: in float32, and in float16 with float32's values."""

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
    """Which row a tensor is counted in."""

    path: str
    number: int
    is_input: bool

    @property
    def name(self) -> str:
        """The row's name: the layer's path, which call of it, and what of it."""
        which = f" (call {self.number})" if self.number > 1 else ""
        return f"{self.path}{which}{', inputs' if self.is_input else ''}"


class Float32Pass:
    """Counts what each call returns, and is given anew: a `Watcher`.

    A tensor that several layers return, or hand on, counts once, for the first.
    """

    def __init__(self) -> None:
        #: By row: counts of shape `[BINS]`, the largest finite magnitude.
        self.rows: Dict[Key, Tuple[Any, float]] = {}
        #: Every call that has returned, in this order.
        self.calls: List[Call] = []
        #: The ids of calls that are given, or return, what float16 does not hold.
        self.overflowing: Set[int] = set()
        self._numbers: Dict[Any, int] = {}
        self._keys: Dict[int, Tuple[str, int]] = {}
        # With the tensor itself: ids of what is gone are used again.
        self._seen: Dict[int, Tuple[Any, bool]] = {}

    def begin(self, call: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Takes note of a call that begins."""
        call.inputs = floats_in((args, kwargs))
        if call.parent is not None:
            self._keys[id(call)] = (call.path, self._number_of(call))
            self._look(call, call.inputs, is_input=True)
        return args, kwargs

    def end(self, call: Call, outputs: Any) -> Any:
        """Takes note of what a call returned."""
        call.outputs = floats_in(outputs)
        self.calls.append(call)
        if call.parent is not None:
            self._look(call, call.outputs, is_input=False)
        return outputs

    def _number_of(self, call: Call) -> int:
        """Returns which call of its layer this is, from 1 on. In a loop it is 1."""
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
            # Handed on by a layer around the one that made it, it is not its doing.
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
    """Tells whether float16 does not hold what is meant to be held."""
    values = values.astype(np.float32).ravel()
    bad = values[~(np.abs(values) < exponents.INFINITE_FROM)]  # NaN, too
    if not len(bad):
        return False
    # One negative number for all that is not to be seen, -1e9 or -inf, beside others.
    low, high = bad.min(), bad.max()
    is_one = low == high or low > high * 1.001
    is_mask = high < 0 and is_one and len(bad) < len(values)
    return not is_mask


class Float16Pass:
    """Gives each layer what it has in float32, and sees what float16 makes of it.

    A `Watcher`. What a layer returned in the first pass it returns again, as large as
    its dtype allows: one that overflows spoils no other.
    """

    def __init__(self, first: Float32Pass, origins: Origins) -> None:
        self._first, self._origins = first, origins
        self._place: Dict[int, int] = {}
        self._next, self._in_step = 0, True

    def begin(self, call: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Takes note of a call that begins."""
        self._origins.enter(call, floats_in((args, kwargs)))
        return args, kwargs

    def end(self, call: Call, outputs: Any) -> Any:
        """Returns what the same call returned in float32."""
        place, self._next = self._next, self._next + 1
        calls = self._first.calls
        same = place < len(calls) and calls[place].layer is call.layer
        # Who calls its layers in another order from one pass to the next is left alone.
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
    """Returns a nest with other values in the place of its floats, in its dtypes."""
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
