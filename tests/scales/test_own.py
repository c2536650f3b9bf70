"""Loss scales that users write: rules as functions, and whole updates."""

from types import SimpleNamespace

import numpy as np
import pages
import pytest
import tensorflow as tf
from driving import drive, finite
from every_loss_scale import PAGE
from installed import ROOT
from models import built, compiled

import lossscale
from lossscale import LossScale

Halving = PAGE.Halving
SLICES = tf.IndexedSlices(tf.constant(1, tf.int64), tf.constant(0))


class Odd:
    """As Keras 3's variables: one that is not of TensorFlow."""

    def assign(self, value):
        raise AssertionError(value)


class Returns(LossScale):
    """Its rule returns what it was made with."""

    def __init__(self, returned, initial_loss_scale=8.0):
        super().__init__(initial_loss_scale)
        self.returned = returned
        self.steps = self._add_weight("steps", 0, tf.int64)
        self.odd = Odd()

    def next_state(self, state, is_finite):
        del is_finite
        return self.returned(state) if callable(self.returned) else self.returned

    def get_config(self):
        return {}


def test_a_rule_is_tried_without_a_variable():
    state = SimpleNamespace(current_loss_scale=tf.constant(8.0))
    found = Halving().next_state(state, tf.constant(False))
    assert {name: float(value) for name, value in found.items()} == {
        "current_loss_scale": 4.0
    }


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan, 1e39, "8"])
def test_its_first_scale_is_checked_before_any_variable_exists(value):
    seen = []

    class Seen(Halving):
        def _add_weight(self, *arguments):
            seen.append(arguments)

    with pytest.raises((ValueError, TypeError)) as caught:
        Seen(value)
    must_be = "a number" if value == "8" else "positive"
    assert f"`initial_loss_scale` must be {must_be}" in str(caught.value)
    assert not seen


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        ({"step": 1}, AttributeError, "skipped_steps, steps, got 'step'"),
        ({"initial_loss_scale": 1}, AttributeError, "got 'initial_loss_scale'"),
        (lambda state: {"steps": state.step}, AttributeError, "got 'step'"),
        (None, TypeError, "must return a dictionary of new values .*, got None"),
        ({"steps": 0.5}, TypeError, r"int64 of shape \(\) for 'steps', got 0.5"),
        ({"steps": None}, TypeError, "for 'steps', got None"),
        ({"steps": tf.constant(1)}, TypeError, "for 'steps'.*tf.cast changes"),
        ({"steps": [1]}, TypeError, "for 'steps', got .*1"),
        ({"current_loss_scale": tf.ones([1])}, TypeError, "return float32 of"),
        ({"steps": SLICES}, TypeError, r"int64 of shape \(\) for 'steps', got"),
        ({1: 2}, TypeError, r"by the names of variables, got the key 1\. Write"),
        ({"odd": 1}, TypeError, r"`odd` of Returns must be a tf\.Variable, got"),
        (lambda s: {"steps": s.odd}, TypeError, "`odd` of Returns must be"),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(returned, error, words):
    for mode in ("eager", "graph"):
        loss_scale = Returns(returned)
        with pytest.raises(error, match=words):
            compiled(lambda it=loss_scale: it.adjust(True)[1], mode)()
        assert (loss_scale.steps.numpy(), float(loss_scale)) == (0, 8.0)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [({"steps": np.int64(3)}, (3, 8.0)), ({"current_loss_scale": 2}, (0, 2.0))],
)
def test_numbers_are_values_and_what_is_left_out_stays(returned, expected):
    loss_scale = Returns(returned)
    loss_scale.adjust(True)
    assert (loss_scale.steps.numpy(), float(loss_scale)) == expected


