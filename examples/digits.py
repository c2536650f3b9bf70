"""Trains handwritten digits in float16, with a loss scale that finds its own size.

    python examples/digits.py

Real data: scikit-learn's 1,797 digits of 8 x 8 pixels. The loss has a small weight,
as the terms of a larger model's loss have. In float32 this changes nothing, since Adam
divides by the gradients' size. In float16 most gradients are then smaller than the
smallest number above zero, and become zero. With a loss scale they survive.

The script trains half-way, saves a checkpoint, trains on, starts over from the
checkpoint and shows that both runs end with equal values. Then it trains the same
network in float32, and in float16 without loss scaling, prints a table, and draws a
picture.
"""

import argparse
import os
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import lossscale

keras = tf.keras

#: Makes most gradients so small that they become zero in float16.
LOSS_WEIGHT = 2.0**-18
#: log2 of half of float16's smallest number, 2**-24. Smaller numbers become zero.
SMALLEST = -25
EPOCHS = 20
BATCH_SIZE = 64
SEED = 1
#: The picture is beside this file; the README shows it.
PICTURE = os.path.splitext(os.path.abspath(__file__))[0] + ".png"


def load():
    """Returns training and test images, training and test labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    return train_test_split(images, labels, random_state=SEED, stratify=labels)


def make_model(policy, loss_scale):
    """Returns a compiled network, with the same initial weights every time.

    Args:
      policy: "float32" or "mixed_float16".
      loss_scale: What `lossscale.LossScaleOptimizer` takes; 1 is no loss scaling.
    """
    keras.mixed_precision.set_global_policy(policy)

    def convolution(filters, seed):
        return keras.layers.Conv2D(
            filters,
            3,
            padding="same",
            activation="relu",
            kernel_initializer=keras.initializers.GlorotUniform(seed=seed),
        )

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            convolution(32, SEED),
            convolution(32, SEED + 1),
            keras.layers.MaxPooling2D(),
            convolution(64, SEED + 2),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            # The last layer and the loss in float32, as Keras advises.
            keras.layers.Dense(
                10,
                dtype="float32",
                kernel_initializer=keras.initializers.GlorotUniform(seed=SEED + 3),
            ),
        ]
    )
    keras.mixed_precision.set_global_policy("float32")
    # Adam's usual epsilon of 1e-7 is large beside gradients as small as these.
    adam = keras.optimizers.Adam(2e-3, epsilon=1e-16)
    model.compile(
        lossscale.LossScaleOptimizer(adam, loss_scale),
        loss=small_loss,
        metrics=["accuracy"],
        jit_compile=True,  # without XLA, float16 is slow on a CPU
    )
    return model


def small_loss(labels, logits):
    """Returns the cross entropy times the small weight."""
    crossentropy = keras.losses.sparse_categorical_crossentropy
    return LOSS_WEIGHT * crossentropy(labels, logits, from_logits=True)


def make_loss_scale():
    """Returns the loss scale of the main run, which has only 440 steps.

    So the scale grows after 10 finite steps in a row. The default, 2,000, suits runs of
    many thousands of steps: in this one the scale would stay at 2**15, and the first
    half of the picture would show nothing.
    """
    return lossscale.DynamicLossScale(initial_loss_scale=2.0**15, increment_period=10)


def fit(model, data, first, last, callbacks=()):
    """Trains from epoch `first` to `last`, in the same order of batches every time."""
    images, labels = data

    def tell(epoch, logs):
        if (epoch + 1) % 5 == 0:
            scale = np.log2(float(model.optimizer.loss_scale))
            accuracy = f"training accuracy {logs['accuracy']:.1%}"
            print(f"epoch {epoch + 1:2}: {accuracy}, loss scale 2**{scale:g}")

    model.fit(
        images,
        labels,
        batch_size=BATCH_SIZE,
        initial_epoch=first,
        epochs=last,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks, keras.callbacks.LambdaCallback(on_epoch_end=tell)],
    )


def state(model):
    """Returns all that training needs to go on: weights, slots, scale and counters."""
    optimizer = model.optimizer
    inner = optimizer.inner_optimizer.variables
    inner = inner() if callable(inner) else inner
    variables = [*model.weights, *inner, *optimizer.loss_scale.variables]
    return [np.array(variable.numpy()) for variable in variables]


def are_equal(first, second):
    """Tells whether two states are equal to the last bit."""
    return len(first) == len(second) and all(map(np.array_equal, first, second))


def describe(model):
    """Returns scale and counters of a model's optimizer, in a line."""
    scale = model.optimizer.loss_scale
    return (
        f"loss scale 2**{np.log2(float(scale)):g}, "
        f"{int(scale.good_steps.numpy())} good steps, "
        f"{int(scale.skipped_steps.numpy())} skipped, "
        f"{int(model.optimizer.iterations.numpy())} applied"
    )


class Steps(keras.callbacks.Callback):
    """Keeps the loss scale of each step, and whether the step was skipped."""

    def __init__(self):
        super().__init__()
        self.scales, self.skipped = [], []

    def on_train_batch_begin(self, batch, logs=None):
        """Is called by Keras."""
        self.scales.append(float(self.model.optimizer.loss_scale))

    def on_train_batch_end(self, batch, logs=None):
        """Is called by Keras."""
        is_finite = self.model.optimizer.loss_scale.last_step_finite.numpy()
        self.skipped.append(not is_finite)


