"""Which layers must stay in float32? Handwritten digits, in half a minute.

    python examples/forward_ranges.py

The script trains a gated feed-forward network on pixels from 0 to 255. The product of
its two branches is beyond 65504, where float16 ends, so no loss scale helps. The script
prints which layers need float32, trains in float16 without and with these layers in
float32, and draws the picture.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import digits  # the examples beside this one
import gradient_ranges
import keras
import numpy as np

import lossscale

PICTURE = os.path.splitext(os.path.abspath(__file__))[0] + ".png"
EPOCHS, BATCH_SIZE = 10, 64


def make_model(policy_of):
    """Returns a compiled network, with the same initial weights every time.

    Args:
      policy_of: A function that returns the dtype policy of a layer, given its name.
    """
    keras.utils.set_random_seed(1)

    def dense(units, name, activation=None):
        return keras.layers.Dense(
            units,
            activation,
            kernel_initializer="he_normal",
            dtype=policy_of(name),
            name=name,
        )

    pixels = keras.Input((64,))
    hidden = dense(128, "hidden", "relu")(pixels)
    gate, value = dense(256, "gate", "relu")(hidden), dense(256, "value")(hidden)
    product = keras.layers.Multiply(dtype=policy_of("product"), name="product")
    norm = keras.layers.LayerNormalization(dtype=policy_of("norm"), name="norm")
    classes = keras.layers.Dense(10, dtype="float32", name="classes")
    model = keras.Model(pixels, classes(norm(product([gate, value]))))
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    return model


def train(model, data):
    """Returns the accuracy on the test images, and how many steps were skipped."""
    images, test_images, labels, test_labels = data
    model.fit(images, labels, BATCH_SIZE, EPOCHS, verbose=0)
    accuracy = model.evaluate(test_images, test_labels, verbose=0)[1]
    return accuracy, int(model.optimizer.loss_scale.skipped_steps.numpy())


def load():
    """Returns the digits as rows of 64 pixels from 0 to 255."""
    images, test_images, labels, test_labels = digits.load()
    top = np.max(images)
    rows = [np.reshape(x, [len(x), 64]) / top * 255 for x in (images, test_images)]
    return rows[0], rows[1], labels, test_labels


def main():
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default=PICTURE, help="where the picture goes")
    output = parser.parse_args().output
    data = load()
    plain = make_model(lambda _: "mixed_float16")
    ranges = lossscale.forward_ranges(plain, data[0], batches=4, verbose=0)
    print(f"{ranges}\n")
    print(f"{lossscale.find_nonfinite(plain, data[0], data[2])}\n")
    gradient_ranges.draw(ranges, output)

    needed = ranges.need_float32
    cured = make_model(lambda name: "float32" if name in needed else "mixed_float16")
    print(f"{'':36}accuracy  skipped steps")
    for title, model in (
        ("float16", plain),
        (f"float16, {', '.join(needed)} in float32", cured),
        ("float32", make_model(lambda _: "float32")),
    ):
        accuracy, skipped = train(model, data)
        print(f"{title:36}{accuracy:8.1%}{skipped:15}")
    print(f"\nThe picture is {output}.")


if __name__ == "__main__":
    main()
