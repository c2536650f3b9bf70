"""Small models, optimizers and loops, the same on every Keras."""

import random
import sys
from contextlib import contextmanager

import numpy as np
import tensorflow as tf
from limits import TENSORFLOW

from lossscale import LossScaleOptimizer
from lossscale.runtime.mode import COMPILED_BY_XLA

FEATURES = 6


@contextmanager
def policy_of(keras, policy):
    """Gives new layers of a Keras a dtype policy, and after that float32 again."""
    keras.mixed_precision.set_global_policy(policy)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy("float32")


def has_ops(keras):
    """Tells whether this is Keras 3."""
    return hasattr(keras, "ops")


def seed_all(keras):
    """Seeds every stream, as `keras.utils.set_random_seed` does where there is one."""
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 - the global stream
    tf.random.set_seed(5)
    tf.random.set_global_generator(tf.random.Generator.from_seed(5))
    # That of tf_keras 2.16 lets no layer be made on Python 3.12 and later, ever after.
    is_broken = (2, 16) <= TENSORFLOW < (2, 17) and sys.version_info >= (3, 12)
    if hasattr(keras.utils, "set_random_seed") and (has_ops(keras) or not is_broken):
        keras.utils.set_random_seed(5)


def compiled_by(mode):
    """Returns the arguments of `compile` for "eager", "graph" or "xla"."""
    how = {"run_eagerly": True} if mode == "eager" else {"jit_compile": mode == "xla"}
    # Older versions of Keras have no such argument.
    return {} if TENSORFLOW < (2, 9) and mode != "eager" else how


def variable_of(family, value, dtype="float32", name="v"):
    """Returns a variable of the kind that the optimizers of a Keras train."""
    if family.name == "keras3":
        return family.keras.Variable(value, dtype=dtype, name=name)
    return tf.Variable(value, dtype=dtype, name=name)


def built(family, loss_scale, start=(1.0, 2.0), rate=1.0, dtype="float32", **options):
    """Returns a wrapped SGD that is built, and the variable that it trains."""
    optimizer = LossScaleOptimizer(family.optimizers.SGD(rate), loss_scale, **options)
    variable = variable_of(family, np.array(start, dtype), dtype)
    build(optimizer, [variable])
    return optimizer, variable


def build(optimizer, variables):
    """Makes all variables of an optimizer, which a step would make else."""
    optimizer.build(variables)
    optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for


def data(rng, rows=64):
    """Returns inputs and targets of a linear relation."""
    x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    y = x @ np.arange(1, FEATURES + 1, dtype=np.float32)[:, None] / 4
    return x, y.astype(np.float32)


def regression(
    family, optimizer, policy="float32", *, model_class=None, **compile_arguments
):
    """Returns a compiled two-layer network with fixed initial weights.

    `model_class` is a subclass of this Keras's `Sequential`, None for itself.
    """
    keras = family.keras
    with policy_of(keras, policy):
        layers = [keras.Input((FEATURES,)), keras.layers.Dense(8, activation="relu")]
        layers.append(keras.layers.Dense(1, dtype="float32"))
        model = (model_class or keras.Sequential)(layers)
    normal = np.random.default_rng(3).normal
    model.set_weights([normal(size=w.shape) / 2 for w in model.get_weights()])
    loss = keras.losses.MeanSquaredError()
    model.compile(optimizer, loss=loss, **compile_arguments)
    return model


def delegating(family, inner):
    """Returns an optimizer of the user's own that leaves each step to `inner`."""

    class Delegating(family.optimizers.SGD):
        def __init__(self):
            super().__init__(0.5)
            object.__setattr__(self, "inner_optimizer", inner)

        def build(self, variables):
            super().build(variables)
            inner.build(variables)

        def apply(self, grads, trainable_variables=None):
            inner.apply(grads, trainable_variables)

        def apply_gradients(self, grads_and_vars, **kwargs):
            return inner.apply_gradients(list(grads_and_vars), **kwargs)

    return Delegating()


def inner_variables(optimizer):
    """Returns the variables of a wrapper's inner optimizer, or of a bare optimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    found = inner.variables
    return list(found() if callable(found) else found)


def training_state(model):
    """Returns copies of all that a skipped step must not change."""
    weights = [np.array(weight) for weight in model.get_weights()]
    return weights + optimizer_state(model.optimizer, model.trainable_variables)


def optimizer_state(optimizer, variables):
    """Returns copies of an optimizer's counter, slots and the like, less the scale."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not hasattr(inner, "get_slot_names"):
        return [np.array(v.numpy()) for v in inner_variables(inner)]
    # Keras 2's legacy optimizers list their slots in the order of their creation.
    slots = [
        inner.get_slot(variable, name).numpy()
        for name in sorted(inner.get_slot_names())
        for variable in variables
    ]
    return [np.array(inner.iterations.numpy()), *slots]


def scale_state(optimizer):
    """Returns the values of the loss scale's variables by name."""
    variables = optimizer.loss_scale.variables
    return {v.name.split(":")[0]: v.numpy().item() for v in variables}


def whole_state(model):
    """Returns copies of all that a file holds: `training_state` and the loss scale."""
    return [*scale_state(model.optimizer).values(), *training_state(model)]


def checkpoint_of(model):
    """Returns a checkpoint of a model and its optimizer."""
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def backup_and_restore(family, folder, **arguments):
    """Returns the callback of that name."""
    callbacks = family.keras.callbacks
    # TensorFlow 2.4 to 2.7 have it under another name.
    home = callbacks if hasattr(callbacks, "BackupAndRestore") else None
    return (home or callbacks.experimental).BackupAndRestore(str(folder), **arguments)


def assert_same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second):
        np.testing.assert_array_equal(one, other)


def differ(first, second):
    return any(not np.array_equal(one, other) for one, other in zip(first, second))


def with_infinity(x):
    """Returns inputs of which the last row alone overflows, so on the last replica."""
    bad = x.copy()
    bad[-1] = np.inf
    return bad


def compiled(function, mode):
    """Returns `function` as it is ("eager"), or as a graph, or compiled by XLA."""
    if mode == "eager":
        return function
    return tf.function(function, **(COMPILED_BY_XLA if mode == "xla" else {}))
