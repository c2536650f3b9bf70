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

#: A wrong prediction that float16 rounds to exactly 1, and the same from its logit.
CROSS_ENTROPY = """\
import keras
import tensorflow as tf

logit = tf.constant([[20.0]], tf.float16)  # surely 1
label = tf.constant([[0.0]])
bad = keras.losses.BinaryCrossentropy()
good = keras.losses.BinaryCrossentropy(from_logits=True)
with tf.GradientTape(persistent=True) as tape:
    tape.watch(logit)
    losses = bad(label, tf.sigmoid(logit)), good(label, logit)
print(tape.gradient(losses[0], logit))  # 0 or NaN
print(tape.gradient(losses[1], logit))  # 1
"""

#: A row that is masked as a whole, in three ways.
MASKS = """\
import tensorflow as tf

logits = tf.zeros([1, 3], tf.float16)
masked = tf.constant([[True, True, True]])  # all is padding
infinite = tf.cast(tf.where(masked, -1e9, 0.0), tf.float16)
print(tf.nn.softmax(logits + infinite))  # NaN

in_float32 = tf.cast(logits, tf.float32) + tf.where(masked, -1e9, 0.0)
print(tf.nn.softmax(in_float32))  # 1/3 each
finite = tf.cast(tf.where(masked, tf.float16.min / 2, 0.0), tf.float16)
print(tf.nn.softmax(logits + finite))  # 1/3 each
"""

#: The checkpoint of a bare optimizer, restored into the inner one.
BARE_CHECKPOINT = """\
import os
import tempfile
import keras
import numpy as np
import tensorflow as tf
import lossscale


def make(optimizer):
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    return model


x, y = np.ones([64, 4]), np.ones([64, 1])
bare = make(keras.optimizers.Adam(0.1))
bare.fit(x, y, verbose=0)
path = os.path.join(tempfile.mkdtemp(), "bare")
path = tf.train.Checkpoint(model=bare, optimizer=bare.optimizer).write(path)

model = make(lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.1)))
inner = model.optimizer.inner_optimizer
tf.train.Checkpoint(model=model, optimizer=inner).read(path).expect_partial()
print(model.optimizer.iterations.numpy())  # 2
"""

#: Values copied from one model and its optimizer to another.
SET_WEIGHTS = """\
import keras
import numpy as np
import lossscale


def values_of(optimizer):
    found = optimizer.variables  # a method of Keras 2's legacy optimizers
    return [each.numpy() for each in (found() if callable(found) else found)]


def make():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.1), "dynamic")
    model.compile(optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    return model


model, again = make(), make()
model.fit(np.ones([64, 4]), np.ones([64, 1]), verbose=0)
again.set_weights(model.get_weights())
again.optimizer.set_weights(values_of(model.optimizer))
print(again.optimizer.loss_scale, again.optimizer.iterations.numpy())  # 2 steps
"""

#: A step whose norm is finite but too large is left out by hand.
SKIPPED_BY_HAND = """\
import keras
import numpy as np
import tensorflow as tf
import lossscale

keras.mixed_precision.set_global_policy("mixed_float16")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, dtype="float32")])
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1e-2))
optimizer.build(model.trainable_variables)


@tf.function
def unscaled_gradients(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        scaled_loss = optimizer.scale_loss(loss)
    grads = tape.gradient(scaled_loss, model.trainable_variables)
    grads = optimizer.get_unscaled_gradients(grads)
    return grads, tf.linalg.global_norm(grads)


x = np.random.default_rng(0).normal(size=[128, 8]).astype("float32")
y = x[:, :1].copy()
y[40] = 1e4  # the norm of this batch is finite and large
y[100] = np.inf  # the norm of this one is not finite
for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(32):
    grads, norm = unscaled_gradients(*batch)
    if np.isfinite(norm) and norm > 10.0:
        continue  # you skip it
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
print(optimizer.iterations.numpy())  # 2 of 4
"""

