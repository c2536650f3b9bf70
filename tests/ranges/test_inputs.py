"""What the three tools refuse, and what they say of it."""

import numpy as np
import pytest
import tensorflow as tf
from installed import families
from models import FEATURES, regression

from lossscale import (
    LossScaleOptimizer,
    find_nonfinite,
    forward_ranges,
    gradient_ranges,
)

KERAS, OPTIMIZERS = families()[0].keras, families()[0].optimizers
LAYERS = KERAS.layers
X, Y = np.ones([8, FEATURES], np.float32), np.ones([8, 1], np.float32)
LISTS = [[1.0, 2.0], [3.0, 4.0]]


def network():
    return regression(families()[0], LossScaleOptimizer(OPTIMIZERS.SGD(0.5)))


class TorchStyle:
    """It has a length and items, and no end that NumPy would find."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.ones([FEATURES], np.float32), np.ones([1], np.float32)


def no_rows():
    return tf.data.Dataset.range(4).filter(lambda i: i > 9)


def endless():
    return tf.data.Dataset.range(4).batch(2).repeat()


def without_targets():
    return tf.data.Dataset.from_tensor_slices(X).batch(8)


def model_of(kind, *args, **kwargs):
    """Returns what makes a model of one layer, compiled without a loss."""

    def make():
        model = KERAS.Sequential([getattr(LAYERS, kind)(*args, **kwargs)])
        if kind != "Conv2D":  # which does not take these data
            model.build([None, FEATURES])
        model.compile(OPTIMIZERS.SGD())
        return model

    return make


ALONE, FIND, FORWARD = {"y": None}, {"tool": find_nonfinite}, {"tool": forward_ranges}
NO_LOSS, MSE = {"model": model_of("Dense", 1)}, {"loss": "mse"}
EMPTY, NARROW = {"model": model_of("Flatten")}, model_of("Dense", 1, dtype="float16")
#: What is given in place of gradient_ranges, a model and its data, and the error.
ROWS = [
    ({"model": "model"}, TypeError, "`model` must be a Keras model, got 'model'"),
    ({"model": KERAS.Sequential, **MSE}, ValueError, "`model` must have layers"),
    ({"model": model_of("Conv2D", 2, 3), **MSE}, ValueError, "must be built, or take"),
    ({**EMPTY, **MSE}, ValueError, "must have trainable weights, got none"),
    ({"model": NARROW, **MSE}, ValueError, "must have float32 weights, .*in float16"),
    (NO_LOSS, ValueError, "`model` must be compiled with a loss, or `loss`"),
    ({"batch_size": 1.5}, ValueError, "`batch_size` must be a whole number"),
    ({"batches": 0}, ValueError, "`batches` must be a whole number of at least 1"),
    ({"loss_scale": -1}, ValueError, "`loss_scale` must be positive"),
    ({"activations": "yes"}, TypeError, "`activations` must be True or False"),
    ({**FIND, "x": X * np.inf}, ValueError, "`x` must be finite, got 48 values"),
    ({**FORWARD, "x": X * np.inf}, ValueError, "`x` must be finite, got 48 values"),
    ({**FIND, "y": Y * np.nan}, ValueError, "`y` must be finite, got 8 values"),
    ({**FIND, **ALONE}, ValueError, r"`y` must be the targets .* got None"),
    ({**MSE, **ALONE}, ValueError, "`y` must be the targets"),
    ({"x": without_targets, **ALONE}, ValueError, "`y` must be the targets"),
    ({"y": Y[:3]}, ValueError, "must have the same number of rows"),
    ({"y": LISTS}, TypeError, r"`y` must be an array.* np\.array\(y\)"),
    ({"x": X[:0], "y": Y[:0]}, ValueError, "at least one"),
    ({"x": endless}, ValueError, "`y` must be None where `x` is a"),
    ({"x": endless, "batches": None, **ALONE}, ValueError, "`batches` must be"),
    ({"x": no_rows, **ALONE}, ValueError, "`x` must hold at least one batch"),
    ({"x": TorchStyle, **ALONE}, TypeError, "TorchStyle.* Pass some of its items"),
    ({"x": iter([1]), **ALONE}, TypeError, r"use it up.* x, y = next\(x\)"),
    ({"x": LISTS, **ALONE}, TypeError, r"write np\.array\(x\)"),
    ({"x": 3, **ALONE}, TypeError, "`x` must be arrays.*got 3 of type int"),
]


def called(tool=gradient_ranges, **given):
    """Calls a tool with a model and data, but for what is given, or made now."""
    arguments = {"model": network, "x": X, "y": Y, **given}
    made = (KERAS.Model, tf.distribute.DistributedDataset)
    for name, value in arguments.items():
        if callable(value) and not isinstance(value, made):
            arguments[name] = value()
    return tool(**arguments)


@pytest.mark.parametrize(("given", "error", "words"), ROWS, ids=[r[-1] for r in ROWS])
def test_what_is_refused(given, error, words):
    with pytest.raises(error, match=words):
        called(**given)


def test_a_loss_that_a_layer_adds_is_enough():
    model = model_of("Dense", 1, activity_regularizer="l2")()
    assert gradient_ranges(model, X, verbose=0).largest[0] > 0


@pytest.mark.parametrize("tool", [find_nonfinite, forward_ranges, gradient_ranges])
def test_replicas_and_graphs_are_refused(tool, mirrored):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    distributed = mirrored.experimental_distribute_dataset(dataset)
    with pytest.raises(TypeError, match="Pass the dataset that was distributed"):
        called(tool, x=distributed, y=None)
    with mirrored.scope():
        model = network()
        with pytest.raises(RuntimeError, match=r"outside strategy\.scope"):
            tool(model, X, Y)
    with pytest.raises(ValueError, match=r"outside strategy\.scope.* 2 replicas"):
        tool(model, X, Y)
    model = network()
    with pytest.raises(RuntimeError, match="must be called eagerly"):
        tf.function(lambda: tool(model, X, Y), autograph=False)()
