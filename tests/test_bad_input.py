"""What bad input gets: a message with the argument, what came and the fix, at once."""

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
    LossScaleEngine,
    LossScaleMonitor,
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
    needed = {
        each.name: 8
        for each in parameters
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD
    }
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
    (NOT_COUNTS, LossScaleMonitor, "patience every"),
    ([-1], LossScaleMonitor, "verbose"),
]
#: Arguments for which None means something.
OPTIONAL = {"max_loss_scale", "backoff_factor", "search_period", "backoff_cooldown"}
OPTIONAL |= {"overflow_tolerance", "every"}


@pytest.mark.peer_defect(10)
@pytest.mark.parametrize(("values", "cls", "names"), REFUSED)
def test_what_is_no_number_and_numbers_out_of_range(cls, names, values):
    for name in names.split():
        call = with_argument(cls, name)
        for value in NOT_NUMBERS:
            if not (value is None and name in OPTIONAL):
                refuses(TypeError, name, value, call)
        for value in values:
            refuses(ValueError, name, value, call)


def sgd():
    return families()[0].optimizers.SGD()


def among_good(value):
    return DynamicLossScale(hysteresis_reset=("good", value))


def named(name):
    return lossscale.deserialize({"class_name": name, "config": {}})


def fixed(loader):
    """Returns a function that hands a config to `FixedLossScale`, by this loader."""
    return lambda config: loader({"class_name": "FixedLossScale", "config": config})


NOT_OPTIMIZERS = ["adam", 3, [], {}, [None], {1: None}]
CONFIGS = [{}, {"class_name": 3}, {"config": {}}]
OTHER_CONFIGS = [8, [], "8"]
#: Error, the argument that it names, values of it, and whose it is, or what is called
#: with each.
VALUES = [
    (TypeError, "hysteresis_reset", ["good", None, 3, {"good": 1}], DynamicLossScale),
    (ValueError, "hysteresis_reset", ["bad", None, np.array(["bad"])], among_good),
    (TypeError, "skip_nonfinite", [1, "yes", None, 0.0], FixedLossScale),
    (TypeError, "loss_scale", [True, Ellipsis, [8], 1j, b"dynamic"], lossscale.get),
    (ValueError, "loss_scale", ["static", -8, 0], lossscale.get),
    (ValueError, "loss_scale", [0.5], FixedLossScaleManager),  # contrib's: from 1
    (ValueError, "init_loss_scale", [0.5], ExponentialUpdateLossScaleManager),
    (TypeError, "loss_scale", [8], lossscale.serialize),
    (ValueError, "config", ["NoSuchScale", "Dense", "keras>Adam"], named),
    (TypeError, "config", CONFIGS, lossscale.deserialize),
    # Who handed a config as a loss scale is told of that argument.
    (TypeError, "loss_scale", CONFIGS, lossscale.get),
    (TypeError, 'config["config"]', OTHER_CONFIGS, fixed(lossscale.deserialize)),
    (TypeError, 'loss_scale["config"]', OTHER_CONFIGS, fixed(lossscale.get)),
    (TypeError, "guard", [8, "spike", SpikeGuard], LossScaleEngine),
    (ValueError, "nonfinite_loss", ["ignore", None, 1, "Skip"], LossScaleEngine),
    (ValueError, "communication_dtype", ["half", True], LossScaleEngine),
    (TypeError, "optimizers", NOT_OPTIMIZERS, LossScaleMonitor),
    (ValueError, "on_stall", ["die"], LossScaleMonitor),
    (TypeError, "check_underflow", [1], LossScaleMonitor),
]


@pytest.mark.parametrize(("error", "name", "values", "call"), VALUES)
def test_other_values_that_are_refused(error, name, values, call):
    call = with_argument(call, name) if isinstance(call, type) else call
    for value in values:
        refuses(error, name, value, call)


def test_optimizers_of_a_monitor_have_names():
    words = r"`optimizers` must be a lossscale.LossScaleOptimizer, .* dict .* by name"
    with pytest.raises(TypeError, match=words):
        LossScaleMonitor(optimizers={1: LossScaleOptimizer(sgd())})


