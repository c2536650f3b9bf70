"""Experiments with single operations: what they return at S and at 2 S.

`recipes.json` holds inputs for each operation of `tf.raw_ops` for which a search found
some: of floating numbers the shape, of all others the values.
"""

from __future__ import annotations

import inspect
import itertools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from recipes import BY_HAND

from lossscale.runtime.op_types import AMBIGUOUS, kind_of
from lossscale.units.operations import results
from lossscale.units.unit import FREE, KEPT, ZERO, Operands, Unit

RECIPES = {
    **json.loads((Path(__file__).parent / "recipes.json").read_text()),
    **BY_HAND,
}
SCALED = Unit(1.0, 1.0, frozenset(["a reading"]))
#: What an input can be. None: a number.
UNITS = {"number": None, "free": FREE, "zero": ZERO, "kept": KEPT, "scaled": SCALED}
#: Loss scales at which a result is looked at.
SCALES = [1.0, 2.0, 1024.0]
#: A ratio is right up to this: linear algebra rounds.
TOLERANCE = 5e-3


class Input(NamedTuple):
    """An input of an operation.

    Attributes:
      dtype: Its dtype.
      made_of: The shape of floating numbers, or the values of all others.
      count: How many there are of it, if it is a list. 0: it is none.
    """

    dtype: tf.DType
    made_of: list
    count: int

    @property
    def is_floating(self):
        return self.dtype.is_floating or self.dtype.is_complex

    def arrays(self, position, signed):
        """Returns its values."""
        if not self.is_floating:
            return [np.asarray(self.made_of)] * max(self.count, 1)
        return [
            _numbers(self.dtype, self.made_of, 97 * position + i, signed)
            for i in range(max(self.count, 1))
        ]


def _numbers(dtype, shape, seed, signed):
    """Returns numbers around 1, the same each time."""
    random = np.random.RandomState(100 + seed)
    values = random.uniform(0.3, 1.5, shape)
    if signed:
        values = values * np.where(random.rand(*shape) < 0.5, -1.0, 1.0)
    if dtype.is_complex:
        values = values + 1j * random.uniform(0.3, 1.0, shape)
    return np.asarray(values).astype(dtype.as_numpy_dtype)


class Operation:
    """An operation, and inputs that it takes."""

    def __init__(self, kind):
        recipe = RECIPES[kind]
        self.kind = kind
        self.inputs = [
            Input(tf.as_dtype(dtype), made_of, count)
            for dtype, made_of, count in recipe["inputs"]
        ]
        self.attrs = recipe["attrs"]
        self.floating = [i for i, x in enumerate(self.inputs) if x.is_floating]

    def run(self, arrays):
        """Returns the results as arrays, None of one that is none."""
        function = getattr(tf.raw_ops, self.kind)
        names = list(inspect.signature(function).parameters)
        given = {}
        for name, each, values in zip(names, self.inputs, arrays):
            tensors = [tf.constant(value, each.dtype) for value in values]
            given[name] = tensors if each.count else tensors[0]
        flat = tf.nest.flatten(function(**given, **self.attrs))
        return [_array(each) for each in flat]

    def runs(self):
        """Tells whether this TensorFlow takes the inputs."""
        try:
            first, second = (self.run(self._arrays(signed=False)) for _ in "12")
            return bool(first) and all(map(_are_equal, first, second))
        except Exception:
            return False

    def _arrays(self, signed):
        return [x.arrays(i, signed) for i, x in enumerate(self.inputs)]

    def assignments(self):
        """Yields what its floating inputs can be: all, or any two beside numbers."""
        names = list(UNITS)
        count = len(self.floating)
        if count <= 3:
            yield from itertools.product(names, repeat=count)
            return
        for one, two in itertools.combinations(range(count), 2):
            for pair in itertools.product(names, repeat=2):
                for rest in ("number", "scaled"):
                    found = [rest] * count
                    found[one], found[two] = pair
                    yield tuple(found)

    def units(self, assignment):
        """Returns the units of the results, given what the floating inputs are."""
        arrays, units = [], []
        assigned = dict(zip(self.floating, assignment))
        for position, values in enumerate(self._arrays(signed=True)):
            name = assigned.get(position, "number")
            units += [UNITS[name]] * len(values)
            arrays += values if name == "number" else [None] * len(values)
        widths = [
            x.made_of[-1] if x.is_floating and x.made_of else None
            for x in self.inputs
            for _ in range(max(x.count, 1))
        ]
        operands = Operands(lambda i: arrays[i], lambda i: widths[i])
        found = self.run(self._arrays(signed=False))
        kind = self.kind
        if kind in AMBIGUOUS:
            kind = kind_of(kind, tf.as_dtype(found[0].dtype), "")
        return results(kind, units, operands, len(found))

    def at(self, scale, assignment, signed, kept_is_scaled):
        """Returns the results at a loss scale."""
        arrays = self._arrays(signed)
        for position, name in zip(self.floating, assignment):
            factor = {"zero": 0.0, "scaled": scale}.get(name, 1.0)
            if name == "kept" and kept_is_scaled:
                factor = scale
            arrays[position] = [
                (each * each.dtype.type(factor)) for each in arrays[position]
            ]
        with np.errstate(all="ignore"):
            return self.run(arrays)

    def wrong(self, assignment):
        """Returns what is sure of a result, and not so. Empty: nothing is."""
        units = self.units(assignment)
        interpretations = [False]
        if "kept" in assignment and "scaled" in assignment:
            interpretations.append(True)  # what a variable held has no say
        found = [
            self._wrong(units, assignment, kept_is_scaled)
            for kept_is_scaled in interpretations
        ]
        return "" if not all(found) else found[0]

    def _wrong(self, units, assignment, kept_is_scaled):
        for signed in (False, True):
            before = self.at(SCALES[0], assignment, signed, kept_is_scaled)
            for scale in SCALES[1:]:
                after = self.at(scale, assignment, signed, kept_is_scaled)
                for number, (unit, one, two) in enumerate(zip(units, before, after)):
                    if one is not None and not _holds(unit, one, two, scale):
                        return f"{self.kind}:{number} of {assignment} is {unit}"
        return ""


def _array(tensor):
    is_array = isinstance(tensor, tf.Tensor) and tensor.dtype.is_numpy_compatible
    return tensor.numpy() if is_array else None


def _are_equal(one, two):
    if one is None or two is None:
        return one is two
    is_number = one.dtype.kind in "fc"
    return bool(np.array_equal(one, two, equal_nan=is_number))


def _holds(unit, one, two, scale):
    """Tells whether what is sure of a result is so, at 1 and at another loss scale."""
    if unit is not None and unit.is_zero:
        return not np.any(np.isfinite(one) & (one != 0) | np.isfinite(two) & (two != 0))
    if unit is not None and not unit.is_sure:
        return True
    exponent = 0.0 if unit is None else unit.low
    if one.shape != two.shape:
        return False
    if one.dtype.kind not in "fcV":
        return exponent == 0.0 and _are_equal(one, two)
    kind = np.complex128 if one.dtype.kind == "c" else np.float64
    one, two = one.astype(kind), two.astype(kind)
    finite = np.isfinite(one) & np.isfinite(two)
    expected = one * scale**exponent
    largest = np.max(np.abs(expected[finite]), initial=0.0)
    return bool(
        np.allclose(two[finite], expected[finite], rtol=TOLERANCE, atol=1e-5 * largest)
    )
