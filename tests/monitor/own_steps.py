"""Models with a `train_step` of their own: two optimizers, sums over batches, loops."""

from __future__ import annotations

import tensorflow as tf
from faulty import scaled_gradients
from models import FEATURES, regression

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime import keras_versions


def wrapped(inner):
    return LossScaleOptimizer(inner, DynamicLossScale(2.0**10))


def two_optimizers(family, wrap):
    """Returns a model like a GAN: its `compile` takes two optimizers, and its own none.

    The gradients of the second are infinite where an input is.
    """
    keras = family.keras

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(1)
            self.second = keras.layers.Dense(1)

        def compile(self, optimizers):
            super().compile()
            self.d_optimizer, self.g_optimizer = self.both = optimizers

        def call(self, x):
            return self.first(x) + self.second(x)

        def train_step(self, batch):
            x = batch[0] if isinstance(batch, tuple) else batch
            inputs = (tf.ones_like(x), x)
            layers = (self.first, self.second)
            for layer, optimizer, x in zip(layers, self.both, inputs):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(layer(x) ** 2)
                    scaled_loss = optimizer.scale_loss(loss)
                variables = layer.trainable_variables
                tensors = [keras_versions.tensor_of(variable) for variable in variables]
                grads = tape.gradient(scaled_loss, tensors)
                optimizer.apply_gradients(zip(grads, variables))
            return {"loss": tf.constant(0.0)}

    model = Gan()
    model(tf.ones([1, FEATURES]))
    model.compile([wrap(family.optimizers.SGD(2.0**-9)) for _ in range(2)])
    return model


def adding_up(family, clear):
    """Returns a model that adds its gradients up in variables, and then clears them."""

    class AddingUp(family.keras.Sequential):
        def train_step(self, batch):
            loss, grads = scaled_gradients(self, batch)
            unscaled = self.optimizer.get_unscaled_gradients(grads)
            for total, grad in zip(self.totals, unscaled):
                total.assign_add(grad)
            means = [tf.convert_to_tensor(total) / 2.0 for total in self.totals]
            self.optimizer.apply_gradients(zip(means, self.trainable_variables))
            for total in self.totals:
                total.assign(clear(total))
            return {"loss": loss}

    layers = [family.keras.layers.Dense(1) for _ in range(2)]
    model = AddingUp([family.keras.Input((FEATURES,)), *layers])
    model.compile(wrapped(family.optimizers.SGD(2.0**-9)))
    shapes = [weight.shape for weight in model.trainable_variables]
    model.totals = [tf.Variable(tf.zeros(shape), trainable=False) for shape in shapes]
    return model


def by_zero():
    """Returns what clears a sum badly: a product of infinity and 0 is NaN."""
    # In a graph TensorFlow makes zeros of a product with the constant 0.
    zero = tf.Variable(0.0, trainable=False)
    return lambda total: total * zero


def looping(family, *, times=1, only_positive=False):
    """Returns a model whose batches have several steps, or one if an input is."""

    class Looping(family.keras.Sequential):
        def train_step(self, batch):
            for _ in range(times):
                loss, grads = scaled_gradients(self, batch)
                pairs = list(zip(grads, self.trainable_variables))

                def apply(pairs=pairs):
                    self.optimizer.apply_gradients(pairs)
                    return 0

                if only_positive:
                    tf.cond(batch[0][0, 0] > 0.0, apply, lambda: 0)
                else:
                    apply()
            return {"loss": loss}

    optimizer = wrapped(family.optimizers.SGD(2.0**-8))
    model = regression(family, optimizer, model_class=Looping)
    optimizer.build(model.trainable_variables)
    return model
