"""A loss scale where a number is expected: Keras 2's is a tensor, Keras 3's a float."""

from __future__ import annotations

import math
import operator
import weakref

import numpy as np
import pytest
import tensorflow as tf
from installed import families

from lossscale import DynamicLossScale, FixedLossScale

EXACT = [operator.add, operator.sub, operator.mul, operator.truediv, operator.mod]
EXACT += [operator.floordiv, operator.pow]
COMPARED = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt]
COMPARED += [operator.ge]
TENSORS = {"tensor", "variable"}
UNARY = [operator.neg, operator.pos, operator.abs]
OTHERS = {
    "int": lambda: 2,
    "float": lambda: 8.0,
    "numpy": lambda: np.float32(3.0),
    "array": lambda: np.array([1.0, 8.0], np.float32),
    "tensor": lambda: tf.constant(8.0),
    "variable": lambda: tf.constant([2.0, 16.0]),
}
FUNCTIONS = {
    "log": tf.math.log,
    "cast": lambda scale: tf.cast(scale, tf.float64),
    "maximum": lambda scale: tf.maximum(1.0, scale),
    "where": lambda scale: tf.where(True, scale, 1.0),
    "add_n": lambda scale: tf.add_n([scale, tf.constant(1.0)]),
    "stack": lambda scale: tf.stack([scale, tf.constant(1.0)]),
    "clip": lambda scale: tf.clip_by_value(100.0, 0.0, scale),
}

READ = {
    "float": (float, 8.0),
    "int": (int, 8),
    "round": (round, 8),
    "round to digits": (lambda scale: round(scale, 1), 8.0),
    "trunc": (math.trunc, 8),
    "numpy": (lambda scale: scale.numpy(), np.float32(8)),
    "math": (math.log2, 3.0),
    "complex": (complex, 8 + 0j),
}


class Notes:
    """What an optimizer's group is told of readings."""

    def __init__(self):
        self.read, self.numbers = [], 0

    def note_read(self, tensor):
        self.read.append(tensor)

    def note_float(self):
        self.numbers += 1


@pytest.fixture
def noted():
    """A dynamic loss scale of 8, and what it has told of its readings."""
    loss_scale = DynamicLossScale(8.0)
    loss_scale._observer = Notes()
    return loss_scale, loss_scale._observer


def equal(found, expected):
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def in_a_graph(function):
    return tf.function(function, autograph=False)()


class TestOperators:
    """They are a tensor's, and a tensor of the loss scale is what was read."""

    @pytest.mark.parametrize("run", [lambda function: function(), in_a_graph])
    @pytest.mark.parametrize("other", OTHERS)
    def test_of_two(self, noted, other, run):
        loss_scale, notes = noted
        there = OTHERS[other]()
        for operate in EXACT + COMPARED:
            notes.read.clear()
            right = run(lambda f=operate: tf.convert_to_tensor(f(loss_scale, there)))
            left = run(lambda f=operate: tf.convert_to_tensor(f(there, loss_scale)))
            equal(right, operate(np.float32(8), np.asarray(there)))
            equal(left, operate(np.asarray(there), np.float32(8)))
            # A tensor on the left converts it, whatever it computes.
            reads = int(other in TENSORS) if operate in COMPARED else 2
            assert len(notes.read) == reads, operate
        assert notes.numbers == 0

    @pytest.mark.parametrize("run", [lambda function: function(), in_a_graph])
    def test_of_one(self, noted, run):
        loss_scale, notes = noted
        for operate in UNARY:
            equal(run(lambda f=operate: f(loss_scale)), operate(np.float32(8)))
        assert len(notes.read) == len(UNARY)

    def test_to_compare_is_not_to_scale(self, noted):
        # Who has only looked at it is still told that the loss was never scaled.
        loss_scale, notes = noted
        assert loss_scale == 8.0
        assert loss_scale < 1e9
        assert not loss_scale.has_been_read
        assert not notes.read
        assert float(loss_scale * 2.0) == 16
        assert loss_scale.has_been_read

    def test_follow_the_loss_scale_in_a_graph(self):
        loss_scale = DynamicLossScale(8.0, increment_period=1)
        inverse = tf.function(lambda: 1 / loss_scale)
        assert float(inverse()) == 0.125
        loss_scale.adjust(True)
        assert float(inverse()) == 0.0625

    def test_with_other_objects(self):
        assert float(DynamicLossScale(8.0) / FixedLossScale(2.0)) == 4
        assert DynamicLossScale(8.0) == pytest.approx(8.0)
        assert DynamicLossScale(8.0) != pytest.approx(9.0)


