"""How examples/digits.py trains with each kind of loss scale, the smaller its loss.

    python benchmarks/policies.py

It trains the digits with several weights of the loss, and prints the test accuracy
after every second epoch, in percent, and the number of skipped steps. float32 shows
what can be reached. All runs have the same data, batches and initial weights.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import digits

import lossscale

POLICIES = {
    "float32": None,
    "`DynamicLossScale()`": lossscale.DynamicLossScale,
    "... `(increment_period=10)`": lambda: lossscale.DynamicLossScale(
        increment_period=10
    ),
    "... `(search_period=1)`": lambda: lossscale.DynamicLossScale(search_period=1),
    "`HeadroomLossScale()`": lossscale.HeadroomLossScale,
}


def train(make_loss_scale, data, epochs):
    """Returns the accuracy after every second epoch, the steps lost, and the scale."""
    train_images, test_images, train_labels, test_labels = data
    policy = "float32" if make_loss_scale is None else "mixed_float16"
    loss_scale = 1 if make_loss_scale is None else make_loss_scale()
    model = digits.make_model(policy, loss_scale)
    accuracies = []
    for epoch in range(0, epochs, 2):
        model.fit(
            train_images,
            train_labels,
            batch_size=digits.BATCH_SIZE,
            initial_epoch=epoch,
            epochs=min(epoch + 2, epochs),
            shuffle=False,
            verbose=0,
        )
        accuracies.append(model.evaluate(test_images, test_labels, verbose=0)[1])
    scale = model.optimizer.loss_scale
    return accuracies, int(scale.skipped_steps.numpy()), float(scale)


def main():
    """Trains with each loss scale and weight, and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=int, nargs="+", default=[-18, -30, -40])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--headroom", type=int, nargs="+", default=[])
    parser.add_argument("--half-life", type=float, nargs="+", default=[])
    parser.add_argument("--only", default="", help="part of a loss scale's name")
    given = parser.parse_args()
    policies = dict(POLICIES)
    for name, values in (("headroom", given.headroom), ("half_life", given.half_life)):
        for value in values:
            policies[f"... `({name}={value:g})`"] = lambda name=name, value=value: (
                lossscale.HeadroomLossScale(**{name: value})
            )
    data = digits.load()
    epochs = range(2, given.epochs + 1, 2)
    print(f"| weight | loss scale | {' | '.join(map(str, epochs))} | lost | ends at |")
    print(f"| --- | --- | {'---: | ' * len(epochs)}---: | --- |")
    for weight in given.weights:
        digits.LOSS_WEIGHT = 2.0**weight
        for name, make_loss_scale in policies.items():
            if given.only not in name:
                continue
            accuracies, lost, scale = train(make_loss_scale, data, given.epochs)
            cells = " | ".join(f"{100 * accuracy:.0f}" for accuracy in accuracies)
            end = f"2**{np.log2(scale):.0f}" if make_loss_scale else "-"
            shown = lost if make_loss_scale else "-"
            print(f"| 2**{weight} | {name} | {cells} | {shown} | {end} |", flush=True)


if __name__ == "__main__":
    main()
