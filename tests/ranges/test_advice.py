"""The law of all reports: whoever follows what they print has a finite forward pass."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from installed import each_keras
from limits import skip_without
from models import policy_of
from overflowing import ADVISED, Maker, data_for, made

from lossscale import find_nonfinite, forward_ranges

pytestmark = pytest.mark.each_version


def in_turn(first, but=()):
    """Returns parameters: each model with one of Keras 2 and Keras 3.

    What the three reports advise is written in one place, so a model that one of them
    tries with this Keras, the next one tries with the other.
    """
    keras_versions = each_keras()
    return pytest.mark.parametrize(
        ("family", "name"),
        [
            pytest.param(family, name, id=f"{family.name}-{name}")
            for number, name in enumerate(ADVISED, first)
            if name not in but
            for family in [keras_versions[number % len(keras_versions)]]
        ],
    )


def built(family, name, maker):
    """Returns a new model, of which the layers are built."""
    if name == "attention":
        skip_without("attention with a dtype", family)
    model, x, _ = made(family, name, maker=maker)
    model(x)
    return model


def is_finite(model, name):
    x = data_for(name)[0]
    if x.ndim == 3:  # in a graph the loop over time is another one
        # On some CPUs TensorFlow 2.15 fuses a float16 normalization into an operation
        # that takes no float16, whoever runs the model.
        tf.config.optimizer.set_experimental_options({"remapping": False})
        try:
            return bool(np.isfinite(model.predict(x, verbose=0)).all())
        finally:
            tf.config.optimizer.set_experimental_options({"remapping": True})
    return bool(np.isfinite(model(x).numpy()).all())


@in_turn(0)
def test_what_find_nonfinite_says_helps(family, name):
    maker = Maker(family.keras)
    model = built(family, name, maker)
    found = find_nonfinite(model, *data_for(name))
    assert found.where == "forward"
    assert maker.follow(str(found)), str(found)
    model = built(family, name, maker)
    assert is_finite(model, name), str(found)
    again = find_nonfinite(model, *data_for(name))
    assert again.where != "forward", f"{found}\n{again}"


@in_turn(1)
def test_what_forward_ranges_says_helps(family, name):
    maker = Maker(family.keras)
    model = built(family, name, maker)
    found = forward_ranges(model, data_for(name)[0], verbose=0)
    assert maker.follow(str(found)), str(found)
    model = built(family, name, maker)
    assert is_finite(model, name), str(found)
    again = forward_ranges(model, data_for(name)[0], verbose=0)
    assert again.need_float32 == again.need_cast == (), f"{found}\n{again}"
    assert "Write" not in str(again)
    assert "no layer needs float32" not in str(found)
    assert find_nonfinite(model, *data_for(name)).where != "forward"


#: Nests of data, and how a model of a user's takes a tensor out of each.
NESTS = {
    "tensor": (lambda x: x, lambda given: given),
    "dict": (lambda x: {"x": x, "one": x * 0 + 1}, lambda given: given["x"]),
    "list": (lambda x: [x * 0 + 1, x], lambda given: given[1]),
    "tuple": (lambda x: (x, x * 0 + 1), lambda given: given[0]),
    "nested": (lambda x: {"a": [x, {"b": x * 2}]}, lambda given: given["a"][1]["b"]),
}


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("nest", NESTS)
def test_what_forward_ranges_says_of_data_that_the_model_casts_helps(
    family, nest, divides
):
    """A model of a user's own class casts all that it is given, before its `call`."""
    maker = Maker(family.keras)
    nested, take = NESTS[nest]
    x = nested(np.full([8, 6], 1e5, np.float32))

    class Own(family.keras.Model):
        def __init__(self):
            super().__init__(name="own", **maker.dtype("own"))
            self.a, self.b = maker.dense("a", 1e-3), maker.dense("b")
            self.last = maker.head()

        def call(self, given):
            x = take(given)
            return self.last(self.b(self.a(x / 1000 if divides else x)))

    def output():
        with policy_of(family.keras, "mixed_float16"):
            model = Own()
        return model, model(tf.nest.map_structure(tf.constant, x)).numpy()

    model, before = output()
    assert not np.isfinite(before).all()
    found = forward_ranges(model, x, verbose=0)
    assert found.need_float32 == (("own",) if divides else ("own", "a"))
    assert found.need_cast == ()
    assert "own casts its data to float16" in str(found)
    assert maker.follow(str(found))
    model, after = output()
    assert np.isfinite(after).all()
    again = forward_ranges(model, x, verbose=0)
    assert again.need_float32 == again.need_cast == (), f"{found}\n{again}"
    assert find_nonfinite(model, x, np.ones([8, 1]), loss="mse").where is None


def test_what_forward_ranges_says_of_a_sequential_model_without_input_helps(family):
    maker = Maker(family.keras)

    def output(*begin):
        with policy_of(family.keras, "mixed_float16"):
            parts = [maker.dense("a", 1e-3), maker.dense("b"), maker.head()]
            model = family.keras.Sequential([*begin, *parts], name="model")
        return model, model(x).numpy()

    x = np.full([8, 6], 1e5, np.float32)
    model, before = output()
    assert not np.isfinite(before).all()
    found = forward_ranges(model, x, verbose=0)
    assert found.need_cast == ()
    assert maker.follow(str(found))
    model, after = output(family.keras.Input((6,)))
    assert np.isfinite(after).all()
    assert forward_ranges(model, x, verbose=0).need_float32 == ()
