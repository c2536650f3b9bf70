"""Bad batches: a run that a SpikeGuard protects, and one that it does not.

    python examples/spike_guard.py

Real data: scikit-learn's 1,797 digits of 8 x 8 pixels, in float32 or bfloat16, which
need no loss scale. One batch of a hundred has wrong labels, and its loss is a thousand
times as large as it should be, as after a fault in the weights of the losses. The first
128 batches are good, since a guard lets so many steps through to learn what is usual.

The network trains three times from the same weights on the same batches: without bad
batches, with them, and with them and a `lossscale.SpikeGuard`. The script prints the
test accuracies, replays the recorded run with other guards, and draws it.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import lossscale

PICTURE = os.path.splitext(os.path.abspath(__file__))[0] + ".png"
BATCH_SIZE = 32
SHARE_BAD = 0.01
FIRST_GOOD = 128
#: By how much the loss of a bad batch is too large.
TIMES = 1e3
COLORS = {"clean": "tab:blue", "unguarded": "tab:red", "guarded": "tab:green"}


def load(seed):
    """Returns training and test images, training and test labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    return train_test_split(images, labels, random_state=seed, stratify=labels)


def batches_of(images, labels, epochs, seed):
    """Returns the images and labels of all batches, and which batches are bad."""
    rng = np.random.default_rng(seed)
    per_epoch = len(images) // BATCH_SIZE
    order = [
        rng.permutation(len(images))[: per_epoch * BATCH_SIZE] for _ in range(epochs)
    ]
    order = np.reshape(order, [-1, BATCH_SIZE])
    bad = rng.random(len(order)) < SHARE_BAD
    bad[:FIRST_GOOD] = False
    return images[order], labels[order], bad


def spoiled(labels, bad, seed):
    """Returns labels, wrong ones in bad batches, and the weights of the losses."""
    rng = np.random.default_rng(seed)
    wrong = (labels + rng.integers(1, 10, labels.shape)) % 10
    labels = np.where(bad[:, None], wrong, labels)
    return labels, np.where(bad[:, None], TIMES, 1.0).repeat(BATCH_SIZE, 1)


def make(policy, guard):
    """Returns a compiled network, with the same initial weights every time."""
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy(policy)
    model = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(128, "relu"),
            keras.layers.Dense(128, "relu"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )
    keras.mixed_precision.set_global_policy("float32")
    model.compile(
        lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.05, 0.9), 1, guard=guard),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
    )
    return model


class Curve(keras.callbacks.Callback):
    """Records the test accuracy after every `every` steps."""

    def __init__(self, test, every):
        super().__init__()
        self.test, self.every, self.found = test, every, []

    def on_train_batch_end(self, batch, logs=None):
        """Is called by Keras."""
        if (batch + 1) % self.every == 0:
            self.found.append(accuracy(self.model, self.test))


def accuracy(model, test):
    """Returns the share of test images whose digit the model recognizes."""
    images, labels = test
    told = np.argmax(model(images, training=False), axis=-1)
    return float(np.mean(told == labels))


class Steps(keras.callbacks.Callback):
    """Keeps the largest gradient of each step, infinite after an overflow."""

    def __init__(self):
        super().__init__()
        self.largest = []

    def on_train_batch_end(self, batch, logs=None):
        """Is called by Keras."""
        self.largest.append(self.model.optimizer.loss_scale.last_largest.numpy())


def train(policy, guard, batches, test, *callbacks):
    """Trains one epoch over all batches.

    Returns:
      `(model, curve)`, where `curve` holds the accuracy after every 20 steps.
    """
    images, labels, weights = (np.concatenate(part) for part in batches)
    model, curve = make(policy, guard), Curve(test, 20)
    quiet = {"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0}
    callbacks = [curve, *callbacks]
    model.fit(images, labels, sample_weight=weights, callbacks=callbacks, **quiet)
    return model, curve.found


def draw(curves, largest, spikes, guard, path):
    """Draws the accuracies, and the largest gradients of the guarded run."""
    plt.rcParams["font.size"] = 11  # readable on a phone
    figure, (above, below) = plt.subplots(2, figsize=(4.9, 8.5), layout="constrained")
    for name, curve in curves.items():
        steps = 20 * np.arange(1, len(curve) + 1)
        above.plot(steps, curve, color=COLORS[name], label=name)
    above.set(title="Test accuracy", xlabel="step", ylim=(0, 1))

    steps = np.arange(len(largest))
    below.semilogy(steps[~spikes], largest[~spikes], ".", markersize=3, label="applied")
    below.semilogy(
        steps[spikes], largest[spikes], "x", color="tab:red", label="skipped"
    )
    below.semilogy(steps, guard, color="gray", label="limit")
    below.set(title="Largest gradient of each step, guarded", xlabel="step")
    below.set_ylim(largest[largest > 0].min() / 2, 2 * largest.max())
    for ax in (above, below):  # below, where no line is
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def limits(run):
    """Returns the guard's limit before each step, given each step's largest."""
    guard, found = lossscale.SpikeGuard(), []
    for largest in run:
        found.append(float(guard.limit.numpy()))
        if np.isfinite(largest):
            _, values = guard.judge(guard, largest)
            for name, value in values.items():
                getattr(guard, name).assign(value)
    return np.array(found)


def main():
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--output", default=PICTURE, help="where the picture goes")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--policy", default="float32", help="or mixed_bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    started = time.time()
    train_images, test_images, train_labels, test_labels = load(given.seed)
    test = test_images, test_labels
    images, labels, bad = batches_of(
        train_images, train_labels, given.epochs, given.seed
    )
    wrong, weights = spoiled(labels, bad, given.seed)
    good = images, labels, np.ones_like(weights)
    spiky = images, wrong, weights
    print(f"{len(bad)} batches of {BATCH_SIZE}, of which {bad.sum()} are bad.\n")

    curves = {}
    _, curves["clean"] = train(given.policy, None, good, test)
    _, curves["unguarded"] = train(given.policy, None, spiky, test)
    guard, steps = lossscale.SpikeGuard(), Steps()
    _, curves["guarded"] = train(given.policy, guard, spiky, test, steps)
    largest = np.array(steps.largest)
    run = {"is_finite": np.isfinite(largest), "largest": largest}
    print("\nWhat other guards would have skipped of the guarded run's steps:\n")
    print(f"{'':36}{'bad batches':>12}{'good ones':>12}")
    for arguments in ({}, {"window": 32}, {"threshold": 3.0}, {"threshold": 9.0}):
        listed = ", ".join(f"{name}={value}" for name, value in arguments.items())
        guard_too = lossscale.SpikeGuard(**arguments)
        replay = lossscale.simulate(1, guard=guard_too, **run)
        hits = np.sum(replay.spikes & bad), np.sum(replay.spikes & ~bad)
        print(f"SpikeGuard({listed}){'':36}"[:36], end="")
        print(f"{hits[0]:>12}{hits[1]:>12}")
    spikes = lossscale.simulate(1, guard=lossscale.SpikeGuard(), **run).spikes

    print(f"\n{'':12}{'test accuracy':>15}{'skipped steps':>15}")
    for name, curve in curves.items():
        skipped = int(guard.spikes.numpy()) if name == "guarded" else 0
        print(f"{name:12}{curve[-1]:>15.1%}{skipped:>15}")
    draw(curves, largest, spikes, limits(largest), given.output)
    seconds = time.time() - started
    print(f"\nThe picture is {given.output}. It took {seconds:.0f} seconds.")


if __name__ == "__main__":
    main()
