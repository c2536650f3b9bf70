"""Programs of users which the pages describe in words, and show only in part."""

from __future__ import annotations

#: What a loop of one's own begins with: a model of one layer, and 128 rows.
LOOP = """\
import keras
import numpy as np
import tensorflow as tf
import lossscale

keras.mixed_precision.set_global_policy("mixed_float16")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, dtype="float32")])
weights = model.trainable_variables
x = np.random.default_rng(0).normal(size=[128, 8]).astype("float32")
y = x[:, :1].copy()
y[40] = np.inf  # a bad row in the second of four batches
batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
"""

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

#: A step whose norm is finite but too large is left out by hand.
SKIPPED_BY_HAND = """\
y[40], y[100] = 1e4, np.inf  # norms: finite and large, and not finite
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1e-2))
optimizer.build(weights)


@tf.function
def unscaled_gradients(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        scaled_loss = optimizer.scale_loss(loss)
    grads = tape.gradient(scaled_loss, weights)
    grads = optimizer.get_unscaled_gradients(grads)
    return grads, tf.linalg.global_norm(grads)


for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(32):
    grads, norm = unscaled_gradients(*batch)
    if np.isfinite(norm) and norm > 10.0:
        continue  # you skip it
    optimizer.apply_gradients(zip(grads, weights))
print(optimizer.iterations.numpy())  # 2 of 4
"""

#: Averages of weights that leave skipped steps out.
AVERAGES = """\
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1e-2))
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


for batch in batches:
    train_step(*batch)
print(averaged.numpy())  # 3
"""

#: Layers are unfrozen, and trained with the old loss scale.
UNFREEZE = """\
base = keras.layers.Dense(16, "relu")
model = keras.Sequential(
    [keras.Input((8,)), base, keras.layers.Dense(1, dtype="float32")]
)
base.trainable = False
scale = lossscale.DynamicLossScale(increment_period=5)
model.compile(lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-2), scale), "mse")
model.fit(x, x[:, :1], 16, verbose=0)
found = float(scale)

base.trainable = True
inner = keras.optimizers.Adam(1e-3)  # new, and slower for the base
model.compile(lossscale.LossScaleOptimizer(inner, model.optimizer.loss_scale), "mse")
assert float(model.optimizer.loss_scale) == found
model.fit(x, x[:, :1], 16, verbose=0)
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
scale = lossscale.DynamicLossScale()
optimizer = lossscale.LossScaleOptimizer(
    keras.optimizers.Adam(1e-2), lossscale.FixedLossScale(1, skip_nonfinite=True)
)
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


for batch in batches:
    add(*batch)
print(good.numpy())  # 3.0
apply()
"""
