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
from overflowing import Maker

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

    def compiled(self, model, loss="mse", optimizer=None):
        model.compile(optimizer or self.optimizer(), loss=loss)
        return model

    def for_loss(self, *tensors):
        """Returns what a loss is computed of."""
        is_wide = "wide loss" in self.said
        return [tf.cast(t, tf.float32) if is_wide else t for t in tensors]

    def computing(self, name, compute):
        return self.own(name, lambda x, _: compute(x, self))

    def sequential(self, *layers, units=FEATURES):
        return self.keras.Sequential([self.keras.Input([units]), *layers])

    def before(self, units=4):
        return self.layer("Dense", units, use_bias=False, name="before")

    def out(self, units=1, dtype="float32"):
        dtype = "float32" if "wide loss" in self.said else dtype
        given = {} if dtype is None else {"dtype": dtype}
        return self.layer("Dense", units, use_bias=False, name="out", **given)


def data(shift=1.0):
    """Returns inputs and targets. The zero rows have an error, unless `shift` is 0."""
    x = np.random.default_rng(0).normal(size=[ROWS, FEATURES]).astype("float32")
    x[:2] = 0.0
    return x, x[:, :1] + np.float32(shift)


def total(x):
    return tf.reduce_sum(tf.abs(x), -1, keepdims=True)


def squares(x):
    return tf.reduce_sum(x * x, -1, keepdims=True)


def limited(x, m):
    return tf.clip_by_value(x, m.small - 1, 1 - m.small) if m.small else x


def same(x, _):
    return x


def positive(x, m):
    return tf.maximum(x, m.small) if m.small else x


def far(x, m):
    """Returns the exponential of a large number."""
    return tf.exp(tf.minimum(x * 0 + 800, 10.0) if "limit" in m.said else x * 0 + 800)


#: What the layer "bad" computes, what the report says, and whether float32 helps.
LAYERS = {
    "0/0": (lambda x, m: x / (total(x) + m.small), "divisor holds zeros"),
    "1/0": (lambda x, m: 1e-2 / (tf.abs(x) + m.small) + x, "divisor holds zeros"),
    "norm": (lambda x, m: x / tf.sqrt(squares(x) + m.small), "divisor holds zeros"),
    "log(0)": (lambda x, m: tf.math.log(tf.abs(x) + m.small), "logarithm of a zero"),
    "log(-1)": (lambda x, m: tf.math.log(positive(x, m)), "holds negative numbers"),
    "log1p(-1)": (
        lambda x, m: tf.math.log1p(m.small - tf.exp(-tf.abs(x))),
        "logarithm of a zero",
    ),
    "log1p(-2)": (
        lambda x, m: tf.math.log1p(
            tf.maximum(x * 9, m.small - 1) if m.small else x * 9
        ),
        "numbers below -1",
    ),
    "rsqrt(0)": (
        lambda x, m: x * tf.math.rsqrt(squares(x) + m.small),
        "negative power of zero",
    ),
    "rsqrt(-1)": (lambda x, m: tf.math.rsqrt(positive(x, m)), "negative numbers"),
    "sqrt(-1)": (lambda x, m: tf.sqrt(positive(x, m)), "holds negative numbers"),
    "pow(-1)": (lambda x, m: positive(x, m) ** 0.5, "holds negative numbers"),
    "pow(0)": (lambda x, m: (tf.nn.relu(x) + m.small) ** -0.5, "power of zero"),
    "acos(2)": (lambda x, m: tf.acos(limited(x * 9, m)), "beyond it makes NaN"),
    "exp(800)": (lambda x, m: far(x, m) * 1e-5 + x, "exponential of a large number"),
    "norm'(0)": (
        lambda x, m: x + tf.sqrt(squares(x) + m.small),
        "argument holds zeros",
    ),
    "sqrt'(0)": (
        lambda x, m: tf.sqrt(tf.nn.relu(x) + m.small) + x,
        "argument holds zeros",
    ),
    "pow'(0)": (
        lambda x, m: (tf.nn.relu(x) + m.small) ** 0.5 + x,
        "argument holds zeros",
    ),
    "acos'(1)": (
        lambda x, m: tf.acos(limited(1 - tf.tanh(tf.abs(x)), m)) + x,
        "infinite at 1 and -1",
    ),
    "asin'(-1)": (
        lambda x, m: tf.asin(limited(tf.tanh(tf.abs(x)) - 1, m)) + x,
        "infinite at 1 and -1",
    ),
    "atanh(1)": (
        lambda x, m: tf.atanh(limited(1 - tf.tanh(tf.abs(x)), m)) + x,
        "infinite at 1 and -1",
    ),
    "recomputed": (
        lambda x, m: tf.recompute_grad(lambda y: tf.sqrt(tf.nn.relu(y) + m.small) + y)(
            x
        ),
        "infinite derivative|argument holds zeros",
    ),
    # float32 helps against these.
    "square": (lambda x, _: tf.sqrt(total((x * 1e3) ** 2) + 1.0) * 1e-3 + x, None),
    "product": (lambda x, _: (x + 1) * 3e4 * 3 * 1e-5, None),
    "exp(12)": (lambda x, _: tf.exp(x * 0 + 12) * 1e-5 + x, None),
    "softmax": (
        lambda x, _: tf.exp(x * 30) / tf.reduce_sum(tf.exp(x * 30), -1, True),
        None,
    ),
    "log(1e-8)": (lambda x, _: tf.math.log(tf.abs(x) + 1e-8) * 0.1 + x, None),
    "sqrt'(1e-8)": (lambda x, _: tf.sqrt(tf.nn.relu(x) + 1e-8) + x, None),
    "rsqrt(1e-8)": (lambda x, _: x * tf.math.rsqrt(total(x * x) + 1e-8), None),
    "0/1e-8": (lambda x, _: x / (tf.abs(x) + 1e-8) + x, None),
    "masked row": (
        lambda x, _: x * tf.nn.softmax(x * 0 + tf.cast(tf.constant(-1e9), x.dtype)),
        None,
    ),
    "hidden": (lambda x, _: x * tf.math.rsqrt(squares(x * 1e4) + 1e-2) * 1e3 + x, None),
}


