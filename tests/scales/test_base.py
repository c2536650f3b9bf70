"""What every loss scale has from LossScale itself."""

import copy
import itertools
import warnings

import numpy as np
import pytest
import tensorflow as tf
from driving import state
from every_loss_scale import CASES
from models import compiled

from lossscale import DynamicLossScale, FixedLossScale, HeadroomLossScale

INF, NAN = float("inf"), float("nan")
#: Ways to take the arguments: none, the flag, the flag and the largest.
MAKES = [CASES[name] for name in ("fixed", "fixed-skip", "headroom")]
FLAGS = [
    np.bool_,
    np.array,
    lambda flag: np.array([flag]),
    tf.constant,
    lambda flag: tf.constant([flag]),
    lambda flag: tf.constant([[flag]]),
    lambda flag: tf.Variable(flag, trainable=False),
]


@pytest.mark.parametrize("make", MAKES)
def test_a_flag_may_be_a_bool_an_array_a_tensor_or_a_variable_of_one_element(make):
    for kind in FLAGS:
        by_bool, by_kind = make(), make()
        for flag in (True, False, False, True):
            expected = by_bool.adjust(flag, 1.0)[1]
            assert bool(by_kind.adjust(kind(flag), 1.0)[1]) == bool(expected)
            assert state(by_kind) == state(by_bool)


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_in_a_graph_a_flag_is_made_a_scalar_and_a_bad_magnitude_is_a_bad_step(mode):
    loss_scale = DynamicLossScale(8.0)
    step = compiled(lambda flag: loss_scale.adjust(flag)[1], mode)
    assert step(tf.constant([False])).shape == ()
    assert float(loss_scale) == 4.0
    by_flag, by_size = CASES["headroom"](), CASES["headroom"]()
    step = compiled(lambda size: by_size.adjust(tf.constant(True), size)[1], mode)
    for value in (NAN, -1.0, INF, -INF):
        assert not bool(step(tf.constant(value)))
        by_flag.adjust(False, 1.0)
        assert state(by_size) == state(by_flag)
    assert bool(step(tf.constant(1.0)))


@pytest.mark.parametrize("value", [3, np.float16(3), np.array([3.0]), 1e300, 2**83, 0])
def test_a_magnitude_may_be_any_number(value):
    loss_scale = HeadroomLossScale()
    loss_scale.adjust(True, value)
    assert loss_scale.peak.numpy() == min(float(np.max(value)), tf.float32.max)


NO_FLAG = [None, 1, 0.0, "x", np.float64("nan"), np.array("x"), {}, tf.constant(1)]
NO_SCALAR = [tf.constant([True, False]), np.zeros([0], bool)]
NO_SIZE = [NAN, INF, -INF, -1.0, -1, np.array([-1.0])]
CALLS = {
    "is_finite": lambda loss_scale, value: loss_scale.adjust(value, 1.0),
    "grads": lambda loss_scale, value: loss_scale.update(value),
    "largest": lambda loss_scale, value: loss_scale.adjust(True, value),
}
#: Argument, values of it, the error, and what it says that the argument must be.
REFUSED = [
    ("is_finite", NO_FLAG, TypeError, "a bool, .*, got"),
    ("is_finite", NO_SCALAR, ValueError, "a bool, .*, got"),
    ("grads", [None, "x", ["x"], [len]], TypeError, "a nest of .*, got"),
    ("largest", NO_SIZE, ValueError, "a finite number from"),
    ("largest", [None], TypeError, "the greatest magnitude"),
    ("largest", ["x", True, 1j, {}], TypeError, "a number"),
    ("largest", [[1.0, 2.0]], ValueError, "a number"),
]


@pytest.mark.parametrize(("argument", "values", "error", "words"), REFUSED)
def test_bad_input_is_an_error_and_changes_nothing(argument, values, error, words):
    makes = [HeadroomLossScale] if argument == "largest" else MAKES
    for make, value in itertools.product(makes, values):
        loss_scale = make()
        before = state(loss_scale)
        with pytest.raises(error, match=f"`{argument}` must be {words}"):
            CALLS[argument](loss_scale, value)
        assert state(loss_scale) == before
        if values is NO_SIZE:  # of a bad step any magnitude will do
            assert not bool(loss_scale.adjust(False, value)[1])


def test_a_number_that_replaces_a_users_variable_is_an_error():
    """It would be a second value, which no step reads."""

    class Replacing(DynamicLossScale):
        def __init__(self):
            super().__init__(64.0)
            self.good_steps = self._add_weight("my_good_steps", 3, tf.int64)
            self.bad_steps = None
            self.mine = self._add_weight("mine", 1.0, tf.float32)

    loss_scale = Replacing()
    assert (loss_scale.good_steps.numpy(), loss_scale.bad_steps) == (3, None)
    for module in (loss_scale, copy.deepcopy(loss_scale)):
        with pytest.raises(AttributeError, match=r"Write loss_scale\.mine\.assign"):
            module.mine = 2.0
        module.mine = variable = tf.Variable(2.0)
        assert module.mine is variable
        assert any(each is variable for each in module.variables)
        module.mine = None
        module.mine = 2.0  # which takes no variable's place


def test_a_floor_that_float32_rounds_down_is_reached_in_silence():
    loss_scale = DynamicLossScale(1.3, 1, min_loss_scale=1.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_scale.adjust(False)
        loss_scale.adjust(True)
    assert float(loss_scale) == 2 * np.float32(1.3)


def test_a_loss_scale_is_no_tensor_of_another_dtype():
    with pytest.raises((TypeError, ValueError)):
        tf.convert_to_tensor(FixedLossScale(8), tf.int32)
