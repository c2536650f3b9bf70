"""Twenty blocks that each take 2**-4 of the gradient: float16 with and without scales.

    python examples/twenty_blocks.py

The script prints how many blocks have a gradient, and draws how large each one's is: in
float32; in float16 with no loss scale and with 2**15; and in float16 with a
`ScaledBlock` around each block.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib

matplotlib.use("Agg")
import numpy as np
import tensorflow as tf
from matplotlib import pyplot as plt

import lossscale

PICTURE = os.path.splitext(os.path.abspath(__file__))[0] + ".png"
BLOCKS, WIDTH, FACTOR = 20, 16, 2.0**-4


class Kept(keras.layers.Layer):
    """Multiplies by 1 / FACTOR, and leaves the gradient as it is."""

    def call(self, x):
        """Returns `x / FACTOR`, which is as large as the input of the block before."""
        return x + tf.stop_gradient(x * (1 / FACTOR - 1))


def plain(layer):
    """Returns a layer as it is."""
    return layer


def make(policy, block):
    """Returns a model of `BLOCKS` dense layers, with `block` around each."""
    keras.mixed_precision.set_global_policy(policy)
    layers = [keras.Input([WIDTH], dtype="float32")]
    for _ in range(BLOCKS):
        dense = keras.layers.Dense(WIDTH, use_bias=False)
        layers += [block(dense), Kept(dtype="float32")]
    keras.mixed_precision.set_global_policy("float32")
    model = keras.Sequential(layers)
    rng = np.random.default_rng(0)
    turned = [np.linalg.qr(rng.normal(size=[WIDTH, WIDTH]))[0] for _ in range(BLOCKS)]
    model.set_weights([each * FACTOR for each in turned])
    return model


def sizes(model, scale):
    """Returns the root mean square of each block's gradient."""
    x = tf.constant(np.random.default_rng(1).normal(size=[32, WIDTH]), tf.float32)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.cast(model(x), tf.float32) ** 2) * scale
    # A variable of Keras 3 holds TensorFlow's as `value`; Keras 2's is TensorFlow's.
    held = [
        v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables
    ]
    found = [np.float64(grad) / scale for grad in tape.gradient(loss, held)]
    return np.array([np.sqrt(np.mean(grad**2)) for grad in found])


def main():
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--output", default=PICTURE, help="where the picture goes")
    output = parser.parse_args().output
    # Equal curves lie on one another: the widest is drawn first.
    runs = {
        "float32": (make("float32", plain), 1.0, "lightgrey", 14),
        "float16, ScaledBlock": (
            make("mixed_float16", lossscale.ScaledBlock),
            1.0,
            "tab:green",
            8,
        ),
        "float16, loss scale 2**15": (
            make("mixed_float16", plain),
            2.0**15,
            "tab:orange",
            4,
        ),
        "float16, loss scale 1": (make("mixed_float16", plain), 1.0, "black", 1.5),
    }
    figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
    for title, (model, scale, color, width) in runs.items():
        found = sizes(model, scale)[::-1]
        kept = np.where(np.isfinite(found) & (found > 0), found, np.nan)
        count = int(np.isfinite(kept).sum())
        label = f"{title}: {count} of {BLOCKS} blocks have a gradient"
        ax.plot(
            range(1, BLOCKS + 1),
            np.log2(kept),
            color=color,
            linewidth=width,
            label=label,
        )
        ax.plot(count, np.log2(kept[count - 1]), "o", color=color, markersize=width + 4)
        print(label)
    ax.set_xlabel("blocks, the one nearest to the loss first")
    ax.set_ylabel("log2 of the gradient's size")
    ax.set_xticks(range(1, BLOCKS + 1))
    ax.legend(fontsize="small")
    figure.savefig(output, dpi=90)
    print(f"The picture is {output}.")


if __name__ == "__main__":
    main()