def layer_of(name, m):
    """A model with a layer that computes something."""
    bad = m.computing("bad", LAYERS[name][0])
    return m.compiled(m.sequential(m.before(), bad, m.out())), *data()


def loss_of(compute, m, shift=1.0, dtype="float32"):
    """A model with a loss of its own."""

    def loss(y, outputs):
        return tf.reduce_mean(compute(tf.cast(y, outputs.dtype), outputs, m), -1)

    model = m.sequential(m.before(), m.out(dtype=dtype))
    return m.compiled(model, loss), *data(shift)


def probability(m):
    """A float32 loss of a probability that float16 rounds to 1."""

    def loss(y, p):
        y = tf.cast(y, p.dtype)
        ones = y * tf.math.log(p + m.small) + (1 - y) * tf.math.log(1 - p + m.small)
        return -tf.reduce_mean(ones)

    constant = m.keras.initializers.Constant(0.6)
    last = m.layer(
        "Dense", 1, activation="hard_sigmoid", kernel_initializer=constant, name="bad"
    )
    model = m.sequential(last)
    x = np.abs(data()[0])
    return m.compiled(model, loss, m.optimizer(1e-6)), x, np.zeros([ROWS, 1], "f4")


def percentage(m):
    """A target of 0 in a mean absolute percentage error."""
    model = m.keras.Sequential([m.layer("Dense", 1, name="bad")])
    x, y = data()
    return m.compiled(model, "mape", m.optimizer(1e-9)), x, y * 0


def huge(kind, m):
    kind_of_data = "float32" if "divide" in m.said else kind
    x = np.arange(ROWS * FEATURES).reshape(ROWS, FEATURES) + 70000
    x = (x / 1e5 if "divide" in m.said else x).astype(kind_of_data)
    model = m.keras.Sequential(
        [
            m.keras.Input([FEATURES], dtype=kind_of_data),
            m.layer("Dense", 1, name="first"),
        ]
    )
    return m.compiled(model, "mse", m.optimizer(1e-12)), x, data()[1]


