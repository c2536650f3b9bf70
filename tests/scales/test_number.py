"""A loss scale where a number is expected: Keras 2's is a tensor, Keras 3's a float."""

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
UNARY = [operator.neg, operator.pos, operator.abs]
OTHERS = {
    "int": lambda: 2,
    "float": lambda: 8.0,
    "numpy": lambda: np.float32(3.0),
    "array": lambda: np.array([1.0, 8.0], np.float32),
    "tensor": lambda: tf.constant(8.0),
    "variable": lambda: tf.constant([2.0, 16.0]),
}
FUNCTIONS = [
    tf.math.log,
    lambda scale: tf.cast(scale, tf.float64),
    lambda scale: tf.maximum(1.0, scale),
    lambda scale: tf.where(True, scale, 1.0),
    lambda scale: tf.add_n([scale, tf.constant(1.0)]),
    lambda scale: tf.stack([scale, tf.constant(1.0)]),
    lambda scale: tf.clip_by_value(100.0, 0.0, scale),
]
#: What Python and NumPy read of a loss scale of 8.
READ = [
    (float, 8.0),
    (int, 8),
    (round, 8),
    (lambda scale: round(scale, 1), 8.0),
    (math.trunc, 8),
    (lambda scale: scale.numpy(), np.float32(8)),
    (math.log2, 3.0),
    (complex, 8 + 0j),
]


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


def eagerly_and_in_a_graph(function):
    yield function()
    yield tf.function(function, autograph=False)()


@pytest.mark.parametrize("other", OTHERS)
def test_its_operators_are_a_tensors_and_tell_that_the_scale_was_read(noted, other):
    (scale, notes), there = noted, OTHERS[other]()

    def results():
        pairs = [(f(scale, there), f(there, scale)) for f in EXACT + COMPARED]
        flat = [*sum(pairs, ()), *(f(scale) for f in UNARY)]
        return [tf.convert_to_tensor(each) for each in flat]

    eight, array = np.float32(8), np.asarray(there)
    pairs = [(f(eight, array), f(array, eight)) for f in EXACT + COMPARED]
    expected = [*sum(pairs, ()), *(f(eight) for f in UNARY)]
    for found in eagerly_and_in_a_graph(results):
        for one, value in zip(found, expected):
            np.testing.assert_array_equal(one, value)
        # To compare is not to scale, but a tensor on the left converts what comes.
        compared = len(COMPARED) * (other in ("tensor", "variable"))
        assert len(notes.read) == 2 * len(EXACT) + len(UNARY) + compared
        notes.read.clear()
    assert notes.numbers == 0


def test_tensorflows_functions_take_it_for_a_tensor(noted):
    loss_scale, notes = noted
    for function in FUNCTIONS:
        expected = function(tf.constant(8.0))
        np.testing.assert_array_equal(function(loss_scale), expected)
        notes.read.clear()
        numbers = notes.numbers
        graph = tf.function(lambda f=function: f(loss_scale), autograph=False)
        np.testing.assert_array_equal(graph(), expected)
        assert notes.read
        assert notes.numbers == numbers
    for family in families():
        if hasattr(family.keras, "ops"):
            assert float(family.keras.ops.multiply(loss_scale, 2.0)) == 16


def test_a_graph_follows_it(mirrored):
    loss_scale = DynamicLossScale(8.0, increment_period=1)
    inverse = tf.function(lambda: 1 / loss_scale)
    assert float(inverse()) == 0.125
    loss_scale.adjust(True)
    assert float(inverse()) == 0.0625

    @tf.function
    def grow(handed):  # the object, not a tensor of it
        handed.adjust(True)
        return handed * 2

    assert [float(grow(loss_scale)) for _ in range(2)] == [64, 128]
    with mirrored.scope():
        loss_scale = DynamicLossScale(8.0)
    assert (float(loss_scale), int(loss_scale), np.asarray(loss_scale)) == (8.0, 8, 8)
    doubled = mirrored.run(tf.function(lambda: loss_scale * 2))
    assert set(map(float, mirrored.experimental_local_results(doubled))) == {16.0}


