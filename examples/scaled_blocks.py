"""Two tasks whose losses are far apart: float32, one loss scale, or scaled blocks.

    python examples/scaled_blocks.py

A network of residual blocks learns scikit-learn's handwritten digits twice: one tower
learns to recognize them, a second one to draw them again, with a loss of a small
weight. Each branch has a LayerScale of 1e-6, as in CaiT (Touvron et al., arXiv
2103.17239), so its gradients are smaller by this factor than those of the sum to which
it is added.

Adam divides by the size of the gradients: in float32 the small ones train as well as
the large ones. In float16 one loss scale serves both towers only up to a point. The
script prints how well the digits are drawn, and plots this error over the epochs.
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

import lossscale

PICTURE = os.path.splitext(os.path.abspath(__file__))[0] + ".png"
layers = keras.layers
#: Adam adds EPSILON to the size of a gradient. The default, 1e-7, would hide small
#: gradients in float32, too.
EPSILON = 1e-20
WEIGHTS = [2.0**-16, 2.0**-24, 2.0**-32, 2.0**-40]
RUNS = {
    "float32": "tab:blue",
    "float16, the best single loss scale": "tab:red",
    "float16, blocks": "tab:green",
}


class LayerScale(layers.Layer):
    """Multiplies each channel by a number that is learned, and small at first."""

    def build(self, shape):
        """Creates the numbers."""
        init = keras.initializers.Constant(1e-6)
        self.scale = self.add_weight(shape=(shape[-1],), initializer=init, name="scale")
        super().build(shape)

    def call(self, x):
        """Returns the scaled channels, in the shape of `x`."""
        return x * self.scale


def tower(x, name, block, depth, width=64):
    """Returns the output of a stem and `depth` residual blocks for `x`."""
    x = block(layers.Dense(width, name=f"{name}_stem"))(x)
    for number in range(depth):
        branch = keras.Sequential(
            [
                layers.LayerNormalization(),
                layers.Dense(2 * width, "relu"),
                layers.Dense(width),
                LayerScale(),
            ],
            name=f"{name}_{number}",
        )
        x = layers.Add(dtype="float32")([x, block(branch)(x)])
    return layers.LayerNormalization(dtype="float32")(x)


def make(policy, block, weight, loss_scale, depth):
    """Returns a compiled model of two towers.

    Args:
      policy: The dtype policy of its layers.
      block: Wraps each block: `lossscale.ScaledBlock`, or `plain`.
      weight: The weight of the second tower's loss.
      loss_scale: The loss scale.
      depth: How many residual blocks each tower has.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy(policy)
    x = keras.Input([64])
    told = layers.Dense(10, dtype="float32", name="told")
    drawn = layers.Dense(64, dtype="float32", name="drawn")
    outputs = [
        told(tower(x, "tell", block, depth)),
        drawn(tower(x, "draw", block, depth)),
    ]
    model = keras.Model(x, outputs)
    keras.mixed_precision.set_global_policy("float32")
    adam = keras.optimizers.Adam(1e-3, epsilon=EPSILON)
    model.compile(
        lossscale.LossScaleOptimizer(adam, loss_scale),
        loss=[
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            keras.losses.MeanSquaredError(),
        ],
        loss_weights=[1.0, weight],
    )
    return model


def data():
    """Returns the digits' pixels, from 0 to 1, and their labels."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.data))
    return (digits.data[order] / 16).astype("float32"), digits.target[order]


def drawing_error(model, x):
    """Returns by how much the drawn digits are off, as a share of their variance."""
    drawn = model.predict(x, verbose=0)[1]
    return float(((drawn - x) ** 2).mean() / x.var(0).mean())


class Curve(keras.callbacks.Callback):
    """Records the drawing error after each epoch."""

    def __init__(self, x):
        super().__init__()
        self.x, self.found = x, []

    def on_epoch_end(self, epoch, logs=None):
        """Is called by Keras."""
        self.found.append(drawing_error(self.model, self.x))


def plain(layer):
    """Returns a layer as it is."""
    return layer


def model_of(run, weight, depth):
    """Returns the model of one of `RUNS`."""
    if run == "float32":
        return make("float32", plain, weight, 1.0, depth)
    if run == "float16, blocks":
        return make("mixed_float16", lossscale.ScaledBlock, weight, 1.0, depth)
    # This one looks at the largest gradient, and stays as high as that allows.
    scale = lossscale.HeadroomLossScale(headroom=2)
    return make("mixed_float16", plain, weight, scale, depth)


def draw(curves, output):
    """Draws the drawing error over the epochs, one plot for each weight."""
    figure, axes = plt.subplots(
        1,
        len(curves),
        figsize=(3 * len(curves), 3.4),
        sharey=True,
        layout="constrained",
    )
    for ax, (weight, found) in zip(np.atleast_1d(axes), curves.items()):
        for run, curve in found.items():
            dashed = "--" if run == "float16, blocks" else "-"
            numbers = range(1, len(curve) + 1)
            ax.semilogy(numbers, curve, dashed, color=RUNS[run], label=run)
        ax.set_title(f"weight 2**{np.log2(weight):.0f}", fontsize="medium")
        ax.set_xlabel("epoch")
    np.atleast_1d(axes)[0].set_ylabel("error of the drawn digits")
    handles = np.atleast_1d(axes)[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(output, dpi=90)


def main():
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--output", default=PICTURE, help="where the picture goes")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--depth", type=int, default=3, help="blocks of each tower")
    parser.add_argument("--weights", type=float, nargs="+", default=WEIGHTS)
    arguments = parser.parse_args()
    started = time.time()
    x, y = data()
    curves = {}
    for weight in arguments.weights:
        curves[weight] = {}
        for run in RUNS:
            model, curve = model_of(run, weight, arguments.depth), Curve(x)
            quiet = {"batch_size": 64, "verbose": 0, "callbacks": [curve]}
            model.fit(x, [y, x], epochs=arguments.epochs, **quiet)
            curves[weight][run] = curve.found
            exponent = f"2**{np.log2(weight):.0f}"
            print(f"{exponent:8} {run:36} {curve.found[-1]:.3f}", flush=True)
    draw(curves, arguments.output)
    seconds = time.time() - started
    print(f"The picture is {arguments.output}. It took {seconds:.0f} seconds.")


if __name__ == "__main__":
    main()
