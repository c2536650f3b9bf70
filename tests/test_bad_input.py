"""What bad input gets: a message with the argument, what came and the fix, at once."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from installed import families
from limits import skip_without
from models import delegating

import lossscale
from lossscale import (
    DynamicLossScale,
    ExponentialUpdateLossScaleManager,
    FixedLossScale,
    FixedLossScaleManager,
    HeadroomLossScale,
    LossScaleOptimizer,
    SpikeGuard,
)

NOT_NUMBERS = ["8", None, True, np.True_, [8], (), {}, 1j, Ellipsis, np.ones([2])]
NOT_NUMBERS += [np.timedelta64(8, "s"), np.timedelta64(8, "ns"), Decimal(8)]
NOT_SCALES = [0, -1, 0.0, -0.0, np.nan, np.inf, -np.inf, 1e39, 1e-40, 10**400]
NOT_COUNTS = [0, -5, 1.5, np.nan, np.inf, 2**63, 0.5, Fraction(10**400), -np.inf]
NOT_GROWTHS = [1, 0.5, 0, -2, np.nan, np.inf, 1 + 1e-12, 1e39]
NOT_BACKOFFS = [1, 2, 0, -0.5, np.nan, np.inf, 1 - 1e-12, 1e-60]


@contextmanager
def refusal(error, *said):
    """Asserts that this raises an error that says so, before any variable is made."""
    spied = mock.patch.object(lossscale.LossScale, "_add_weight")
    with spied as add_weight, pytest.raises(error) as caught:
        yield caught
    assert not add_weight.called
    for each in said:
        assert each in str(caught.value)


def refuses(error, name, value, call):
    """Asserts that `call` refuses a value, naming the argument and what came."""
    with refusal(error, f"`{name}`") as caught:
        call(value)
    message = str(caught.value)
    assert f"got {name}={value!r}" in message or f"got {value!r}" in message


def with_argument(cls, name):
    """Returns a function that makes a loss scale with this value of that argument."""
    parameters = inspect.signature(cls).parameters.values()
    needed = {each.name: 8 for each in parameters if each.default is each.empty}
    return lambda value: cls(**{**needed, name: value})


#: What arguments refuse besides `NOT_NUMBERS`, and whose arguments these are.
REFUSED = [
    (NOT_SCALES, FixedLossScale, "loss_scale_value"),
    (NOT_SCALES, FixedLossScaleManager, "loss_scale"),
    (NOT_SCALES, ExponentialUpdateLossScaleManager, "init_loss_scale"),
    (NOT_SCALES, DynamicLossScale, "initial_loss_scale min_loss_scale max_loss_scale"),
    (NOT_SCALES, HeadroomLossScale, "initial_loss_scale min_loss_scale max_loss_scale"),
    (NOT_COUNTS, DynamicLossScale, "increment_period hysteresis search_period"),
    (NOT_COUNTS, DynamicLossScale, "backoff_cooldown"),
    (NOT_COUNTS, ExponentialUpdateLossScaleManager, "incr_every_n_steps"),
    (NOT_COUNTS, ExponentialUpdateLossScaleManager, "decr_every_n_nan_or_inf"),
    (NOT_COUNTS, HeadroomLossScale, "increment_period"),
    (NOT_COUNTS, SpikeGuard, "max_in_a_row"),
    (NOT_GROWTHS, DynamicLossScale, "multiplier"),
    (NOT_GROWTHS, ExponentialUpdateLossScaleManager, "incr_ratio"),
    (NOT_BACKOFFS, DynamicLossScale, "backoff_factor"),
    (NOT_BACKOFFS, ExponentialUpdateLossScaleManager, "decr_ratio"),
    ([1.5, -0.1, np.nan], DynamicLossScale, "overflow_tolerance"),
    ([2.5, -1], HeadroomLossScale, "headroom"),
    ([0], HeadroomLossScale, "half_life"),
    ([0.0], SpikeGuard, "threshold"),
    ([1, 2**17], SpikeGuard, "window"),
    ([1.0], SpikeGuard, "min_ratio"),
]
#: Arguments for which None means something.
OPTIONAL = {"max_loss_scale", "backoff_factor", "search_period", "backoff_cooldown"}
OPTIONAL |= {"overflow_tolerance"}


@pytest.mark.peer_defect(10)
@pytest.mark.parametrize(
    ("cls", "name", "values"),
    [(cls, name, values) for values, cls, names in REFUSED for name in names.split()],
)
def test_what_is_no_number_and_numbers_out_of_range(cls, name, values):
    call = with_argument(cls, name)
    for value in NOT_NUMBERS:
        if not (value is None and name in OPTIONAL):
            refuses(TypeError, name, value, call)
    for value in values:
        refuses(ValueError, name, value, call)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"min_loss_scale": 2**16}, ("min_loss_scale=65536.0", "Raise `initial")),
        ({"initial_loss_scale": 0.25}, ("initial_loss_scale=0.25", "min_loss_scale")),
        ({"max_loss_scale": 8.0}, ("max_loss_scale=8.0", "lower `initial_loss_scale`")),
    ],
)
@pytest.mark.parametrize("cls", [DynamicLossScale, HeadroomLossScale])
def test_bounds_out_of_order(cls, arguments, names):
    with refusal(ValueError, "must be at least", *names):
        cls(**{"initial_loss_scale": 2.0**15, **arguments})


resetting = with_argument(DynamicLossScale, "hysteresis_reset")
skipping = with_argument(FixedLossScale, "skip_nonfinite")
manager_from = with_argument(ExponentialUpdateLossScaleManager, "init_loss_scale")


def among_good(value):
    return DynamicLossScale(hysteresis_reset=("good", value))


def named(name):
    return lossscale.deserialize({"class_name": name, "config": {}})


@pytest.mark.parametrize(
    ("error", "name", "values", "call"),
    [
        (TypeError, "hysteresis_reset", ["good", None, 3, {"good": 1}], resetting),
        (ValueError, "hysteresis_reset", ["bad", None, np.array(["bad"])], among_good),
        (TypeError, "skip_nonfinite", [1, "yes", None, 0.0], skipping),
        (TypeError, "loss_scale", [True, Ellipsis, [8], 1j, b"dynamic"], lossscale.get),
        (ValueError, "loss_scale", ["static"], lossscale.get),
        (ValueError, "loss_scale", [-8, 0], lossscale.get),
        (ValueError, "loss_scale", [0.5], FixedLossScaleManager),  # contrib's: from 1
        (ValueError, "init_loss_scale", [0.5], manager_from),
        (TypeError, "loss_scale", [8], lossscale.serialize),
        (TypeError, "loss_scale", [None], SpikeGuard),
        (ValueError, "loss_scale", ["no"], SpikeGuard),
        (ValueError, "config", ["NoSuchScale", "Dense", "keras>Adam"], named),
    ],
)
def test_other_values_that_are_refused(error, name, values, call):
    for value in values:
        refuses(error, name, value, call)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("increment_period", lambda value: DynamicLossScale(increment_period=value)),
        ("loss_scale", lambda value: lossscale.get([value])),
        ("loss_scale", lossscale.serialize),
        ("loss_scale", lambda value: lossscale.get({"class_name": value})),
        ("name", DynamicLossScale.from_preset),
        ("loss_scale", lambda value: lossscale.simulate(value, limit=[1.0])),
        ("inner_optimizer", LossScaleOptimizer),
    ],
)
def test_numbers_too_long_for_python_to_show(name, call):
    # From some security release on, repr(10**5000) raises a ValueError of its own.
    with refusal((TypeError, ValueError), f"`{name}"):
        call(10**5000)


@pytest.mark.parametrize("config", [{}, {"class_name": 3}, {"config": {}}], ids=repr)
def test_configs_that_are_none(config):
    refuses(TypeError, "config", config, lossscale.deserialize)
    # Who handed it as a loss scale is told of that argument.
    refuses(TypeError, "loss_scale", config, lossscale.get)
    refuses(TypeError, "loss_scale", config, lossscale.SpikeGuard)


@pytest.mark.parametrize(
    "given", [8, [], "8", {}, {"value": 8}, {3: 8}, {"loss_scale_value": 8, "x": 1}]
)
def test_configs_of_other_arguments(given):
    config = {"class_name": "FixedLossScale", "config": given}
    for name, call in (
        ("config", lossscale.deserialize),
        ("loss_scale", lossscale.get),
    ):
        with refusal(TypeError, f'`{name}["config"]` must', f"got {given!r}"):
            call(config)


class TestInnerOptimizer:
    """Each is refused by name, and the optimizer that came is as it was."""

    @pytest.mark.peer_defect(9)
    @pytest.mark.parametrize("value", [None, "adam", 3, Ellipsis, tf.Module], ids=str)
    def test_no_keras_optimizer(self, value):
        refuses(TypeError, "inner_optimizer", value, LossScaleOptimizer)

    @pytest.mark.peer_defect(9)
    def test_a_wrapper_also_within_delegating_optimizers(self, family):
        for cls in (
            LossScaleOptimizer,
            family.keras.mixed_precision.LossScaleOptimizer,
        ):
            optimizer = cls(family.optimizers.SGD(0.1))
            for _ in range(3):
                with refusal(TypeError, "`inner_optimizer` must not be or wrap", "got"):
                    LossScaleOptimizer(optimizer)
                optimizer = delegating(family, optimizer)

    @pytest.mark.peer_defect(9)
    def test_wrapped_already(self, family):
        inner = family.optimizers.SGD(0.1)
        LossScaleOptimizer(inner)
        with refusal(
            ValueError, "class SGD that another LossScaleOptimizer already wraps"
        ):
            LossScaleOptimizer(inner)

    @pytest.mark.parametrize("value", [None, "static", -8, np.nan, [8.0]], ids=repr)
    def test_a_bad_loss_scale_leaves_it_free(self, family, value):
        inner = family.optimizers.SGD(0.1)
        with refusal((TypeError, ValueError), "`loss_scale"):
            LossScaleOptimizer(inner, value)
        assert LossScaleOptimizer(inner, 8).inner_optimizer is inner

    def test_a_slash_in_the_name(self, family):
        inner = family.optimizers.SGD(0.1)
        if family.name == "keras3":  # it takes no such name for anything
            with refusal(ValueError, "`name`", "got 'a/b'"):
                LossScaleOptimizer(inner, 8, "a/b")
        else:
            assert LossScaleOptimizer(inner, 8, "a/b").name == "a/b"

    def test_its_own_loss_scale(self, family):
        skip_without("loss_scale_factor", family)
        inner = family.optimizers.SGD(0.1, loss_scale_factor=64.0)
        with refusal(ValueError, "Pass loss_scale=64.0"):
            LossScaleOptimizer(inner)
        assert inner.loss_scale_factor == 64.0

    def test_of_another_keras(self, family):
        wrapper = type(LossScaleOptimizer(family.optimizers.SGD(0.1)))
        for other in families():
            if other.name != family.name:
                with refusal(TypeError, "must belong to the Keras of"):
                    wrapper(other.optimizers.SGD(0.1))


#: Calls with a name that is nearly right, and the right one.
MISSPELLED = {
    "dynamic": lambda: lossscale.get("dynam"),
    "torch": lambda: DynamicLossScale.from_preset("trch"),
    "DynamicLossScale": lambda: lossscale.DynamicLosScale,
    "SpikeGuard": lambda: lossscale.deserialize({"class_name": "SpikeGard"}),
    "raise": lambda: lossscale.LossScaleMonitor(on_stall="rais"),
    "patience": lambda: lossscale.LossScaleMonitor(pacience=3),
    "skip": lambda: lossscale.LossScaleEngine(nonfinite_loss="skp"),
}


@pytest.mark.parametrize("name", MISSPELLED)
def test_a_misspelled_name_gets_the_nearest_right_one(name):
    errors = (AttributeError, TypeError, ValueError)
    with pytest.raises(errors, match=f"Did you mean '{name}'") as caught:
        MISSPELLED[name]()
    assert len(str(caught.value)) < 250


def test_errors_name_a_loss_scale_by_its_class():
    unchecked, sgd = FixedLossScale(8), families()[0].optimizers.SGD()
    calls = [
        lambda: SpikeGuard(SpikeGuard()),
        lambda: lossscale.LossScaleEngine(unchecked, nonfinite_loss="skip"),
        lambda: lossscale.LossScaleEngine(unchecked, communication_dtype="float16"),
        lambda: LossScaleOptimizer(sgd, unchecked, dynamic=True),
        lambda: LossScaleOptimizer(unchecked),
        lambda: setattr(LossScaleOptimizer(sgd), "loss_scale", unchecked),
        lambda: DynamicLossScale(unchecked),
    ]
    for call in calls:
        with pytest.raises((AttributeError, TypeError, ValueError)) as caught:
            call()
        message = str(caught.value)
        assert "skipped_steps=" not in message
        assert message.count("FixedLossScale") + message.count("SpikeGuard") >= 1
