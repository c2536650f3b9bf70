"""What bad input gets: a message with the argument, what came and the fix, at once."""

from __future__ import annotations

import itertools
import re
from decimal import Decimal
from fractions import Fraction

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
    LossScaleOptimizer,
)

NOT_NUMBERS = ["8", None, True, np.True_, [8], (), {}, 1j, Ellipsis, np.ones([2])]
NOT_NUMBERS += [np.timedelta64(8, "s"), np.timedelta64(8, "ns"), Decimal(8)]
NOT_SCALES = [0, -1, 0.0, -0.0, np.nan, np.inf, -np.inf, 1e39, 1e-40, 10**400]
NOT_COUNTS = [0, -5, 1.5, np.nan, np.inf, 2**63, 0.5, Fraction(10**400), -np.inf]


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    """Fails the test if bad input made a variable before it was refused."""
    made = []
    add_weight = lossscale.LossScale._add_weight

    def spy(self, *args, **kwargs):
        made.append(args)
        return add_weight(self, *args, **kwargs)

    monkeypatch.setattr(lossscale.LossScale, "_add_weight", spy)
    yield made
    assert made == []


def refuses(error, name, value, call):
    """Asserts that `call` raises, naming the argument and the value that came."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert f"`{name}`" in message
    assert f"got {name}={value!r}" in message or f"got {value!r}" in message


def arguments(cls, name, value):
    needed = {
        FixedLossScale: {"loss_scale_value": 8},
        FixedLossScaleManager: {"loss_scale": 8},
        ExponentialUpdateLossScaleManager: {
            "init_loss_scale": 8,
            "incr_every_n_steps": 2,
        },
    }.get(cls, {})
    return {**needed, name: value}


SCALE_ARGUMENTS = [
    (FixedLossScale, "loss_scale_value"),
    (FixedLossScaleManager, "loss_scale"),
    (ExponentialUpdateLossScaleManager, "init_loss_scale"),
    (DynamicLossScale, "initial_loss_scale"),
    (DynamicLossScale, "min_loss_scale"),
    (DynamicLossScale, "max_loss_scale"),
]
COUNT_ARGUMENTS = [
    (DynamicLossScale, "increment_period"),
    (DynamicLossScale, "hysteresis"),
    (DynamicLossScale, "search_period"),
    (DynamicLossScale, "backoff_cooldown"),
    (ExponentialUpdateLossScaleManager, "incr_every_n_steps"),
    (ExponentialUpdateLossScaleManager, "decr_every_n_nan_or_inf"),
]
GROWTH_ARGUMENTS = [
    (DynamicLossScale, "multiplier"),
    (ExponentialUpdateLossScaleManager, "incr_ratio"),
]
BACKOFF_ARGUMENTS = [
    (DynamicLossScale, "backoff_factor"),
    (ExponentialUpdateLossScaleManager, "decr_ratio"),
]
#: Arguments for which None means something.
OPTIONAL = {"max_loss_scale", "backoff_factor", "search_period", "backoff_cooldown"}


@pytest.mark.peer_defect(10)
@pytest.mark.parametrize(
    ("cls", "name"),
    SCALE_ARGUMENTS + COUNT_ARGUMENTS + GROWTH_ARGUMENTS + BACKOFF_ARGUMENTS,
)
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
def test_what_is_no_number(cls, name, value):
    if value is None and name in OPTIONAL:
        pytest.skip("None means something here")
    refuses(TypeError, name, value, lambda: cls(**arguments(cls, name, value)))


@pytest.mark.peer_defect(10)
@pytest.mark.parametrize(
    ("alike", "values"),
    [
        (SCALE_ARGUMENTS, NOT_SCALES),
        (COUNT_ARGUMENTS, NOT_COUNTS),
        (GROWTH_ARGUMENTS, [1, 0.5, 0, -2, np.nan, np.inf, 1 + 1e-12, 1e39]),
        (BACKOFF_ARGUMENTS, [1, 2, 0, -0.5, np.nan, np.inf, 1 - 1e-12, 1e-60]),
    ],
    ids=["scales", "counts", "growth", "backoff"],
)
def test_numbers_out_of_range(alike, values):
    for (cls, name), value in itertools.product(alike, values):
        given = arguments(cls, name, value)
        refuses(ValueError, name, value, lambda c=cls, g=given: c(**g))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"min_loss_scale": 2**16}, ("min_loss_scale=65536.0", "Raise `initial")),
        ({"initial_loss_scale": 0.25}, ("initial_loss_scale=0.25", "min_loss_scale")),
        ({"max_loss_scale": 8.0}, ("max_loss_scale=8.0", "lower `initial_loss_scale`")),
    ],
)
def test_bounds_out_of_order(arguments, names):
    with pytest.raises(ValueError, match="must be at least") as caught:
        DynamicLossScale(**arguments)
    for name in names:
        assert name in str(caught.value)


def test_contribs_managers_start_at_one_or_more():
    refuses(ValueError, "loss_scale", 0.5, lambda: FixedLossScaleManager(0.5))
    refuses(
        ValueError,
        "init_loss_scale",
        0.5,
        lambda: ExponentialUpdateLossScaleManager(0.5, 2),
    )


RESETS = [
    *[(TypeError, value, value) for value in ("good", None, 3, {"good": 1})],
    *[(ValueError, v, ("good", v)) for v in ("bad", None, np.array(["good", "bad"]))],
]


@pytest.mark.parametrize(("error", "value", "given"), RESETS, ids=repr)
def test_hysteresis_resets_that_are_none(error, value, given):
    name = "hysteresis_reset"
    refuses(error, name, value, lambda: DynamicLossScale(hysteresis_reset=given))


@pytest.mark.parametrize("value", [1, "yes", None, 0.0], ids=repr)
def test_skip_nonfinite_is_a_bool(value):
    refuses(TypeError, "skip_nonfinite", value, lambda: FixedLossScale(8, value))


@pytest.mark.parametrize("value", [True, Ellipsis, [8], 1j, b"dynamic"], ids=repr)
def test_identifiers_of_no_loss_scale(value):
    refuses(TypeError, "loss_scale", value, lambda: lossscale.get(value))


def test_unknown_names_and_bad_numbers():
    refuses(ValueError, "loss_scale", "static", lambda: lossscale.get("static"))
    refuses(ValueError, "loss_scale_value", -8, lambda: lossscale.get(-8))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("increment_period", lambda value: DynamicLossScale(increment_period=value)),
        ("loss_scale", lambda value: lossscale.get([value])),
        ("loss_scale", lossscale.serialize),
        ("loss_scale", lambda value: lossscale.get({"class_name": value})),
        ("name", DynamicLossScale.from_preset),
        ("state", lambda value: lossscale.import_state("torch", {value: value})),
        ("loss_scale", lambda value: lossscale.export_state("torch", value)),
        ("loss_scale", lambda value: lossscale.simulate(value, limit=[1.0])),
        ("inner_optimizer", LossScaleOptimizer),
    ],
)
def test_numbers_too_long_for_python_to_show(name, call):
    # From some security release on, repr(10**5000) raises a ValueError of its own.
    with pytest.raises((TypeError, ValueError), match=f"`{name}"):
        call(10**5000)


@pytest.mark.parametrize("config", [{}, {"class_name": 3}, {"config": {}}], ids=repr)
def test_configs_that_are_none(config):
    refuses(TypeError, "config", config, lambda: lossscale.deserialize(config))
    # Who handed it as a loss scale is told of that argument.
    refuses(TypeError, "loss_scale", config, lambda: lossscale.get(config))
    refuses(TypeError, "loss_scale", config, lambda: lossscale.SpikeGuard(config))


@pytest.mark.parametrize(
    "given", [8, [], "8", {}, {"value": 8}, {3: 8}, {"loss_scale_value": 8, "x": 1}]
)
def test_configs_of_other_arguments(given):
    config = {"class_name": "FixedLossScale", "config": given}
    for name, call in (
        ("config", lossscale.deserialize),
        ("loss_scale", lossscale.get),
    ):
        message = re.escape(f'`{name}["config"]` must')
        with pytest.raises(TypeError, match=message) as caught:
            call(config)
        assert f"got {given!r}" in str(caught.value)


@pytest.mark.parametrize("name", [3, ["a"], {}, None, ""], ids=repr)
def test_registered_names_that_are_none_do_not_matter(name, no_variable):
    config = {"class_name": "FixedLossScale", "config": {"loss_scale_value": 8}}
    assert float(lossscale.get({**config, "registered_name": name})) == 8.0
    no_variable.clear()


def test_configs_of_unknown_classes():
    for name in ("NoSuchScale", "Dense", "keras>Adam"):
        config = {"class_name": name, "config": {}}
        refuses(ValueError, "config", name, lambda c=config: lossscale.deserialize(c))


def test_serializing_what_is_no_loss_scale():
    refuses(TypeError, "loss_scale", 8, lambda: lossscale.serialize(8))


class TestInnerOptimizer:
    """Each is refused by name, and the optimizer that came is as it was."""

    @pytest.mark.peer_defect(9)
    @pytest.mark.parametrize("value", [None, "adam", 3, Ellipsis, tf.Module], ids=str)
    def test_no_keras_optimizer(self, value):
        refuses(TypeError, "inner_optimizer", value, lambda: LossScaleOptimizer(value))

    @pytest.mark.peer_defect(9)
    def test_keras_own_wrapper(self, family):
        if family.name == "keras3":
            wrapper = family.keras.optimizers.LossScaleOptimizer
        else:
            wrapper = family.keras.mixed_precision.LossScaleOptimizer
        wrapped = wrapper(family.optimizers.SGD(0.1))
        refuses(
            TypeError, "inner_optimizer", wrapped, lambda: LossScaleOptimizer(wrapped)
        )

    @pytest.mark.parametrize("value", [None, "static", -8, np.nan, [8.0]], ids=repr)
    def test_a_bad_loss_scale_leaves_it_free(self, family, value, no_variable):
        inner = family.optimizers.SGD(0.1)
        with pytest.raises((TypeError, ValueError), match=re.escape("`loss_scale")):
            LossScaleOptimizer(inner, value)
        assert no_variable == []
        assert LossScaleOptimizer(inner, 8).inner_optimizer is inner
        no_variable.clear()

    @pytest.mark.parametrize("name", [3, b"a", ["a"], {}, True], ids=repr)
    def test_names_that_are_no_string(self, family, name, no_variable):
        inner = family.optimizers.SGD(0.1)
        refuses(
            TypeError, "name", name, lambda: LossScaleOptimizer(inner, "dynamic", name)
        )
        assert no_variable == []
        assert LossScaleOptimizer(inner, 8, "mine").name == "mine"
        no_variable.clear()

    def test_a_slash_in_the_name(self, family, no_variable):
        inner = family.optimizers.SGD(0.1)
        if family.name == "keras3":  # it takes no such name for anything
            refuses(
                ValueError, "name", "a/b", lambda: LossScaleOptimizer(inner, 8, "a/b")
            )
        else:
            assert LossScaleOptimizer(inner, 8, "a/b").name == "a/b"
            no_variable.clear()

    @pytest.mark.peer_defect(9)
    def test_wrapped_already(self, family, no_variable):
        inner = family.optimizers.SGD(0.1)
        wrapped = LossScaleOptimizer(inner)
        no_variable.clear()
        refuses(
            TypeError, "inner_optimizer", wrapped, lambda: LossScaleOptimizer(wrapped)
        )
        with pytest.raises(ValueError, match="wraps already"):
            LossScaleOptimizer(inner)

    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("is_keras_own", [False, True])
    def test_a_wrapper_within_delegating_optimizers(
        self, family, depth, is_keras_own, no_variable
    ):
        own = family.keras.mixed_precision.LossScaleOptimizer
        cls = own if is_keras_own else LossScaleOptimizer
        optimizer = cls(family.optimizers.SGD(0.1))
        for _ in range(depth):
            optimizer = delegating(family, optimizer)
        no_variable.clear()
        refuses(
            TypeError,
            "inner_optimizer",
            optimizer,
            lambda: LossScaleOptimizer(optimizer),
        )

    def test_its_own_loss_scale(self, family):
        skip_without("loss_scale_factor", family)
        inner = family.optimizers.SGD(0.1, loss_scale_factor=64.0)
        with pytest.raises(ValueError, match=re.escape("Pass loss_scale=64.0")):
            LossScaleOptimizer(inner)
        assert inner.loss_scale_factor == 64.0

    def test_of_another_keras(self, family, no_variable):
        wrapper = type(LossScaleOptimizer(family.optimizers.SGD(0.1)))
        no_variable.clear()
        for other in _other_families(family):
            with pytest.raises(TypeError, match="must belong to the Keras of"):
                wrapper(other.optimizers.SGD(0.1))


def _other_families(family):
    return [other for other in families() if other.name != family.name]
