"""Models whose training step is not finite, healthy ones, and what each report says.

A builder gets a `Told`, what the reports so far have advised, and makes a model that
follows it. A row of the data is zero, as padding is, so that the layer "bad" gets a row
of zeros.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from models import policy_of, seed_all
from overflowing import HOT, MODELS, Maker, data_for

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer
from lossscale.runtime.keras_versions import tensor_of

ROWS, FEATURES = 32, 8


#: What a text may say besides names, casts and a small number.
SAID = {
    "lower": "min_loss_scale=2.0**-24",
    "limit": "tf.exp(tf.minimum(x, 10.0))",
    "divide": "Divide the data by a number",
    "wide loss": "Compute it in float32: give the last layer",
    "smaller": "Give a FixedLossScale a smaller number",
}


class Told(Maker):
    """What reports have advised: also `small`, a number to add, and keys of `SAID`."""

    def __init__(self, family):
        super().__init__(family.keras)
        self.family, self.small, self.said = family, 0.0, set()

    def follow(self, text):
        before = (self.small, len(self.said))
        is_new = super().follow(text)
        self.small = max([self.small, *map(float, re.findall(r"\b1e-[0-9]", text))])
        self.said |= {key for key, words in SAID.items() if words in text}
        return is_new or before != (self.small, len(self.said))

    def optimizer(self, rate=1e-3, scale=None):
        least = 2.0**-24 if "lower" in self.said else 1.0
        scale = scale or DynamicLossScale(2.0**10, min_loss_scale=least)
        return LossScaleOptimizer(self.family.optimizers.SGD(rate), scale)

    def chain(self, *layers, loss="mse", rate=1e-4, **optimizer):
        """Returns a compiled model of layers in a row, with data and targets."""
        model = self.sequential(*layers)
        model.compile(self.optimizer(rate, **optimizer), loss=loss)
        return model, *data()

    def computing(self, compute, name="bad"):
        """Returns a layer that computes `compute(x, self)`."""
        return self.own(name, lambda x, _: compute(x, self))

    def sequential(self, *layers, units=FEATURES):
        return self.keras.Sequential([self.keras.Input([units]), *layers])

    def before(self, units=4):
        return self.layer("Dense", units, use_bias=False, name="before")

    def out(self, units=1, dtype="float32"):
        dtype = "float32" if "wide loss" in self.said else dtype
        given = {} if dtype is None else {"dtype": dtype}
        return self.layer("Dense", units, use_bias=False, name="out", **given)


def made(family, build, told=None):
    """Returns a model of `build` under mixed_float16, its inputs and its targets."""
    seed_all(family.keras)
    with policy_of(family.keras, "mixed_float16"):
        return build(told or Told(family))


def data():
    """Returns inputs and targets. The zero rows have an error."""
    x = np.random.default_rng(0).normal(size=[ROWS, FEATURES]).astype("float32")
    x[:2] = 0.0
    return x, x[:, :1] + np.float32(1.0)


class Case(NamedTuple):
    """A model that dies: how it is made, and what the report must say.

    Attributes:
      build: Makes it of a `Told`: `(model, x, y)`.
      place: A pattern of `where` and the last name of `layer` in the first report.
      says: What the report says, a pattern.
      needs: The names of the layers that must be float32, no more and no fewer.
      is_promised: Whether the advice is to be followed.
    """

    build: object
    place: str
    says: str
    needs: tuple = ()
    is_promised: bool = True


IN_FLOAT16 = "The loss is computed in float16"
FLOAT32 = r"dtype=\"float32\", name='"
DIVISOR, LOGS = "divisor holds zeros", "logarithm of a zero"
ZEROS, NEGATIVE = "argument holds zeros", "holds negative numbers"
AT_ONE = "infinite at 1 and -1"


# Models with a layer "bad"


def total(x):
    return tf.reduce_sum(tf.abs(x), -1, keepdims=True)


def squares(x):
    return tf.reduce_sum(x * x, -1, keepdims=True)


def near_one(x):
    return 1 - tf.tanh(tf.abs(x))


# What reports advise of an argument, with a small number.
def add(x, small):
    return x + small


def clip(x, small):
    return tf.clip_by_value(x, small - 1, 1 - small)


def above(least):
    return lambda x, small: tf.maximum(x, small + least)


def cured(cure, compute, argument=tf.identity, beside=0.0):
    """Computes something of an argument: of one that is cured, if that is advised."""

    def call(x, m):
        given = argument(x)
        return compute(cure(given, m.small) if m.small else given) + beside * x

    return call


def far(x, m):
    return tf.exp(tf.minimum(x * 0 + 800, 10.0) if "limit" in m.said else x * 0 + 800)


def root_recomputed(x, m):
    return tf.recompute_grad(lambda y: tf.sqrt(tf.nn.relu(y) + m.small) + y)(x)


ln, relu, root = tf.math.log, tf.nn.relu, tf.sqrt
#: What the layer "bad" computes, what the report says, and which layers must be
#: float32. A name with ' is of a fault on the way back. Each row of the table of causes
#: is met once: test_causes.py has its operations.
LAYERS = {
    "0/0": (lambda x, m: x / (total(x) + m.small), DIVISOR),
    "log(0)": (cured(add, ln, tf.abs), LOGS),
    "log(-1)": (cured(above(0), ln), f"{NEGATIVE}.*1e-3"),
    "log1p(-2)": (cured(above(-1), tf.math.log1p, lambda x: x * 9), "numbers below -1"),
    "acos(2)": (cured(clip, tf.acos, lambda x: x * 9), "beyond it makes NaN"),
    "exp(800)": (lambda x, m: far(x, m) * 1e-5 + x, "exponential of a large number"),
    "sqrt'(0)": (cured(add, root, relu, 1.0), ZEROS),
    "acos'(1)": (cured(clip, tf.acos, near_one, 1.0), AT_ONE),
    "sqrt'(0) recomputed": (root_recomputed, f"infinite derivative|{ZEROS}"),
    "square": (
        lambda x, _: root(total((x * 1e3) ** 2) + 1.0) * 1e-3 + x,
        *(FLOAT32, "bad"),
    ),
    "softmax": (lambda x, _: tf.exp(x * 30) / total(tf.exp(x * 30)), FLOAT32, "bad"),
    "sqrt'(1e-8)": (lambda x, _: root(relu(x) + 1e-8) + x, FLOAT32, "bad"),
    "0/1e-8": (lambda x, _: x / (tf.abs(x) + 1e-8) + x, FLOAT32, "bad", "before"),
    "masked row": (
        lambda x, _: x * tf.nn.softmax(x * 0 + tf.cast(tf.constant(-1e9), x.dtype)),
        *(FLOAT32, "bad"),
    ),
}
#: Which of them need a kernel for float16 that not every version has.
LIMITED = dict.fromkeys(("acos(2)", "acos'(1)"), "acos in float16")


def layer_of(compute, m):
    return m.chain(m.before(), m.computing(compute), m.out())


def lost_before(m):
    """Numbers that are zero in float16 only."""
    tiny = m.computing(lambda x, _: x * 1e-9, "tiny")
    bad = m.computing(lambda x, _: x / (total(x) + 1e-20) * 3)
    model, x, y = m.chain(m.before(), tiny, bad, m.out())
    return model, x[2:], y[2:]


def large_gradient(factor, bad, m):
    """A gradient that float16 does not hold where it is cast."""

    def loss(y, outputs):
        return factor * (y - outputs) ** 2

    return m.chain(m.before(), bad(m), m.out(), loss=loss, rate=2.0**-40)


def fixed(m):
    """A loss scale that is too high, and cannot fall."""
    number = 2.0**8 if "smaller" in m.said else 2.0**30
    scale = FixedLossScale(number, skip_nonfinite=True)
    return m.chain(m.before(), m.out(), rate=1e-3, scale=scale)


def bad_weights(m):
    model, x, y = m.chain(m.before(), m.out())
    model.set_weights([np.full(w.shape, np.nan) for w in model.get_weights()])
    return model, x, y


def huge(kind, m):
    kind = "float32" if "divide" in m.said else kind
    x = np.arange(ROWS * FEATURES).reshape(ROWS, FEATURES) + 70000
    given = m.keras.Input([FEATURES], dtype=kind)
    model = m.keras.Sequential([given, m.layer("Dense", 1, name="first")])
    model.compile(m.optimizer(1e-12), loss="mse")
    return model, (x / 1e5 if "divide" in m.said else x).astype(kind), data()[1]


# Models whose loss is at fault


def probability(m):
    """A float32 loss of a probability that float16 rounds to 1."""

    def loss(y, p):
        y = tf.cast(y, p.dtype)
        return -tf.reduce_mean(y * ln(p + m.small) + (1 - y) * ln(1 - p + m.small))

    kernel = m.keras.initializers.Constant(0.6)
    arguments = {"activation": "hard_sigmoid", "kernel_initializer": kernel}
    last = m.layer("Dense", 1, name="bad", **arguments)
    model, x, y = m.chain(last, loss=loss, rate=1e-6)
    return model, np.abs(x), y * 0


def _of_layer(name, compute, says, *needs):
    place = "gradient bad" if "'" in name else "forward bad"
    return Case(partial(layer_of, compute), place, says, needs)


def _small_before(m):
    return m.layer("Dense", 4, name="bad")


def _casting(m):
    return m.computing(lambda x, _: tf.cast(x, tf.float16))


_BOTH, _TINY = ("bad", "before"), ("bad", "tiny")
_SEAM = partial(large_gradient, 2.0**26, _small_before)
_CASTING = partial(large_gradient, 2.0**20, _casting)
CASES = {
    **{name: _of_layer(name, *row) for name, row in LAYERS.items()},
    "0/0 of what was lost": Case(lost_before, "forward bad", FLOAT32, _TINY),
    "probability": Case(probability, "loss None", "1e-3"),
    "large data": Case(partial(huge, "float32"), "data None", "largest value"),
    "integers": Case(partial(huge, "int32"), "data None", "largest value"),
    "seam": Case(_SEAM, "gradient bad", FLOAT32, _BOTH),
    "casts itself": Case(_CASTING, "gradient bad", "min_loss_scale"),
    "fixed scale": Case(fixed, "scale None", r"At 2\*\*30 .* no layer is at fault"),
    "weights": Case(bad_weights, "weights before", "kernel.*checkpoint", (), False),
}


# Models with a `train_step` of their own


def gradients(compute, weights, scale=tf.identity):
    """Returns a loss and the gradients of what `scale` makes of it."""
    with tf.GradientTape() as tape:
        loss = compute()
        scaled = scale(loss)
    return loss, tape.gradient(scaled, [tensor_of(weight) for weight in weights])


def update(optimizer, compute, layer):
    weights = layer.trainable_variables
    loss, grads = gradients(compute, weights, optimizer.scale_loss)
    optimizer.apply_gradients(list(zip(grads, weights)))
    return loss


def mse(one, other):
    return tf.reduce_mean(tf.cast(one - tf.cast(other, one.dtype), tf.float32) ** 2)


def own(m, step, *, is_compiled=False, rate=1e-5, **parts):
    """Returns a model without a `call`, whose step is `step(model, x, y)`."""

    class Own(m.keras.Model):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)
            self.other_optimizer = m.optimizer(rate)
            self.steps = 0

        def build(self, _=None):
            self.built = True

        def train_step(self, batch):
            x, y = batch
            self.steps += 1
            return {"loss": step(self, tf.cast(x, tf.float32), y)}

    if is_compiled:
        Own.train_step = tf.function(Own.train_step)
    model = Own()
    model.build()
    model.compile(m.optimizer(rate))
    return model, *data()


def minimizing(loss_of, m, *layers, **options):
    """Returns a model whose step minimizes `loss_of(network, x, y)`."""
    network = m.sequential(*layers)

    def step(model, x, y):
        return update(model.optimizer, lambda: loss_of(network, x, y), network)

    return own(m, step, network=network, **options)


def gan(compute, m):
    """Two networks, each with an optimizer of its own."""
    generator = m.sequential(m.before(FEATURES))
    norm = m.keras.layers.BatchNormalization(name="n")
    critic = m.sequential(m.dense("c", units=4), m.computing(compute), norm, m.out())

    def step(model, x, _):
        def of_critic():
            real = mse(critic(x, training=True), 1.0)
            return real + mse(critic(generator(x), training=True), 0.0)

        def of_generator():
            return mse(critic(generator(x, training=True), training=True), 1.0)

        update(model.other_optimizer, of_critic, critic)
        return update(model.optimizer, of_generator, generator)

    return own(m, step, generator=generator, critic=critic)


def penalty(small, m):
    """A norm of a gradient in the step itself, of which some are zero."""

    def loss(critic, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = critic(x, training=True)
        inner = tf.cast(tape.gradient(found, x), tf.float32)
        norm = tf.sqrt(squares(inner) + max(small, m.small))
        return mse(found, y) + 1e-3 * tf.reduce_mean((norm - 1) ** 2)

    return minimizing(loss, m, m.before(), m.layer("ReLU", name="relu"), m.out())


def accumulating(compute, m):
    """Noise, and gradients that a tf.function adds up over two batches."""
    network = m.sequential(m.before(), m.computing(compute), m.out())
    weights = network.trainable_variables
    sums = [tf.Variable(tf.zeros(w.shape), trainable=False) for w in weights]

    def step(model, x, y):
        for part in (0, 1):

            def compute(part=part):
                noisy = x[part::2] + tf.random.normal(tf.shape(x[part::2]), 0.0, 0.1)
                return mse(network(noisy, training=True), y[part::2])

            loss, grads = gradients(compute, weights, model.optimizer.scale_loss)
            grads = model.optimizer.get_unscaled_gradients(grads)
            for held, grad in zip(sums, grads):
                held.assign(grad if part == 0 else held + grad)
        totals = [tf.identity(held) for held in sums]
        model.optimizer.apply_gradients(list(zip(totals, weights)))
        return loss

    return own(m, step, is_compiled=True, network=network, sums=sums)


def summed(dtype, m):
    """A loss that the step sums in a dtype, or in that of its last layer."""

    def loss(network, x, y):
        found = network(x, training=True)
        wanted = tf.float32 if "wide loss" in m.said else dtype or found.dtype
        found = tf.cast(found, wanted)
        return tf.reduce_sum((tf.cast(y, found.dtype) - found) ** 2)

    model, x, y = minimizing(loss, m, m.before(), m.out(dtype=None), rate=1e-9)
    return model, x, y * 1e3


def masks_gradients(m):
    """A step that throws gradients away that are not finite, and a metric is NaN."""
    network = m.sequential(m.before(), m.computing(LAYERS["sqrt'(0)"][0]), m.out())
    weights = network.trainable_variables

    def step(model, x, y):
        loss, grads = gradients(lambda: mse(network(x, training=True), y), weights)
        fine = [tf.where(tf.math.is_finite(g), g, tf.zeros_like(g)) for g in grads]
        model.optimizer.apply_gradients(list(zip(fine, weights)))
        return loss

    return own(m, step, network=network)


_GAN = partial(gan, LAYERS["square"][0])
_SUMS = partial(accumulating, LAYERS["square"][0])
OWN_STEPS = {
    "gan": Case(_GAN, "forward bad", FLOAT32, ("bad",)),
    "penalty": Case(partial(penalty, 0.0), "gradient None", ZEROS),
    "accumulating": Case(_SUMS, "forward bad", FLOAT32, ("bad",)),
    "summed": Case(partial(summed, None), "loss None", IN_FLOAT16),
    "cast and summed": Case(partial(summed, tf.float16), "loss None", IN_FLOAT16),
}


# Healthy models


def plain(compute, m):
    return layer_of(lambda x, _: compute(x), m)


def same(x, _):
    return x


def cold(name, m):
    """One of those that overflow in their forward pass, with smaller weights."""
    m.is_hot = False
    model = MODELS[name](m)
    model.compile(m.optimizer(0.0), loss="mse")
    return model, *data_for(name)


def model_in_a_model(m):
    """A model of one's own class that only calls another, in float32."""
    wide = {"dtype": "float32"}
    first = m.layer("Dense", FEATURES, activation="relu", name="h", **wide)
    inner = m.sequential(first, m.layer("Dense", FEATURES, name="o", **wide))

    class Outer(m.keras.Model):
        def __init__(self):
            super().__init__()
            self.network = inner

        def call(self, x):
            return self.network(x)

    model, (x, _) = Outer(), data()
    model.compile(m.optimizer(0.0), loss="mse")
    return model, x, x * 3e3