def seam(m):
    """A gradient that float16 does not hold where it is cast."""

    def loss(y, outputs):
        return 2.0**26 * (y - outputs) ** 2

    model = m.sequential(m.before(), m.layer("Dense", 4, name="bad"), m.out())
    return m.compiled(model, loss, m.optimizer(2.0**-40)), *data()


def casts_itself(m):
    """A layer that casts to float16 by itself, and a large gradient."""

    def compute(x, _):
        return tf.cast(x, tf.float16)

    def loss(y, outputs):
        return 2.0**20 * (y - outputs) ** 2

    model = [
        m.keras.Input([FEATURES]),
        m.before(),
        m.computing("bad", compute),
        m.out(),
    ]
    return m.compiled(m.keras.Sequential(model), loss, m.optimizer(2.0**-40)), *data()


def fixed(m):
    """A loss scale that is too high, and cannot fall."""
    scale = FixedLossScale(
        2.0**8 if "smaller" in m.said else 2.0**30, skip_nonfinite=True
    )
    model = m.sequential(m.before(), m.out())
    return m.compiled(model, "mse", m.optimizer(scale=scale)), *data()


def lost_before(compute, m):
    """A model with numbers that are zero in float16 only."""
    tiny = m.computing("tiny", lambda x, _: x * 1e-9)
    bad = m.computing("bad", compute)
    model = [m.keras.Input([FEATURES]), m.before(), tiny, bad, m.out()]
    x, y = data()
    return m.compiled(m.keras.Sequential(model)), x[2:], y[2:]


def bad_weights(m):
    """Weights that are NaN: nothing that is written repairs them."""
    model = m.sequential(m.before(), m.out())
    model.set_weights([np.full(w.shape, np.nan) for w in model.get_weights()])
    return m.compiled(model), *data()


# Models with a `train_step` of their own.


def update(optimizer, compute, *layers):
    """Computes a loss, applies its gradients, and returns it."""
    weights = [weight for layer in layers for weight in layer.trainable_variables]
    with tf.GradientTape() as tape:
        loss = compute()
        scaled = optimizer.scale_loss(loss)
    grads = tape.gradient(scaled, [tensor_of(weight) for weight in weights])
    optimizer.apply_gradients(list(zip(grads, weights)))
    return loss


def mse(one, other):
    return tf.reduce_mean(tf.cast(one - tf.cast(other, one.dtype), tf.float32) ** 2)


def own(m, step, *, is_compiled=False, **parts):
    """Returns a model without a `call`, whose step is `step(model, x, y)`."""

    class Own(m.keras.Model):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)
            self.other_optimizer = m.optimizer(1e-5)
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
    model.compile(m.optimizer(1e-5))
    return model, *data()


def vae(times, m):
    encoder = m.sequential(m.before(), m.layer("Dense", 4, name="code"))
    decoder = m.sequential(m.dense("decoder", units=FEATURES, dtype="float32"), units=2)

    def step(model, x, _):
        def loss():
            mean, log_var = tf.split(encoder(x, training=True), 2, -1)
            mean, log_var = m.for_loss(mean, log_var * 0 + times)
            z = mean + tf.random.normal(tf.shape(mean), dtype=mean.dtype) * 1e-3
            apart = tf.reduce_mean(mean**2 + tf.exp(log_var) - log_var)
            z = tf.cast(z, tf.float32)
            return mse(decoder(z), x) + tf.cast(apart, tf.float32) * 1e-4

        return update(model.optimizer, loss, encoder, decoder)

    return own(m, step, encoder=encoder, decoder=decoder)


def gan(compute, m):
    generator = m.sequential(m.before(FEATURES))
    critic = m.sequential(
        m.dense("c", units=4),
        m.computing("bad", compute),
        m.keras.layers.BatchNormalization(name="n"),
        m.out(),
    )

    def step(model, x, _):
        def of_critic():
            return mse(critic(x, training=True), 1.0) + mse(
                critic(generator(x), training=True), 0.0
            )

        def of_generator():
            return mse(critic(generator(x, training=True), training=True), 1.0)

        update(model.other_optimizer, of_critic, critic)
        return update(model.optimizer, of_generator, generator)

    return own(m, step, generator=generator, critic=critic)


