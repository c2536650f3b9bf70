"""Whoever follows what the reports print of an overflow has a finite forward pass."""

import numpy as np
import pytest
import tensorflow as tf
from limits import skip_without
from models import policy_of
from overflowing import HOT, MODELS, Maker, made

from lossscale import find_nonfinite, forward_ranges

REPORTS = {
    "find_nonfinite": find_nonfinite,
    "forward_ranges": lambda model, x, _: forward_ranges(model, x, verbose=0),
}


def is_finite(model, x):
    if np.ndim(x) == 3:  # in a graph the loop over time is another one
        # On some CPUs TensorFlow 2.15 fuses a float16 normalization into an operation
        # that takes no float16, whoever runs the model.
        tf.config.optimizer.set_experimental_options({"remapping": False})
        try:
            return bool(np.isfinite(model.predict(x, verbose=0)).all())
        finally:
            tf.config.optimizer.set_experimental_options({"remapping": True})
    return bool(np.isfinite(model(x).numpy()).all())


@pytest.mark.every
@pytest.mark.each_version
@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("name", MODELS)
def test_the_layer_that_overflows_is_named_and_what_is_said_helps(family, name, report):
    maker = Maker(family.keras)
    if name == "attention":
        skip_without("attention with a dtype", family)
    model, x, y = made(family, name, maker=maker)
    model(x)
    found = REPORTS[report](model, x, y)
    assert maker.follow(str(found)), str(found)
    if report == "find_nonfinite":
        assert (found.where, found.dtype) == ("forward", "float16")
        assert found.kind in {"inf", "-inf"}
        assert 1000 < found.largest <= 65504
        assert f"{found.layer} ({found.layer_class}, float16)" in str(found)
    else:
        assert found.need_float32 or found.need_cast
    if name in HOT:
        assert "dtype=\"float32\", name='hot'" in str(found)
        if report == "find_nonfinite":
            assert found.layer == HOT[name]
            # A norm's output is finite, and wrong.
            assert found.is_hidden == (name == "normalized")
        else:
            assert HOT[name] in found.need_float32
            assert not {"a", "first", "value"} & {*found.need_float32}
            is_inside = name in {"normalized", "attention"}
            assert not is_inside or found.inside == ("hot",)
    model, x, y = made(family, name, maker=maker)
    assert is_finite(model, x), str(found)
    assert find_nonfinite(model, x, y).where != "forward", str(found)
    again = forward_ranges(model, x, verbose=0)
    if report == "forward_ranges":
        assert again.need_float32 == again.need_cast == (), f"{found}\n{again}"
        assert "Write" not in str(again)


#: Nests of data, and how a model of a user's takes a tensor out of each.
NESTS = {
    "tensor": (lambda x: x, lambda given: given),
    "tuple": (lambda x: (x, x * 0 + 1), lambda given: given[0]),
    "nested": (lambda x: {"a": [x, {"b": x * 2}]}, lambda given: given["a"][1]["b"]),
}


@pytest.mark.each_version
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
