"""Programs of programs.py, run by TensorFlow as they are printed."""

from __future__ import annotations

import itertools
import linecache

import numpy as np
import tensorflow as tf
from models import variable_of
from programs import CALLS, OPTIMIZERS

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer

START = 4.0
LIMIT = 2.0  # what lists are clipped to
_numbers = itertools.count()
# These are only called: what a listing itself says, AutoGraph converts.
do_not_convert = tf.autograph.experimental.do_not_convert


class Trained:
    """An optimizer and its variables, as programs use them."""

    def __init__(self, family, rate, sizes, loss_scale):
        self.optimizer = LossScaleOptimizer(family.optimizers.SGD(rate), loss_scale)
        self.variables = [
            variable_of(family, np.full([size], START, np.float32), name=f"v{i}")
            for i, size in enumerate(sizes)
        ]
        self.optimizer.build(self.variables)
        self.other = self

    @do_not_convert
    def scaled(self, loss, factor, by=None):
        """Returns gradients of the loss, scaled by an optimizer, this one's if None."""
        scale = (by or self).optimizer.scale_loss
        with tf.GradientTape() as tape:
            scaled = scale(self._loss(loss, factor))
        values = [v if isinstance(v, tf.Variable) else v.value for v in self.variables]
        return tape.gradient(scaled, values)

    def _loss(self, loss, factor):
        values = [tf.convert_to_tensor(v) for v in self.variables]
        if loss == "square":
            terms = [tf.reduce_sum(v * v) * 0.5 for v in values]
            return factor * tf.add_n(terms)
        linear = tf.add_n([tf.reduce_sum(v) for v in values])
        if loss == "product":
            return factor * linear * tf.convert_to_tensor(self.other.variables[0])[0]
        return factor * linear

    @do_not_convert
    def unscaled(self, grads):
        return self.optimizer.get_unscaled_gradients(grads)

    @do_not_convert
    def apply(self, grads, start=None, stop=None):
        self.optimizer.apply_gradients(list(zip(grads, self.variables[start:stop])))

    @do_not_convert
    def zeros(self):
        return [tf.zeros(v.shape) for v in self.variables]

    def state(self):
        """Returns all that a step changes."""
        scale, numbers = self.optimizer.loss_scale, ()
        if isinstance(scale, DynamicLossScale):
            state = (scale, scale.good_steps, scale.skipped_steps)
            numbers = tuple(float(each.numpy()) for each in state)
        weights = [variable.numpy().tolist() for variable in self.variables]
        return weights, numbers, int(self.optimizer.iterations.numpy())


def by_norm(grads):
    return tf.clip_by_global_norm(grads, LIMIT)[0]


def by_value(grads):
    return [tf.clip_by_value(grad, -LIMIT, LIMIT) for grad in grads]


def cleaned(grads):
    return [tf.where(tf.math.is_finite(g), g, tf.zeros_like(g)) for g in grads]


def halved(grads):
    return [grad * 0.5 for grad in grads]


def halved_if_large(grads):
    largest = tf.reduce_max([tf.reduce_max(tf.abs(grad)) for grad in grads])
    return [grad * tf.where(largest > LIMIT, 0.5, 1.0) for grad in grads]


def over_largest(grads):
    """A ratio of gradients: as many loss scales above it as below, but one."""
    return [grad * grad / tf.reduce_max(tf.abs(grad)) for grad in grads]


def copied(grads):
    return [tf.identity(grad) for grad in grads]


def added(grads, others):
    return [grad + other for grad, other in zip(grads, others)]


def total(grads):
    return tf.add_n([tf.reduce_sum(grad) for grad in grads])


def is_good(grads):
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(grad)) for grad in grads])


def nested(change):
    return tf.function(change)


def divided_directly(grads, loss_scale):
    return [grad / loss_scale for grad in grads]


def divided_by_value(grads, loss_scale):
    return [grad / loss_scale() for grad in grads]


def divided_by_reciprocal(grads, loss_scale):
    return [(1.0 / loss_scale) * grad for grad in grads]


def divided_by_power(grads, loss_scale):
    return [grad * tf.convert_to_tensor(loss_scale) ** -1 for grad in grads]


def divided_by_multiple(grads, loss_scale):
    return [grad * 4.0 / (loss_scale * 4.0) for grad in grads]


def divided_by_maximum(grads, loss_scale):
    return [grad / tf.maximum(loss_scale, 1.0) for grad in grads]


def divided_by_square(grads, loss_scale):
    return [grad * loss_scale / tf.square(loss_scale) for grad in grads]


def divided_by_a_function(grads, loss_scale):
    return tf.function(divided_directly)(grads, tf.convert_to_tensor(loss_scale))


_NAMES = (by_norm, by_value, cleaned, halved, halved_if_large, copied, added)
_NAMES += (total, is_good, nested, over_largest)
_NAMES += (divided_directly, divided_by_value, divided_by_reciprocal)
_NAMES += (divided_by_power, divided_by_multiple, divided_by_maximum)
_NAMES += (divided_by_square, divided_by_a_function)


def run(program, family, mode):
    """Returns the state of each optimizer, and what each call has logged.

    Args:
      program: A `Program`.
      family: The Keras.
      mode: "eager" or "graph".
    """
    trained = _trained(program, family)
    for each, other in zip(trained, reversed(trained)):
        each.other = other
    names = {each.__name__: do_not_convert(each) for each in _NAMES}
    names.update(zip(OPTIMIZERS, trained), tf=tf)
    listing = program.listing()
    _execute(listing, names)
    function = names["step" if program.way == CALLS else "run"]
    if mode == "graph":
        converts = any(f"{word} " in listing for word in ("if", "for"))
        function = tf.function(function, autograph=converts)
    factors, flags = (tf.constant(each) for each in zip(*program.batches))
    if program.way == CALLS:
        logs = [function(f, b) for f, b in zip(factors, flags)]
    else:
        logs = [function(factors, flags)]
    logs = [[float(log) for log in each or []] for each in logs]
    return [each.state() for each in trained], logs


def _trained(program, family):
    scales = [
        FixedLossScale(each.initial)
        if each.period is None
        else DynamicLossScale(each.initial, each.period, each.multiplier)
        for each in program.scales
    ]
    return [
        Trained(family, rate, sizes, scales[0 if program.is_shared else i])
        for i, (rate, sizes) in enumerate(zip(program.rates, program.sizes))
    ]


def _execute(listing, names):
    """Runs Python whose source AutoGraph will find."""
    file = f"<program {next(_numbers)}>"
    linecache.cache[file] = len(listing), None, listing.splitlines(True), file
    exec(compile(listing, file, "exec"), names)  # noqa: S102 - made by programs.py