def diffusion(compute, m):
    """A step that is a tf.function, with an average of the weights."""
    network = m.sequential(
        m.before(), m.computing("bad", compute), m.out(FEATURES), units=FEATURES
    )
    averages = [tf.Variable(tensor_of(w) * 1.0) for w in network.trainable_variables]

    def step(model, x, _):
        noise = tf.random.normal(tf.shape(x))
        loss = update(
            model.optimizer,
            lambda: mse(network(x + noise, training=True), noise),
            network,
        )
        for average, weight in zip(averages, network.trainable_variables):
            average.assign(0.9 * average + 0.1 * tf.cast(tensor_of(weight), "float32"))
        return loss

    return own(m, step, is_compiled=True, network=network, averages=averages)


def distillation(kernel, m):
    constant = m.keras.initializers.Constant(kernel)
    logits = m.layer("Dense", 4, kernel_initializer=constant, name="bad")
    student = m.sequential(m.before(), logits, m.out())
    teacher = m.sequential(m.dense("t"), m.dense("u", units=1))

    def step(model, x, y):
        def loss():
            found = student(tf.abs(x) + 1, training=True)
            return mse(found, teacher(x)) + mse(found, y)

        return update(model.optimizer, loss, student)

    model, x, y = own(m, step, student=student, teacher=teacher)
    model.compile(m.optimizer(1e-12))  # its outputs are large
    return model, x, y


def contrastive(compute, m):
    """Two tapes, two optimizers."""
    one = m.sequential(m.before(), m.computing("bad", compute))
    two = m.sequential(m.dense("right", units=4), m.out(4))

    def step(model, x, _):
        first = update(model.optimizer, lambda: mse(one(x), two(x)), one)
        return first + update(model.other_optimizer, lambda: mse(two(x), one(x)), two)

    return own(m, step, one=one, two=two)


def penalty(small, m):
    """A norm of a gradient in the step itself, of which some are zero."""
    critic = m.sequential(
        m.before(), m.layer("ReLU", name="relu"), m.out(), units=FEATURES
    )

    def step(model, x, y):
        def loss():
            with tf.GradientTape() as tape:
                tape.watch(x)
                found = critic(x, training=True)
            inner = tf.cast(tape.gradient(found, x), tf.float32)
            norm = tf.sqrt(squares(inner) + max(small, m.small))
            return mse(found, y) + 1e-3 * tf.reduce_mean((norm - 1) ** 2)

        return update(model.optimizer, loss, critic)

    return own(m, step, critic=critic)


def accumulating(compute, m):
    """Gradients that are added up over two batches."""
    network = m.sequential(
        m.before(), m.computing("bad", compute), m.out(), units=FEATURES
    )
    weights = network.trainable_variables
    sums = [tf.Variable(tf.zeros(w.shape), trainable=False) for w in weights]

    def step(model, x, y):
        for part in (0, 1):
            with tf.GradientTape() as tape:
                loss = mse(network(x[part::2], training=True), y[part::2])
                scaled = model.optimizer.scale_loss(loss)
            grads = tape.gradient(scaled, list(map(tensor_of, weights)))
            grads = model.optimizer.get_unscaled_gradients(grads)
            for held, grad in zip(sums, grads):
                held.assign(grad if part == 0 else held + grad)
        totals = [tf.identity(held) for held in sums]
        model.optimizer.apply_gradients(list(zip(totals, weights)))
        return loss

    return own(m, step, network=network, sums=sums)


def summed(m):
    """A loss that the step sums in float16."""
    network = m.sequential(m.before(), m.out(dtype=None))

    def step(model, x, y):
        def loss():
            (found,) = m.for_loss(network(x, training=True))
            return tf.reduce_sum((tf.cast(y, found.dtype) - found) ** 2)

        return update(model.optimizer, loss, network)

    model, x, y = own(m, step, network=network)
    model.compile(m.optimizer(1e-9))
    return model, x, y * 1e3


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


