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
from lossscale.units.operations import results
from lossscale.units.sources import Input
from lossscale.units.unit import FREE, KEPT, ZERO, Operands, Unit
from recipes import BY_HAND

from lossscale.runtime.op_types import AMBIGUOUS, kind_of

RECIPES = {
    **json.loads((Path(__file__).parent / "recipes.json").read_text()),
    **BY_HAND,
}
SCALED = Unit(1.0, 1.0, frozenset([Input(0, is_read=True)]))
#: What an input can be. None: a number.
UNITS = {"number": None, "free": FREE, "zero": ZERO, "kept": KEPT, "scaled": SCALED}
#: Loss scales at which a result is looked at.
SCALES = [1.0, 2.0, 1024.0]
#: Exponents that a result may have.
POWERS = (-1.0, 0.0, 0.5, 1.0, 2.0, 3.0)
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
        """Yields what its floating inputs can be, where something is to be seen.

        Of more than two, any two of them are something, and the others alike.
        """
        count = len(self.floating)
        if count <= 2:
            found = itertools.product(UNITS, repeat=count)
        else:
            found = dict.fromkeys(self._pairs(count))
        return (each for each in found if {"scaled", "zero"} & set(each))

    @staticmethod
    def _pairs(count):
        yield ("scaled",) * count
        for one, two in itertools.combinations(range(count), 2):
            for pair in itertools.product(UNITS, repeat=2):
                found = ["number"] * count
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

    def at(self, scale, assignment, signed):
        """Returns the results at a loss scale."""
        arrays = self._arrays(signed)
        for position, name in zip(self.floating, assignment):
            factor = {"zero": 0.0, "scaled": scale}.get(name, 1.0)
            arrays[position] = [x * x.dtype.type(factor) for x in arrays[position]]
        with np.errstate(all="ignore"):
            return self.run(arrays)

    def wrong(self, assignment):
        """Returns what is sure of a result, and not so. Empty: nothing is."""
        units = self.units(assignment)
        if all(unit is not None and unit.low < unit.high for unit in units):
            return ""
        interpretations = [assignment]
        if {"kept", "scaled"} <= set(assignment):
            interpretations = _interpretations(assignment)
        try:
            found = [self._wrong(units, each) for each in interpretations]
        except tf.errors.InvalidArgumentError:
            return ""  # a matrix of zeros has no inverse
        return found[0] if all(found) else ""

    def _wrong(self, units, assignment):
        for signed in (True, False):
            before = self.at(SCALES[0], assignment, signed)
            for scale in SCALES[1:]:
                after = self.at(scale, assignment, signed)
                for number, (unit, one, two) in enumerate(zip(units, before, after)):
                    if one is not None and not _holds(unit, one, two, scale):
                        return f"{self.kind}:{number} of {assignment} is {unit}"
        return ""

    def is_careful(self):
        """Tells whether a result has an exponent that its rule is not sure of."""
        alone = [
            tuple("scaled" if i == one else "number" for i in range(len(self.floating)))
            for one in range(len(self.floating))
        ]
        together = ("scaled",) * len(self.floating)
        try:
            return any(map(self._is_careful, dict.fromkeys([together, *alone])))
        except tf.errors.InvalidArgumentError:
            return False  # some inputs must be positive

    def _is_careful(self, assignment):
        found = [False] * len(self.units(assignment))
        for number, unit in enumerate(self.units(assignment)):
            if unit is not None and not unit.is_sure:
                found[number] = any(
                    self._has_power(assignment, number, power) for power in POWERS
                )
        return any(found)

    def _has_power(self, assignment, number, power):
        claim = FREE._replace(low=power, high=power)
        for signed in (True, False):
            one = self.at(SCALES[0], assignment, signed)[number]
            for scale in SCALES[1:]:
                two = self.at(scale, assignment, signed)[number]
                if one is None or not np.any(one) or not _holds(claim, one, two, scale):
                    return False
        return True


def _interpretations(assignment):
    """Yields what may have been held: it has no say, so anything that fits."""
    choices = [("free", "scaled") if x == "kept" else (x,) for x in assignment]
    return itertools.product(*choices)


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
