"""A model whose data decide what goes wrong in it, the same on every Keras."""

import numpy as np
import tensorflow as tf
from exact import heard
from models import policy_of
from strategies import scope_of

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime import keras_versions

ROWS = 8
#: Where a batch is bad: in its last row, so on the last replica alone.
FAULTS = ("gradient", "loss", "data")


def batches(run):
    """Returns inputs and targets of a run: a batch for each fault, or for None.

    "data" is a NaN in an input, "loss" an infinite target, "gradient" an infinity in
    the gradients of the layer "first" alone.
    """
    rng = np.random.default_rng(5)
    x = rng.uniform(0.5, 1.0, [len(run) * ROWS, 3]).astype(np.float32)
    x[:, -1] = 0.0
    y = x.sum(axis=1, keepdims=True)
    for step, fault in enumerate(run):
        last = (step + 1) * ROWS - 1
        assert fault in (None, *FAULTS)
        if fault == "data":
            x[last, 0] = np.nan
        elif fault == "loss":
            y[last] = np.inf
        elif fault == "gradient":
            x[last, -1] = 1.0
    return x, y


@tf.custom_gradient
def _infinite_backwards(x, where):
    def backward(upstream):
        bad = tf.broadcast_to(tf.cast(where, tf.bool), tf.shape(upstream))
        infinity = tf.fill(tf.shape(upstream), tf.constant(np.inf, upstream.dtype))
        return tf.where(bad, infinity, upstream), tf.zeros_like(where)

    return tf.identity(x), backward


class Faulty:
    """A compiled model, its optimizer and its loss scale, and how to fit them anew."""

    def __init__(self, family, strategy=None, **compile_arguments):
        self.family, self.strategy = family, strategy
        keras = family.keras

        class Fault(keras.layers.Layer):
            def call(self, inputs):
                x, raw = inputs
                return _infinite_backwards(x, raw[:, -1:])

        with policy_of(keras, "mixed_float16"), scope_of(strategy):
            self.scale = DynamicLossScale(2.0**10)
            inner = family.optimizers.SGD(2.0**-6)
            self.optimizer = LossScaleOptimizer(inner, self.scale)
            raw = keras.Input((3,))
            x = keras.layers.Dense(4, name="first")(raw)
            x = Fault()([x, raw])
            x = keras.layers.BatchNormalization(name="norm")(x)
            last = keras.layers.Dense(1, dtype="float32", name="last")
            self.model = keras.Model(raw, last(x))
            self.model.compile(self.optimizer, loss="mse", **compile_arguments)
        self._weights = self.model.get_weights()

    def reset(self, scale=2.0**10, applied=1):
        """Puts all back to the beginning, or to after `applied` good steps."""
        self.model.set_weights(self._weights)
        self.optimizer.iterations.assign(applied)
        kept = self.optimizer.engine.record.kept
        skipped = [kept[name] for name in kept if name == "skipped_last"]
        for variable in [*self.scale.variables, *skipped]:
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        self.scale.last_step_finite.assign(True)
        self.scale.current_loss_scale.assign(scale)
        return self

    def fit(self, run, *callbacks, epochs=1, verbose=0):
        """Fits the model to a run, a step for each entry and epoch."""
        return self.model.fit(
            *batches(run),
            batch_size=ROWS,
            epochs=epochs,
            shuffle=False,
            verbose=verbose,
            callbacks=list(callbacks),
        )


def told_by_fit(faulty, run, monitor, **kwargs):
    """Returns the messages of a fit, and its history."""
    with heard() as messages:
        history = faulty.fit(run, monitor, **kwargs).history
    return messages, history


def told_of(model, x, y, monitor, rows=4, **kwargs):
    """Returns the messages of a fit of any model, and its history."""
    fitted = {"verbose": 0, "shuffle": False, "callbacks": [monitor], **kwargs}
    with heard() as messages:
        history = model.fit(x, y, rows, **fitted).history
    return messages, history


def scaled_gradients(model, batch):
    """Returns the loss and the scaled gradients of a `train_step` of one's own."""
    x, y = batch
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        scaled_loss = model.optimizer.scale_loss(loss)
    tensors = [*map(keras_versions.tensor_of, model.trainable_variables)]
    return loss, tape.gradient(scaled_loss, tensors)