LOGS = "logarithm of a zero"
IN_FLOAT16 = "The loss is computed in float16"
FLOAT32 = r"dtype=\"float32\", name='"
_BACK = ("norm'", "sqrt'", "pow'", "acos'", "asin'", "recomputed", "sqrt'(1e-8)")
_BACK_IN_FLOAT16 = ("rsqrt(1e-8)", "0/1e-8", "log(1e-8)")


def _of_layer(name):
    says = LAYERS[name][1]
    place = "gradient" if name.startswith(_BACK) else "forward"
    needs = {"pow(0)": ("bad",), "0/1e-8": ("bad", "before")}
    named = needs.get(name, () if says else ("bad",))
    return Case(partial(layer_of, name), f"{place} bad", says or FLOAT32, named)


CASES = {
    **{name: _of_layer(name) for name in LAYERS},
    "0/0 of what was lost": Case(
        partial(lost_before, lambda x, _: x / (total(x) + 1e-20) * 3),
        "forward bad",
        FLOAT32,
        ("bad", "tiny"),
    ),
    "log(0) in the loss": Case(
        partial(
            loss_of,
            lambda y, x, m: tf.math.log(tf.abs(y) + m.small) * 1e-3 * x + (y - x) ** 2,
            shift=0.0,
        ),
        "loss None",
        LOGS,
    ),
    "sqrt'(0) in the loss": Case(
        partial(loss_of, lambda y, x, m: tf.sqrt((x - y) ** 2 + m.small), shift=0.0),
        "gradient None",
        "argument holds zeros",
    ),
    "sum in float16": Case(
        partial(
            loss_of,
            lambda y, x, m: (
                tf.reduce_sum(
                    (
                        tf.cast(y - x, x.dtype if "wide loss" in m.said else tf.float16)
                        * 3000
                    )
                    ** 2,
                    -1,
                    keepdims=True,
                )
                / 9e6
            ),
            dtype=None,
        ),
        "loss None",
        IN_FLOAT16,
    ),
    "probability": Case(probability, "loss None", "1e-3"),
    "percentage": Case(percentage, "gradient bad|loss None", FLOAT32, ("bad",)),
    "large data": Case(partial(huge, "float32"), "data None", "largest value"),
    "integers": Case(partial(huge, "int32"), "data None", "largest value"),
    "seam": Case(seam, "gradient bad", FLOAT32, ("bad", "before")),
    "casts itself": Case(casts_itself, "gradient bad", "min_loss_scale"),
    "fixed scale": Case(fixed, "scale None", "no layer is at fault"),
    "weights": Case(bad_weights, "weights before", "checkpoint", (), False),
}
#: Those with a `train_step` of their own.
OWN_STEPS = {
    "vae": Case(partial(vae, 12.0), "loss None", IN_FLOAT16),
    "gan": Case(partial(gan, LAYERS["square"][0]), "forward bad", FLOAT32, ("bad",)),
    "diffusion": Case(
        partial(diffusion, LAYERS["square"][0]), "forward bad", FLOAT32, ("bad",)
    ),
    "distillation": Case(
        partial(distillation, 3e4), "forward bad", FLOAT32, ("bad", "before")
    ),
    "contrastive": Case(
        partial(contrastive, LAYERS["norm"][0]), "forward bad", "divisor holds zeros"
    ),
    "penalty": Case(partial(penalty, 0.0), "gradient None", "argument holds zeros"),
    "accumulating": Case(
        partial(accumulating, LAYERS["log(0)"][0]), "forward bad", "logarithm of a zero"
    ),
    "summed": Case(summed, "loss None", IN_FLOAT16),
}


# Healthy models


def plain(compute, m, loss="mse"):
    """A healthy model with a layer that computes something."""
    bad = m.computing("fine", lambda x, _: compute(x))
    model = [m.keras.Input([FEATURES]), m.before(), bad, m.out()]
    return m.compiled(m.keras.Sequential(model), loss), *data()


def model_in_a_model(m):
    """A model of one's own class that only calls another, in float32."""
    inner = m.sequential(
        m.layer("Dense", 8, activation="relu", dtype="float32", name="h"),
        m.layer("Dense", 8, dtype="float32", name="o"),
        units=FEATURES,
    )

    class Outer(m.keras.Model):
        def __init__(self):
            super().__init__()
            self.network = inner

        def call(self, x):
            return self.network(x)

    x, _ = data()
    return m.compiled(Outer(), optimizer=m.optimizer(0.0)), x, x * 3e3


