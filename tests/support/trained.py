"""One weight that an engine or a wrapper trains, with the same names for both."""

import tensorflow as tf
from models import variable_of

from lossscale import LossScaleEngine, LossScaleOptimizer
from lossscale.runtime import keras_versions

RATE, START = 0.25, [1.0, 2.0]


class ByEngine:
    """A weight that an engine trains, by plain gradient descent."""

    def __init__(self, loss_scale, family=None, **options):
        del family
        self.weight = tf.Variable(START)
        self.engine = LossScaleEngine(loss_scale, **options)
        self.engine.build([self.weight])
        self.scale, self.unscale = self.engine.scale_loss, self.engine.unscale

    def apply(self, grads):
        self.engine.apply(grads, [self.weight], self._descend)

    def _descend(self, grads, variables):
        for grad, variable in zip(grads, variables):
            variable.assign_sub(RATE * tf.convert_to_tensor(grad))

    def state(self):
        """Returns the weight, the loss scale, skipped steps and applied ones."""
        scale = self.engine.loss_scale
        counts = (scale, scale.skipped_steps, self.engine.applied_steps)
        return self.weight.numpy().tolist(), [float(each.numpy()) for each in counts]


class ByKeras(ByEngine):
    """A weight that a wrapper around one of Keras's optimizers trains."""

    def __init__(self, loss_scale, family, wrap=lambda inner: inner, **options):
        self.variable = variable_of(family, START)
        self.weight = keras_versions.tensor_of(self.variable)
        inner = wrap(family.optimizers.SGD(RATE))
        self.optimizer = LossScaleOptimizer(inner, loss_scale, **options)
        self.optimizer.build([self.variable])
        self.engine, self.scale = self.optimizer.engine, self.optimizer.scale_loss
        self.unscale = self.optimizer.get_unscaled_gradients

    def apply(self, grads):
        self.optimizer.apply_gradients(list(zip(grads, [self.variable])))