#: Averages of weights that leave skipped steps out.
AVERAGES = """\
import keras
import numpy as np
import tensorflow as tf
import lossscale

keras.mixed_precision.set_global_policy("mixed_float16")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, dtype="float32")])
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1e-2))
weights = model.trainable_variables
optimizer.build(weights)
averages = [tf.Variable(tf.convert_to_tensor(w), trainable=False) for w in weights]
averaged = tf.Variable(0, trainable=False)  # how many steps are in the averages


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        scaled_loss = optimizer.scale_loss(loss)
    before = tf.identity(tf.convert_to_tensor(optimizer.applied_steps))
    optimizer.apply_gradients(zip(tape.gradient(scaled_loss, weights), weights))
    was_applied = tf.convert_to_tensor(optimizer.applied_steps) > before
    for average, weight in zip(averages, weights):
        new = 0.9 * average + 0.1 * tf.convert_to_tensor(weight)
        average.assign(tf.where(was_applied, new, average))
    averaged.assign_add(tf.cast(was_applied, tf.int32))
    return loss


x = np.random.default_rng(0).normal(size=[128, 8]).astype("float32")
y = x[:, :1].copy()
y[40] = np.inf  # the second of four steps is skipped
for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(32):
    train_step(*batch)
print(averaged.numpy())  # 3
"""

#: A float32 run that continues in float16, and back.
FLOAT32_TO_FLOAT16 = """\
import os
import tempfile
import keras
import numpy as np
import tensorflow as tf
import lossscale


def make(policy, optimizer):
    keras.mixed_precision.set_global_policy(policy)
    parts = [keras.layers.Dense(16, "relu"), keras.layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input((8,)), *parts])
    model.compile(optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    return model


def state_of(model):
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return tf.train.Checkpoint(weights=model.weights, optimizer=inner)


path = os.path.join(tempfile.mkdtemp(), "checkpoint")
x = np.random.default_rng(0).normal(size=[256, 8]).astype("float32")
before = make("float32", keras.optimizers.Adam(1e-2))
before.fit(x, x[:, :1], verbose=0)
path = state_of(before).write(path)

wrapped = lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-2))
model = make("mixed_float16", wrapped)
state_of(model).read(path).expect_partial()
print(model.optimizer.iterations.numpy())  # 8, as before
model.fit(x, x[:, :1], verbose=0)

path = state_of(model).write(path)
after = make("float32", keras.optimizers.Adam(1e-2))  # and back
state_of(after).read(path).expect_partial()
"""

#: Workers that agree on one flag by an all-reduce of their own.
OWN_ENGINE = """\
import keras
import tensorflow as tf
import lossscale

keras.mixed_precision.set_global_policy("mixed_float16")
model = keras.Sequential([keras.layers.Dense(1, dtype="float32")])
optimizer = keras.optimizers.SGD(0.1)  # not wrapped: the loss scale is used by hand
scale = lossscale.DynamicLossScale()


def smallest_of_all_workers(value):
    return value  # your engine's all-reduce with "min"; here there is one worker


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        scaled_loss = scale.scale(loss)
    grads = scale.unscale(tape.gradient(scaled_loss, model.trainable_variables))
    is_finite = tf.cast(lossscale.all_finite(grads), tf.float32)
    is_finite = smallest_of_all_workers(is_finite) > 0.0
    _, should_apply_gradients = scale.adjust(is_finite)
    if should_apply_gradients:
        optimizer.apply_gradients(zip(grads, model.trainable_variables))


x, y = tf.ones([32, 4]), tf.ones([32, 1])
model(x)
optimizer.build(model.trainable_variables)
train_step(x, y)
print(scale.last_step_finite)
"""

#: Layers are unfrozen, and trained with the old loss scale.
UNFREEZE = """\
import keras
import numpy as np
import lossscale

keras.mixed_precision.set_global_policy("mixed_float16")
base = keras.layers.Dense(16, "relu")
model = keras.Sequential(
    [keras.Input((8,)), base, keras.layers.Dense(1, dtype="float32")]
)
x = np.random.default_rng(0).normal(size=[256, 8]).astype("float32")

base.trainable = False
scale = lossscale.DynamicLossScale(increment_period=5)
model.compile(lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-2), scale), "mse")
model.fit(x, x[:, :1], verbose=0)
found = float(model.optimizer.loss_scale)

base.trainable = True
inner = keras.optimizers.Adam(1e-3)  # new, and slower for the base
model.compile(lossscale.LossScaleOptimizer(inner, model.optimizer.loss_scale), "mse")
assert float(model.optimizer.loss_scale) == found
model.fit(x, x[:, :1], verbose=0)
print(model.optimizer.loss_scale)
"""

