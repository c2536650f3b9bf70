"""What every loss scale has from LossScale itself."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import tensorflow as tf
from driving import state
from every_loss_scale import CASES
from models import compiled

from lossscale import DynamicLossScale, FixedLossScale, HeadroomLossScale

INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["fixed", "fixed-skip", "headroom"])
def make(request):
    """Ways to take the arguments: none, the flag, the flag and the largest."""
    return CASES[request.param]


def test_a_loss_scale_is_no_tensor_of_another_dtype():
    with pytest.raises((TypeError, ValueError)):
        tf.convert_to_tensor(FixedLossScale(8), tf.int32)


FLAGS = {
    "bool": bool,
    "numpy": np.bool_,
    "array": np.array,
    "array1": lambda flag: np.array([flag]),
    "tensor": tf.constant,
    "tensor1": lambda flag: tf.constant([flag]),
    "tensor2": lambda flag: tf.constant([[flag]]),
    "variable": lambda flag: tf.Variable(flag, trainable=False),
}


class TestAdjustChecksFirst:
    """What it cannot take is an error by name, and nothing has changed."""

    @pytest.mark.parametrize("kind", FLAGS)
    def test_flags(self, make, kind):
        by_bool, by_kind = make(), make()
        for flag in (True, False, False, True):
            expected = by_bool.adjust(flag, 1.0)[1]
            assert bool(by_kind.adjust(FLAGS[kind](flag), 1.0)[1]) == bool(expected)
            assert state(by_kind) == state(by_bool)

    @pytest.mark.parametrize("mode", ["graph", "xla"])
    def test_a_flag_of_shape_1_in_a_graph(self, mode):
        loss_scale = DynamicLossScale(8.0)
        step = compiled(lambda flag: loss_scale.adjust(flag)[1], mode)
        assert step(tf.constant([False])).shape == ()
        assert float(loss_scale) == 4.0

    @pytest.mark.parametrize(
        ("value", "error"),
        [
            (None, TypeError),
            (1, TypeError),
            (0.0, TypeError),
            ("x", TypeError),
            (np.float64("nan"), TypeError),
            (np.array("x"), TypeError),
            ({}, TypeError),
            (tf.constant(1), TypeError),
            (tf.constant([True, False]), ValueError),
            (np.zeros([0], bool), ValueError),
        ],
        ids=str,
    )
    def test_what_is_no_flag(self, make, value, error):
        loss_scale = make()
        before = state(loss_scale)
        with pytest.raises(error, match=r"`is_finite` must be a bool, .*, got"):
            loss_scale.adjust(value, 1.0)
        assert state(loss_scale) == before

    @pytest.mark.parametrize("value", [NAN, INF, -INF, -1.0, -1, np.array([-1.0])])
    def test_what_is_no_magnitude(self, value):
        loss_scale = CASES["headroom"]()
        before = state(loss_scale)
        with pytest.raises(ValueError, match="`largest` must be a finite number from"):
            loss_scale.adjust(True, value)
        assert state(loss_scale) == before
        assert not bool(loss_scale.adjust(False, value)[1])  # then any will do

    @pytest.mark.parametrize("value", [None, "x", True, 1j, {}, [1.0, 2.0]], ids=str)
    def test_what_is_no_number(self, value):
        loss_scale = HeadroomLossScale()
        before = state(loss_scale)
        words = "the greatest magnitude" if value is None else "a number"
        with pytest.raises((TypeError, ValueError), match=f"`largest` must be {words}"):
            loss_scale.adjust(True, value)
        assert state(loss_scale) == before

    @pytest.mark.parametrize("mode", ["graph", "xla"])
    def test_in_a_graph_a_bad_magnitude_is_a_bad_step(self, mode):
        by_flag, by_size = CASES["headroom"](), CASES["headroom"]()
        step = compiled(lambda size: by_size.adjust(tf.constant(True), size)[1], mode)
        for value in (NAN, -1.0, INF, -INF):
            assert not bool(step(tf.constant(value)))
            by_flag.adjust(False, 1.0)
            assert state(by_size) == state(by_flag)
        assert bool(step(tf.constant(1.0)))

    @pytest.mark.parametrize(
        "value", [3, np.float16(3), np.array([3.0]), 1e300, 2**83, 0]
    )
    def test_magnitudes_of_any_make(self, value):
        loss_scale = HeadroomLossScale()
        loss_scale.adjust(True, value)
        assert loss_scale.peak.numpy() == min(float(np.max(value)), tf.float32.max)

    @pytest.mark.parametrize("value", [None, "x", ["x"], [len]], ids=str)
    def test_what_are_no_gradients(self, make, value):
        loss_scale = make()
        before = state(loss_scale)
        with pytest.raises(TypeError, match=r"`grads` must be a nest of .*, got"):
            loss_scale.update(value)
        assert state(loss_scale) == before


class Replacing(DynamicLossScale):
    """A user's: it has variables of its own, one in the place of another."""

    def __init__(self):
        super().__init__(64.0)
        self.good_steps = self._add_weight("my_good_steps", 3, tf.int64)
        self.bad_steps = None
        self.mine = self._add_weight("mine", 1.0, tf.float32)


class TestAnAttributeThatIsAVariable:
    """A number in its place would be a second value, which no step reads."""

    def test_a_users_subclass(self):
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