def train_and_resume(train):
    """Trains with a dynamic loss scale, and repeats half of it from a checkpoint.

    Returns:
      `(model, steps)`: the trained model, and the `Steps` of its training.
    """
    half = EPOCHS // 2
    model = make_model("mixed_float16", make_loss_scale())
    monitor, steps = lossscale.LossScaleMonitor(), Steps()
    with tempfile.TemporaryDirectory() as folder:
        fit(model, train, 0, half, [monitor, steps])
        middle = state(model)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = checkpoint.write(os.path.join(folder, "half-way"))
        print(f"\nSaved half-way:     {describe(model)}\n")
        fit(model, train, half, EPOCHS, [monitor, steps])

        again = make_model("mixed_float16", make_loss_scale())
        again.optimizer.build(again.trainable_variables)
        tf.train.Checkpoint(model=again, optimizer=again.optimizer).read(path)
    print(f"\nStarted over from:  {describe(again)}")
    print(f"All that was saved is equal: {are_equal(state(again), middle)}\n")
    fit(again, train, half, EPOCHS)
    print(f"\nTrained in one go:  {describe(model)}")
    print(f"Trained in two:     {describe(again)}")
    print(f"Both ends are equal: {are_equal(state(model), state(again))}\n")
    return model, steps


def gradient_exponents(train):
    """Returns log2 of the first batch's gradients that are not zero, in float32."""
    model = make_model("float32", 1)
    images, labels = (tf.constant(part[:BATCH_SIZE]) for part in train)
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = LOSS_WEIGHT * tf.reduce_mean(losses)
    grads = tape.gradient(loss, [_tensor_of(v) for v in model.trainable_variables])
    flat = np.concatenate([np.abs(grad.numpy()).ravel() for grad in grads])
    return np.log2(flat[flat > 0])


def _tensor_of(variable):
    return variable if isinstance(variable, tf.Variable) else variable.value


def draw(steps, exponents, path):
    """Draws the loss scale over the steps, and the gradients' exponents."""
    scales, skipped = np.log2(steps.scales), np.flatnonzero(steps.skipped)
    plt.rcParams["font.size"] = 11  # readable on a phone
    figure, (above, below) = plt.subplots(2, 1, figsize=(4.9, 8.5))
    above.step(np.arange(len(scales)), scales, where="post", color="tab:blue")
    above.plot(skipped, scales[skipped], "x", color="tab:red", label="skipped step")
    above.axvline(len(scales) / 2, color="gray", linestyle=":", label="checkpoint")
    above.set(title="Loss scale", xlabel="step", ylabel="log2 of the loss scale")
    above.legend(loc="lower right")

    shift = scales[0]
    bins = np.arange(np.floor(exponents.min()), exponents.max() + shift + 2)
    for shown, label, color in (
        (exponents, "as they are", "tab:orange"),
        (exponents + shift, f"times the loss scale, 2**{shift:g}", "tab:blue"),
    ):
        below.hist(shown, bins, color=color, alpha=0.7, label=label)
    zero = "zero in float16"
    below.axvspan(bins[0], SMALLEST, color="tab:red", alpha=0.15, label=zero)
    below.axvspan(SMALLEST, -14, color="gold", alpha=0.2, label="subnormal in float16")
    below.axvspan(-14, 16, color="tab:green", alpha=0.1, label="normal in float16")
    below.set(
        title="Gradients of the weights, first batch",
        xlabel="exponent: log2 of the gradient",
        ylabel="number of gradients",
        xlim=(max(bins[0], -64), 17),
    )
    below.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default=PICTURE, help="where the picture goes")
    output = parser.parse_args().output
    started = time.time()
    train_images, test_images, train_labels, test_labels = load()
    train, test = (train_images, train_labels), (test_images, test_labels)

    print("== float16 with a dynamic loss scale ==")
    model, steps = train_and_resume(train)
    rows = [("float16, dynamic loss scale", model)]
    for title, policy in (
        ("float32", "float32"),
        ("float16, no loss scaling", "mixed_float16"),
    ):
        print(f"== {title} ==")
        other = make_model(policy, 1)
        fit(other, train, 0, EPOCHS)
        rows.insert(-1, (title, other))

    exponents = gradient_exponents(train)
    lost = np.mean(exponents < SMALLEST)
    print(
        f"\nThe loss has a weight of 2**{np.log2(LOSS_WEIGHT):g}. In the first batch "
        f"{lost:.1%} of the gradients would be zero in float16."
    )
    print("Same data, same batches, same initial weights:\n")
    print(f"{'':30}{'test accuracy':>15}{'skipped steps':>15}")
    for title, trained in rows:
        accuracy = trained.evaluate(*test, verbose=0)[1]
        skipped = int(trained.optimizer.loss_scale.skipped_steps.numpy())
        print(f"{title:30}{accuracy:>15.1%}{skipped:>15}")
    draw(steps, exponents, output)
    print(
        f"\nThe picture is {output}\nIts loss scale doubles every 10 good steps, since "
        f"the run has only {len(steps.scales)}.\nThe default is 2,000, for runs of "
        f"many thousands of steps. It all took {time.time() - started:.0f} seconds."
    )


if __name__ == "__main__":
    main()