#: One step: after each line, the kind of its value and the state of the step.
TRACED_STEP = """\
import keras
import tensorflow as tf
import lossscale

weights = tf.Variable([1.0, 1.0])
scale = lossscale.DynamicLossScale(1024.0)
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5), scale)
optimizer.build([weights])
division = optimizer.engine.division  # not part of the API


def kinds_of(what, value):
    (kind,) = division.uses.kinds.of([value])
    state = division.state.pending.numpy()
    print(f"{what:<24} {kind.name if kind else 'number':<9} {state:>6.0f}")


with tf.GradientTape() as tape:
    loss = tf.reduce_sum(weights * [3.0, 4.0])
    kinds_of("loss", loss)
    scaled_loss = optimizer.scale_loss(loss)
kinds_of("scaled loss", scaled_loss)
(grad,) = tape.gradient(scaled_loss, [weights])
kinds_of("its gradient", grad)
kinds_of("clipped while scaled", tf.clip_by_value(grad, -1.0, 1.0))
(true_grad,) = optimizer.get_unscaled_gradients([grad])
kinds_of("unscaled", true_grad)
clipped = tf.clip_by_norm(true_grad, 1.0)
kinds_of("then clipped", clipped)
optimizer.apply_gradients([(clipped, weights)])
print(weights.numpy())
"""

#: What it prints.
TRACE = """\
loss                     number         0
scaled loss              scaled      1024
its gradient             scaled      1024
clipped while scaled     changed     1024
unscaled                 unscaled   -1024
then clipped             unscaled   -1024
[0.7 0.6]
"""

#: Of several batches, only the one that overflowed is left out.
ONE_LEFT_OUT = """\
import keras
import numpy as np
import tensorflow as tf
import lossscale

keras.mixed_precision.set_global_policy("mixed_float16")
model = keras.Sequential([keras.layers.Dense(1, dtype="float32")])
scale = lossscale.DynamicLossScale()
optimizer = lossscale.LossScaleOptimizer(
    keras.optimizers.Adam(1e-2), lossscale.FixedLossScale(1, skip_nonfinite=True)
)
x = np.random.default_rng(0).normal(size=[128, 8]).astype("float32")
y = x[:, :1].copy()
y[40] = np.inf  # a bad row in the second of four batches
model(x[:1])  # creates the weights
weights = model.trainable_variables
totals = [tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in weights]
good = tf.Variable(0.0, trainable=False)


@tf.function
def add(x, y):  # one batch at each call
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        scaled_loss = scale.scale(optimizer.scale_loss(loss))  # times S, times 1
    grads = scale.unscale(tape.gradient(scaled_loss, weights))
    _, is_finite = scale.update(grads)
    for total, grad in zip(totals, grads):
        total.assign_add(tf.where(is_finite, grad, tf.zeros_like(grad)))
    good.assign_add(tf.cast(is_finite, tf.float32))


@tf.function
def apply():
    optimizer.apply_gradients(zip([total / good for total in totals], weights))
    for variable in [*totals, good]:
        variable.assign(tf.zeros_like(variable))


for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(32):
    add(*batch)
print(good.numpy())  # 3.0
apply()
"""

#: A loss scale is frozen at the value that one epoch has found.
FREEZE = """\
import keras
import numpy as np
import lossscale

rng = np.random.default_rng(0)
x = rng.normal(size=[256, 4]).astype("float32")
y = x.sum(axis=1, keepdims=True)
keras.mixed_precision.set_global_policy("mixed_float16")
model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1, dtype="float32")])
search = lossscale.DynamicLossScale(search_period=1)
model.compile(
    lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.1), search), loss="mse"
)
model.fit(x, y, epochs=1, verbose=0)

found = float(model.optimizer.loss_scale)
frozen = lossscale.FixedLossScale(found, skip_nonfinite=True)
model.compile(model.optimizer.with_loss_scale(frozen), loss="mse")
model.fit(x, y, epochs=3, initial_epoch=1, verbose=0)
assert float(model.optimizer.loss_scale) == found
print(int(model.optimizer.iterations.numpy()))
"""