@pytest.mark.parametrize(("read", "expected"), READ)
def test_a_number_is_read_eagerly_and_in_no_graph(noted, read, expected):
    loss_scale, notes = noted
    found = read(loss_scale)
    assert (type(found), found) == (type(expected), expected)
    with pytest.raises((TypeError, AttributeError), match="Tensor"):
        tf.function(lambda: read(loss_scale), autograph=False)()
    assert notes.numbers == 1
    assert float(FixedLossScale(8.0)) == 8  # nobody is told, and nothing is missing


def test_numpys_functions_take_it_for_an_array(noted):
    loss_scale, notes = noted
    array = np.asarray(loss_scale)
    assert (array.dtype, array.shape, float(array)) == (np.float32, (), 8)
    assert np.asarray(loss_scale, np.float64).dtype == np.float64
    own = np.array(loss_scale)
    own += 1
    assert (float(own), float(loss_scale)) == (9, 8)
    assert np.log2(loss_scale) == 3
    assert np.isfinite(loss_scale)
    assert np.maximum(loss_scale, 16) == 16
    np.testing.assert_allclose(loss_scale, 8.0)
    assert notes.numbers > 6
    assert not notes.read


def test_who_shows_or_compares_it_has_not_read_it(noted):
    loss_scale, notes = noted
    assert f"{loss_scale:.0f}{loss_scale:>6.1f}" == "8   8.0"
    assert f"{loss_scale}" == str(loss_scale) == repr(loss_scale)
    assert loss_scale == 8.0
    assert loss_scale < 1e9
    assert loss_scale
    assert not loss_scale.has_been_read
    assert (notes.numbers, notes.read) == (0, [])
    with pytest.raises(TypeError):
        tf.function(lambda: f"{loss_scale:.0f}", autograph=False)()
    assert tf.function(lambda: tf.constant(bool(loss_scale)), autograph=False)()
    assert float(loss_scale * 2.0) == 16
    assert loss_scale.has_been_read
    assert loss_scale == pytest.approx(8.0)
    assert loss_scale != pytest.approx(9.0)
    assert float(loss_scale / FixedLossScale(2.0)) == 4


def test_two_are_equal_if_they_are_the_same_object():
    one, other = DynamicLossScale(8.0), DynamicLossScale(8.0)
    assert (one == one) is True  # noqa: PLR0124
    for thing in (other, None, "dynamic", "8", [8.0], True, object()):
        assert (one == thing) is False
        assert (one != thing) is True
    assert {one: 1, other: 2, 8.0: 3}[one] == 1
    assert len({one, other, one}) == 2
    assert [other, one].index(one) == 1
    keyed = tf.function(lambda: tf.constant({one: 1}[one]), autograph=False)
    assert keyed() == 1
    weak = weakref.WeakKeyDictionary({one: 1, other: 2})
    assert weak[other] == 2
    del thing, other
    assert len(weak) == 1


def test_it_is_tracked_as_an_object(tmp_path):
    class Holder(tf.Module):
        def __init__(self, loss_scale):
            super().__init__()
            self.loss_scale = loss_scale
            self.listed = [loss_scale, DynamicLossScale(2.0)]
            self.named = {"a": loss_scale}

    holder = Holder(DynamicLossScale(8.0))
    assert (len(holder.submodules), len(holder.variables)) == (2, 12)
    assert holder.listed[0] is holder.named["a"] is holder.loss_scale
    path = tf.train.Checkpoint(holder=holder).save(str(tmp_path / "saved"))
    fresh = Holder(DynamicLossScale(16.0))
    tf.train.Checkpoint(holder=fresh).restore(path).assert_consumed()
    assert (float(fresh.loss_scale), float(fresh.listed[1])) == (8, 2)
