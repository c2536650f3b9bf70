"""Weights that tell by what their gradients were divided, to the last bit.

Each begins at 8, and is trained with SGD(1.0). Its true gradient is the factor of its
loss, a power of two: so what was subtracted is the gradient as it was applied.
"""

import warnings
from contextlib import contextmanager

import numpy as np
import tensorflow as tf
from models import variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer, LossScaleWarning

START, S = 8.0, 1024.0


class Trained:
    """An optimizer and its variables, with what a loop does with them."""

    def __init__(self, family, loss_scale=None, sizes=(4,), setting=(), **options):
        """`setting` has more arguments for SGD."""
        if loss_scale is None:
            loss_scale = DynamicLossScale(S, 1000)
        inner = family.optimizers.SGD(1.0, **dict(setting))
        self.optimizer = LossScaleOptimizer(inner, loss_scale, **options)
        self.variables = [
            variable_of(family, np.full([size], START, np.float32), name=f"v{i}")
            for i, size in enumerate(sizes)
        ]
        self.optimizer.build(self.variables)

    def scaled(self, factor):
        """Returns gradients of the scaled loss."""
        return gradients(self.optimizer.scale_loss, factor, self.variables)

    def unscaled(self, factor):
        return self.optimizer.get_unscaled_gradients(self.scaled(factor))

    def apply(self, grads):
        self.optimizer.apply_gradients(list(zip(grads, self.variables)))

    def subtracted(self):
        """Returns what was subtracted from each variable, a number if there is one."""
        found = [START - variable.numpy() for variable in self.variables]
        for each in found:
            assert len(set(each.tolist())) == 1, each
        numbers = [float(each[0]) for each in found]
        return numbers[0] if len(numbers) == 1 else numbers

    def state(self):
        """Returns the loss scale, the good steps in a row, and the skipped ones."""
        scale = self.optimizer.loss_scale
        return (
            float(scale.numpy()),
            int(scale.good_steps.numpy()),
            int(scale.skipped_steps.numpy()),
        )


def gradients(scale, factor, variables):
    """Returns the gradients of `scale(loss)`: `factor` times what `scale` does."""
    with tf.GradientTape() as tape:
        terms = [tf.reduce_sum(factor * tf.convert_to_tensor(v)) for v in variables]
        scaled = scale(tf.add_n(terms))
    values = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    return tape.gradient(scaled, values)


def of_loss(scale, loss, grads):
    """Returns the gradients of `scale(loss)`: `grads` times what `scale` does.

    A tape makes them, so it is seen that they are of this loss. Either may be bad.
    """

    @tf.custom_gradient
    def forward(*weights):
        del weights
        return tf.identity(loss), lambda upstream: [grad * upstream for grad in grads]

    weights = [tf.zeros_like(grad) for grad in grads]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        scaled = scale(forward(*weights))
    return tape.gradient(scaled, weights)


def clip(grads):
    """Clips as a loop that hides an infinity."""
    return [tf.clip_by_value(grad, -1.0, 1.0) for grad in grads]


def changes_nothing(grads):
    """A function of its own: what it returns is of no kind."""
    return tf.function(lambda *values: [value * 1.0 for value in values])(*grads)


def sharing(family, loss_scale=None):
    """Returns two optimizers that share a loss scale."""
    if loss_scale is None:
        loss_scale = DynamicLossScale(S, 1000)
    return tuple(Trained(family, loss_scale, (8,)) for _ in range(2))


@contextmanager
def heard():
    """Yields a list. At the end it has the messages of lossscale's warnings within."""
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    ours = [w for w in caught if issubclass(w.category, LossScaleWarning)]
    messages += [str(warning.message) for warning in ours]


@contextmanager
def warned(times=0):
    """Checks how often lossscale warns within."""
    with heard() as messages:
        yield
    assert len(messages) == times, [each[:60] for each in messages]
