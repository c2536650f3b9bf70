"""Programs of users which the pages describe in words, and show only in part."""

from __future__ import annotations

#: A library's training step, overridden, and its loop, whose loss is scaled.
LIBRARY = """\
import keras
import numpy as np
import tensorflow as tf
import lossscale


class LibraryModel(keras.Sequential):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


def minimize(loss_fn, steps, optimizer, trainable_variables):
    losses = []
    for _ in range(steps):
        with tf.GradientTape() as tape:
            losses.append(loss_fn())
        grads = tape.gradient(losses[-1], trainable_variables)
        optimizer.apply_gradients(zip(grads, trainable_variables))
    return losses


class Model(LibraryModel):
    def loss_of(self, data):
        x, y = data
        return tf.reduce_mean((self(x, training=True) - y) ** 2)

    def train_step(self, data):  # theirs, and the two lines
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
            scaled_loss = self.optimizer.scale_loss(loss)  # one
        grads = tape.gradient(scaled_loss, self.trainable_variables)  # and two
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


keras.mixed_precision.set_global_policy("mixed_float16")
x = np.random.default_rng(0).normal(size=[64, 8]).astype("float32")
model = Model([keras.layers.Dense(1, dtype="float32")])
model.compile(lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
model.fit(x, x[:, :1], verbose=0)

optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1))
true_loss = tf.Variable(0.0, trainable=False)


def loss_fn():
    loss = model.loss_of((x, x[:, :1]))
    true_loss.assign(loss)  # for your log
    return optimizer.scale_loss(loss)


losses = minimize(loss_fn, 10, optimizer, model.trainable_variables)
print(true_loss.numpy())
"""

#: A library that clips gradients itself.
AGENT = """\
import keras
import numpy as np
import tensorflow as tf
import lossscale


class LibraryAgent:
    def __init__(self, model, optimizer, gradient_clipping=None):
        self.model, self.optimizer = model, optimizer
        self.gradient_clipping = gradient_clipping

    def loss_of(self, x, y):
        return tf.reduce_mean((self.model(x) - y) ** 2)

    def train(self, x, y):
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        grads = tape.gradient(loss, weights)
        if self.gradient_clipping is not None:
            grads = [tf.clip_by_norm(grad, self.gradient_clipping) for grad in grads]
        self.optimizer.apply_gradients(zip(grads, weights))


class Agent(LibraryAgent):
    def loss_of(self, x, y):
        return self.optimizer.scale_loss(super().loss_of(x, y))


x = np.random.default_rng(0).normal(size=[64, 8]).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
inner = keras.optimizers.SGD(0.1, clipnorm=1.0)  # not the agent's gradient_clipping
agent = Agent(model, lossscale.LossScaleOptimizer(inner))
for _ in range(10):
    agent.train(x, 10.0 * x[:, :1])
print(agent.optimizer.loss_scale)
"""

#: Several losses, scaled as a sum, each by itself, and as a list.
LOSSES = """\
import keras
import tensorflow as tf
import lossscale

weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
weight.build((None, 1))
(kernel,) = weight.trainable_variables
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1))


def gradient(scale_both):
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(weight(tf.ones([1, 1])))
        scaled = scale_both({"main": value**2, "penalty": 3.0 * value})
    (grad,) = optimizer.get_unscaled_gradients(tape.gradient(scaled, [kernel]))
    optimizer.apply_gradients([(0.0 * grad, kernel)])  # ends the step
    return float(grad[0, 0])


scale = optimizer.scale_loss
found = [
    gradient(lambda losses: scale(sum(losses.values()))),
    gradient(lambda losses: {name: scale(each) for name, each in losses.items()}),
    gradient(lambda losses: scale([*losses.values()])),
]
print(found)  # three times 5
"""

#: A model trained in float16, rebuilt in float32 and converted to int8.
TFLITE = """\
import keras
import numpy as np
import tensorflow as tf
import lossscale


def build():
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(16, "relu")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(hidden))


keras.mixed_precision.set_global_policy("mixed_float16")
trained = build()
trained.compile(lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-2)), loss="mse")
x = np.random.default_rng(0).normal(size=[256, 8]).astype("float32")
trained.fit(x, x[:, :1], verbose=0)

keras.mixed_precision.set_global_policy("float32")
model = build()
model.set_weights(trained.get_weights())

converter = tf.lite.TFLiteConverter.from_keras_model(model)
converter.optimizations = [tf.lite.Optimize.DEFAULT]  # these two lines for int8
converter.representative_dataset = lambda: ([row[None]] for row in x)
converted = converter.convert()  # bytes: write them to a file
"""