def recurrent(m):
    """A loop over time with dropout, and a mask that Keras hands on."""
    embedding = m.layer("Embedding", 99, 4, mask_zero=True, name="e")
    loop = m.layer("LSTM", 4, name="loop", dropout=0.3, recurrent_dropout=0.3)
    layers = [embedding, loop, m.out()]
    model = m.keras.Sequential([m.keras.Input([FEATURES], dtype="int32"), *layers])
    model.compile(m.optimizer(), loss="mse")
    x, y = data()
    return model, (np.abs(x) * 3).astype("int32"), y


HEALTHY = {
    "model in a model": model_in_a_model,
    "two networks": partial(gan, same),
    "a norm above zero": partial(penalty, 1e-6),
    "accumulating": partial(accumulating, same),
    "LSTM with dropout and a mask": recurrent,
    "where(sqrt)": partial(
        plain, lambda x: tf.where(x > 0, tf.sqrt(x), tf.zeros_like(x))
    ),
    "where(log)": partial(plain, lambda x: tf.where(x > 1e3, ln(x - 1e3), x)),
    "hidden overflow": partial(
        plain, lambda x: tf.where(x < 1e3, x, tf.stop_gradient(tf.exp(x * 0 + 12)))
    ),
    "recomputed": partial(plain, tf.recompute_grad(lambda x: tf.nn.softplus(x) + x)),
    **{f"cold {name}": partial(cold, name) for name in HOT},
}