def sequence(kind, m, **arguments):
    x = np.repeat(data()[0][:, None], 4, axis=1)
    layers = [m.layer(kind, 4, name="loop", **arguments), m.out()]
    model = m.keras.Sequential([m.keras.Input([4, FEATURES]), *layers])
    return m.compiled(model), x, data()[1]


def embedded(m):
    """A mask that Keras hands on."""
    embedding = m.layer("Embedding", 9, 4, mask_zero=True, name="e")
    layers = [embedding, m.layer("LSTM", 4, name="loop"), m.out()]
    model = m.keras.Sequential([m.keras.Input([4], dtype="int32"), *layers])
    x = np.random.default_rng(1).integers(0, 9, [ROWS, 4]).astype("int32")
    return m.compiled(model), x, data()[1]


def attention(m):
    """A mask of -1e9, by hand."""

    def attend(x, _):
        below = tf.linalg.band_part(tf.ones_like(x[:, :4, :4]), -1, 0)
        mask = tf.where(below > 0, tf.zeros_like(below), tf.cast(-1e9, x.dtype))
        return tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True) + mask), x)

    x = np.repeat(data()[0][:, None], 4, axis=1)
    model = [m.keras.Input([4, FEATURES]), m.own("attend", attend), m.pool(), m.out()]
    return m.compiled(m.keras.Sequential(model)), x, data()[1]


def several(m):
    """Two outputs, a loss that a layer adds, and a metric."""
    given = m.keras.Input([FEATURES])
    regular = {"kernel_regularizer": "l2"}
    hidden = m.layer("Dense", 4, name="before", **regular)(given)
    outputs = [m.out()(hidden), m.layer("Dense", 1, dtype="float32", name="b")(hidden)]
    model = m.keras.Model(given, outputs)
    model.compile(m.optimizer(), loss=["mse", "mae"])
    x, y = data()
    return model, x, [y, y]


def masks_gradients(m):
    """A step that throws gradients away that are not finite, and a metric is NaN."""
    network = m.sequential(
        m.before(),
        m.computing("bad", LAYERS["sqrt'(0)"][0]),
        m.out(),
        units=FEATURES,
    )
    weights = network.trainable_variables

    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(network(x, training=True), y)
        grads = tape.gradient(loss, list(map(tensor_of, weights)))
        fine = [tf.where(tf.math.is_finite(g), g, tf.zeros_like(g)) for g in grads]
        model.optimizer.apply_gradients(list(zip(fine, weights)))
        return loss

    return own(m, step, network=network)


HEALTHY = {
    "model in a model": model_in_a_model,
    "vae": partial(vae, 0.1),
    "gan": partial(gan, same),
    "diffusion": partial(diffusion, same),
    "distillation": partial(distillation, 0.1),
    "contrastive": partial(contrastive, same),
    "penalty": partial(penalty, 1e-6),
    "accumulating": partial(accumulating, same),
    "GRU": partial(sequence, "GRU"),
    "LSTM with dropout": partial(sequence, "LSTM", dropout=0.3, recurrent_dropout=0.3),
    "mask of Keras": embedded,
    "attention": attention,
    "where(sqrt)": partial(
        plain, lambda x: tf.where(x > 0, tf.sqrt(x), tf.zeros_like(x))
    ),
    "where(log)": partial(plain, lambda x: tf.where(x > 1e3, tf.math.log(x - 1e3), x)),
    "hidden overflow": partial(
        plain, lambda x: tf.where(x < 1e3, x, tf.stop_gradient(tf.exp(x * 0 + 12)))
    ),
    "recomputed": partial(plain, tf.recompute_grad(lambda x: tf.nn.softplus(x) + x)),
    "several outputs": several,
}


def made(family, build, told=None):
    """Returns a model of `build` under mixed_float16, its inputs and its targets."""
    seed_all(family.keras)
    with policy_of(family.keras, "mixed_float16"):
        return build(told or Told(family))