TOO_LONG = 10**5000  # from some security release on, its repr raises an error, too
UNCHECKED = FixedLossScale(8)
#: Words -> a call that is refused with them.
CALLS = {
    "min_loss_scale=65536.0": lambda: DynamicLossScale(2.0**15, min_loss_scale=2**16),
    "Raise `initial_loss_scale`": lambda: HeadroomLossScale(8, min_loss_scale=16),
    "initial_loss_scale=0.25": lambda: DynamicLossScale(0.25),
    "lower `initial_loss_scale`": lambda: DynamicLossScale(16, max_loss_scale=8.0),
    "max_loss_scale=8.0": lambda: HeadroomLossScale(16, max_loss_scale=8.0),
    # A name that is nearly right gets the right one.
    "Did you mean 'dynamic'": lambda: lossscale.get("dynam"),
    "preset, got 'pytorch'. Did you mean 'torch'": lambda: DynamicLossScale.from_preset(
        "pytorch"
    ),
    "`loss_scale` must be the name of a preset, got ''. The table": lambda: (
        lossscale.get("")
    ),
    "Did you mean 'DynamicLossScale'": lambda: lossscale.DynamicLosScale,
    "Did you mean 'SpikeGuard'": lambda: lossscale.SpikeGard,
    "Did you mean 'raise'": lambda: LossScaleMonitor(on_stall="rais"),
    "Did you mean 'patience'": lambda: LossScaleMonitor(pacience=3),
    "argument 'value'": lambda: fixed(lossscale.get)({"value": 8}),
    "takes no argument 'bogus'": lambda: LossScaleMonitor(bogus=1),
    "Did you mean 'skip'": lambda: LossScaleEngine(nonfinite_loss="skp"),
    # Numbers too long for Python to show.
    "`increment_period": lambda: DynamicLossScale(increment_period=TOO_LONG),
    "`loss_scale` must": lambda: lossscale.get([TOO_LONG]),
    "`loss_scale` must be": lambda: lossscale.serialize(TOO_LONG),
    "`loss_scale": lambda: lossscale.get({"class_name": TOO_LONG}),
    "`name": lambda: DynamicLossScale.from_preset(TOO_LONG),
    "`inner_optimizer": lambda: LossScaleOptimizer(TOO_LONG),
    # An error names a loss scale by its class, without its state.
    "nonfinite_loss='skip', got a FixedLossScale that": lambda: LossScaleEngine(
        UNCHECKED, nonfinite_loss="skip"
    ),
    "'float16', got a FixedLossScale that checks none": lambda: LossScaleEngine(
        UNCHECKED, communication_dtype="float16"
    ),
    "loss_scale=an object of class FixedLossScale": lambda: LossScaleOptimizer(
        sgd(), UNCHECKED, dynamic=True
    ),
    "optimizer, got an object of class FixedLossScale": lambda: LossScaleOptimizer(
        UNCHECKED
    ),
    "FixedLossScale": lambda: DynamicLossScale(UNCHECKED),
}


@pytest.mark.parametrize("words", CALLS)
def test_calls_that_are_refused_with_these_words(words):
    errors = (AttributeError, TypeError, ValueError)
    with refusal(errors, words) as caught:
        CALLS[words]()
    message = str(caught.value)
    assert len(message) < 400
    assert "skipped_steps=" not in message


@pytest.mark.peer_defect(9)
@pytest.mark.parametrize("value", [None, "adam", 3, Ellipsis, tf.Module], ids=str)
def test_what_is_no_keras_optimizer(value):
    refuses(TypeError, "inner_optimizer", value, LossScaleOptimizer)


@pytest.mark.peer_defect(9)
def test_a_wrapper_as_an_inner_optimizer_also_within_delegating_ones(family):
    keras_own = family.keras.mixed_precision.LossScaleOptimizer
    for cls in (LossScaleOptimizer, keras_own):
        optimizer = cls(family.optimizers.SGD(0.1))
        for _ in range(3):
            with refusal(TypeError, "`inner_optimizer` must not be or wrap", "got"):
                LossScaleOptimizer(optimizer)
            optimizer = delegating(family, optimizer)


@pytest.mark.peer_defect(9)
def test_an_inner_optimizer_that_is_wrapped_already(family):
    inner = family.optimizers.SGD(0.1)
    LossScaleOptimizer(inner)
    with refusal(ValueError, "SGD that another LossScaleOptimizer already wraps"):
        LossScaleOptimizer(inner)


@pytest.mark.parametrize("value", [None, "static", -8, np.nan, [8.0]], ids=repr)
def test_a_bad_loss_scale_leaves_the_inner_optimizer_free(family, value):
    inner = family.optimizers.SGD(0.1)
    with refusal((TypeError, ValueError), "`loss_scale"):
        LossScaleOptimizer(inner, value)
    assert LossScaleOptimizer(inner, 8).inner_optimizer is inner


def test_a_slash_in_the_name_of_an_optimizer(family):
    inner = family.optimizers.SGD(0.1)
    if family.name == "keras3":  # it takes no such name for anything
        with refusal(ValueError, "`name`", "got 'a/b'"):
            LossScaleOptimizer(inner, 8, "a/b")
    else:
        assert LossScaleOptimizer(inner, 8, "a/b").name == "a/b"


def test_an_inner_optimizer_with_a_loss_scale_of_its_own(family):
    skip_without("loss_scale_factor", family)
    inner = family.optimizers.SGD(0.1, loss_scale_factor=64.0)
    with refusal(ValueError, "Pass loss_scale=64.0"):
        LossScaleOptimizer(inner)
    assert inner.loss_scale_factor == 64.0


def test_an_inner_optimizer_of_another_keras(family):
    wrapper = type(LossScaleOptimizer(family.optimizers.SGD(0.1)))
    for other in families():
        if other.name != family.name:
            with refusal(TypeError, "must belong to the Keras of"):
                wrapper(other.optimizers.SGD(0.1))