@pytest.mark.parametrize("value", [0.0, -4.0, np.inf, np.nan])
def test_a_scale_that_is_none_is_replaced_at_the_next_step(value):
    """As a restored one is, although the rule leaves it out."""
    loss_scale = Returns({"current_loss_scale": value})
    loss_scale.adjust(True)
    np.testing.assert_equal(float(loss_scale), value)
    loss_scale.returned = {}
    says = "`next_state` of Returns has returned"
    with pytest.warns(lossscale.LossScaleWarning, match=says):
        loss_scale.adjust(True)
    assert float(loss_scale) == 8.0


class Forgets(Halving):
    """Its constructor does not call its base's."""

    def __init__(self):
        self.mine = 1


class WithoutRule(Halving):
    """It has a value, and no rule."""

    next_state = LossScale.next_state


class Reads(Halving):
    """Its property reads an attribute that is not there."""

    @property
    def mine(self):
        return self.forgotten


FORGETS = r"`__init__` of Forgets must call `super\(\).__init__\(initial"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Forgets().update([tf.ones([2])]), FORGETS),
        (lambda: Forgets().adjust(True), FORGETS),
        (lambda: Forgets().scale(1.0), FORGETS),
        (lambda: Forgets().skipped_steps, FORGETS),
        (lambda: 2.0 * Forgets(), FORGETS),
        (lambda: lossscale.simulate(Forgets(), is_finite=[True]), FORGETS),
        (lambda: Halving().mine, "'Halving' object has no attribute"),
        (lambda: Reads().mine, "no attribute 'forgotten'"),
        (Returns({}, None), "Returns must implement `__call"),
        (lambda: WithoutRule().update([tf.ones([2])]), "Rule must implement `next_st"),
        (LossScale, "abstract"),
    ],
)
def test_an_unfinished_class_is_told_what_it_lacks(call, words):
    with pytest.raises((AttributeError, NotImplementedError, TypeError), match=words):
        call()
    assert not hasattr(Forgets(), "current_loss_scale")
    assert not hasattr(Reads(), "mine")


def test_a_value_may_be_made_of_that_of_the_base():
    class Twice(Halving):
        def __call__(self):
            return 2.0 * super().__call__()

    assert float(Twice(8)) == 16.0


class OfTensorFlow(LossScale):
    """As a subclass of tf.train.experimental.LossScale: it overrides `update`."""

    def __init__(self):
        super().__init__()
        self.value = self._add_weight("value", 64.0, tf.float32)

    def __call__(self):
        return tf.convert_to_tensor(self.value)

    def update(self, grads):
        is_finite = lossscale.all_finite(grads)
        value = tf.where(is_finite, self.value * 2.0, self.value / 4.0)
        return self.value.assign(value, read_value=False), is_finite

    def get_config(self):
        return {}


@pytest.mark.parametrize("mode", ["eager", "graph", "xla", "v1"])
def test_the_whole_update_may_be_overridden(mode, family):
    flags = finite("TFTF")
    assert drive(OfTensorFlow, flags, mode) == ([128, 32, 64, 16], flags)
    optimizer, variable = built(family, OfTensorFlow(), [0.0])

    def step(grad):
        grad = optimizer.scale_loss(tf.constant([1.0])) * grad
        optimizer.apply_gradients([(grad, variable)])

    step = compiled(step, "graph" if mode == "v1" else mode)
    for value in (0.5, np.inf):
        step(tf.constant(value))
    assert float(optimizer.loss_scale()) == 32.0
    assert np.array(variable) == [-0.5]


@pytest.mark.slow
def test_a_type_checker_takes_the_classes_of_the_page_and_of_the_example(tmp_path):
    """With and without `largest`: both are overrides of `next_state`."""
    api = pytest.importorskip("mypy.api")
    path = tmp_path / "own.py"
    example = (ROOT / "examples" / "log_normal.py").read_text()
    page = "".join(pages.blocks(pages.PAGES["own-loss-scale"]))
    path.write_text(example + page)
    config = str(ROOT / "pyproject.toml")
    options = ["--check-untyped-defs", "--config-file", config, str(path)]
    found, errors, _ = api.run(options)
    assert not errors
    assert "checked " in found
    assert "[override]" not in found, found