class TestFunctions:
    """TensorFlow's functions take it for a tensor, NumPy's for an array."""

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_of_tensorflow(self, noted, name):
        loss_scale, notes = noted
        expected = FUNCTIONS[name](tf.constant(8.0))
        equal(FUNCTIONS[name](loss_scale), expected)
        before = len(notes.read)
        numbers = notes.numbers
        equal(in_a_graph(lambda: FUNCTIONS[name](loss_scale)), expected)
        assert len(notes.read) > before
        assert notes.numbers == numbers

    def test_of_keras(self):
        for family in families():
            if hasattr(family.keras, "ops"):
                found = family.keras.ops.multiply(DynamicLossScale(8.0), 2.0)
                assert float(found) == 16

    def test_of_numpy(self, noted):
        loss_scale, notes = noted
        array = np.asarray(loss_scale)
        assert (array.dtype, array.shape, float(array)) == (np.float32, (), 8)
        assert np.asarray(loss_scale, np.float64).dtype == np.float64
        own = np.array(loss_scale)
        own += 1
        assert float(own) == 9
        assert float(loss_scale) == 8
        assert np.log2(loss_scale) == 3
        assert np.isfinite(loss_scale)
        assert np.maximum(loss_scale, 16) == 16
        np.testing.assert_allclose(loss_scale, 8.0)
        assert notes.numbers > 6
        assert not notes.read

    def test_a_function_that_is_handed_one_gets_the_object(self):
        loss_scale = DynamicLossScale(8.0, increment_period=1)

        @tf.function
        def grow(handed):
            handed.adjust(True)
            return handed * 2

        assert [float(grow(loss_scale)) for _ in range(2)] == [32, 64]


class TestNumbers:
    """Each tells that a number was read, but for what is only shown."""

    @pytest.mark.parametrize("name", READ)
    def test_are_read(self, noted, name):
        loss_scale, notes = noted
        read, expected = READ[name]
        found = read(loss_scale)
        assert (type(found), found) == (type(expected), expected)
        assert notes.numbers == 1
        FixedLossScale(8.0).__float__()  # nobody is told, and nothing is missing

    @pytest.mark.parametrize("name", READ)
    def test_are_in_no_graph(self, noted, name):
        loss_scale, notes = noted
        read, _ = READ[name]
        with pytest.raises((TypeError, AttributeError), match="Tensor"):
            in_a_graph(lambda: read(loss_scale))
        assert notes.numbers == 0

    def test_are_shown(self, noted):
        loss_scale, notes = noted
        assert f"{loss_scale:.0f}" == "8"
        assert f"{loss_scale:>6.1f}" == "   8.0"
        assert f"{loss_scale}" == str(loss_scale) == repr(loss_scale)
        assert notes.numbers == 0
        with pytest.raises(TypeError):
            in_a_graph(lambda: f"{loss_scale:.0f}")

    def test_a_loss_scale_is_always_true(self):
        loss_scale = DynamicLossScale(8.0)
        assert loss_scale
        assert in_a_graph(lambda: tf.constant(bool(loss_scale)))

    def test_on_two_replicas(self, mirrored):
        with mirrored.scope():
            loss_scale = DynamicLossScale(8.0)
        assert (float(loss_scale), int(loss_scale)) == (8.0, 8)
        assert float(np.asarray(loss_scale)) == 8
        doubled = mirrored.run(tf.function(lambda: loss_scale * 2))
        assert set(map(float, mirrored.experimental_local_results(doubled))) == {16.0}


class TestObjects:
    """To dictionaries and to what tracks objects, a loss scale is what it was."""

    def test_are_equal_if_they_are_the_same(self):
        one, other = DynamicLossScale(8.0), DynamicLossScale(8.0)
        assert (one == one) is True  # noqa: PLR0124
        assert (one == other) is False
        assert (one != other) is True
        for thing in (None, "dynamic", "8", [8.0], True, object()):
            assert (one == thing) is False
            assert (one != thing) is True

    def test_are_keys(self):
        one, other = DynamicLossScale(8.0), FixedLossScale(8.0)
        assert {one: 1, other: 2, 8.0: 3}[one] == 1
        assert len({one, other, one}) == 2
        assert [other, one].index(one) == 1
        assert in_a_graph(lambda: tf.constant({one: 1}[one])) == 1
        weak = weakref.WeakKeyDictionary({one: 1, other: 2})
        assert weak[other] == 2
        del other
        assert len(weak) == 1

    def test_are_tracked(self, tmp_path):
        class Holder(tf.Module):
            def __init__(self, loss_scale):
                super().__init__()
                self.loss_scale = loss_scale
                self.listed = [loss_scale, DynamicLossScale(2.0)]
                self.named = {"a": loss_scale}

        holder = Holder(DynamicLossScale(8.0))
        assert len(holder.submodules) == 2
        assert len(holder.variables) == 12
        assert holder.listed[0] is holder.named["a"] is holder.loss_scale
        path = tf.train.Checkpoint(holder=holder).save(str(tmp_path / "saved"))
        fresh = Holder(DynamicLossScale(16.0))
        tf.train.Checkpoint(holder=fresh).restore(path).assert_consumed()
        assert fresh.loss_scale == 8
        assert fresh.listed[1] == 2
