"""Compares every preset over one made-up training run, in a few seconds.

    python examples/compare_schedules.py          # draws the five that differ most
    python examples/compare_schedules.py --all    # draws all of them

The run is a limit for each step: the greatest loss scale whose gradients do not
overflow. It drifts as training goes on, jitters, drops for single bad batches, and
sinks for a stretch of overflows. Later the losses of eight steps are NaN whatever the
scale. Every schedule gets the same run, twice: told of those losses as of overflows,
and not told (`nonfinite_loss="skip"`). One that looks at the gradients sees gradients
that just reach the limit. The script prints how many steps each schedule lost, and
draws how it followed the limit.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import lossscale
from lossscale.presets import PRESETS

STEPS = 30_000
#: How many schedules are drawn without `--all`.
DRAWN = 5
PICTURE = os.path.splitext(os.path.abspath(__file__))[0] + ".png"
#: Values for the presets that ask their user for them.
ASKED = {"initial_loss_scale": 2.0**15, "increment_period": 2000, "hysteresis": 2}


def made_up_run(steps=STEPS, seed=0):
    """Returns the limit of each step, a `float64` array of shape `[steps]`."""
    rng = np.random.default_rng(seed)
    progress = np.linspace(0, 1, steps)
    # Gradients shrink over the first two thirds, so the limit rises; then they grow.
    exponent = 13 + 11 * np.sin(0.75 * np.pi * progress) ** 2
    exponent += rng.normal(0, 0.3, steps)
    spikes = rng.random(steps) < 0.0005  # bad batches: one in two thousand
    exponent[spikes] -= rng.uniform(1, 9, np.sum(spikes))
    stretch = slice(int(0.45 * steps), int(0.45 * steps) + 300)
    exponent[stretch] -= 7
    return 2.0**exponent


def bad_losses(steps=STEPS):
    """Returns at which steps the loss is NaN, a `bool` array of shape `[steps]`."""
    found = np.zeros([steps], bool)
    found[int(0.8 * steps) : int(0.8 * steps) + 8] = True
    return found


def schedules():
    """Returns every preset by name, a fixed scale, and those that see the gradients."""
    found = {
        "fixed at 2**10": lossscale.FixedLossScale(2.0**10, skip_nonfinite=True),
        "HeadroomLossScale": lossscale.HeadroomLossScale(),
    }
    for name, preset in PRESETS.items():
        if name != "dynamic":  # another name of `tensorflow`
            asked = {argument: ASKED[argument] for argument in preset.asks_for}
            found[name] = lossscale.DynamicLossScale.from_preset(name, **asked)
    return found


def most_different(simulations, count=DRAWN):
    """Returns the simulations that differ most, by name, in the order given.

    TensorFlow's is chosen first, and then each time the one that is farthest from all
    that were chosen before, by the average distance of their loss scales in doublings.
    """
    scales = {name: np.log2(s.loss_scale) for name, s in simulations.items()}
    chosen = ["tensorflow"]
    while len(chosen) < min(count, len(scales)):
        distance = {
            name: min(np.mean(np.abs(scales[name] - scales[known])) for known in chosen)
            for name in scales
        }
        chosen.append(max(distance, key=distance.get))
    return {name: s for name, s in simulations.items() if name in chosen}


def draw(simulations, skipping, path):
    """Draws one panel per schedule, all on the same axes.

    `skipping` are those of the same schedules that were not told of the bad losses.
    """
    plt.rcParams.update({"font.size": 11, "legend.fontsize": 11})
    columns = 2 if len(simulations) > DRAWN else 1
    rows = -(-len(simulations) // columns)
    shared = {"sharex": True, "sharey": True, "layout": "constrained"}
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.9 * columns, 2 * rows), squeeze=False, **shared
    )
    for ax in axes.flat[len(simulations) :]:
        ax.set_axis_off()
    for ax, (name, simulation) in zip(axes.flat, simulations.items()):
        simulation.plot(ax)
        untold = {"color": "C2", "linewidth": 1, "label": "untold of the NaNs"}
        ax.plot(skipping[name].loss_scale, zorder=1, **untold)
        ax.set_title(f"{name}: {simulation.steps_lost} steps lost", fontsize=11)
        ax.label_outer()
        ax.get_legend().remove()
        ax.set_ylim(2.0**0, 2.0**36)
    for ax in axes.flat[: len(simulations)][-columns:]:
        ax.tick_params(labelbottom=True)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    labels = ["steps lost" if "lost" in label else label for label in labels]
    figure.legend(handles, labels, loc="outside upper center", ncol=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default=PICTURE, help="where the picture goes")
    parser.add_argument("--all", action="store_true", help="draw every schedule")
    given = parser.parse_args()
    started = time.time()
    limit, bad = made_up_run(), bad_losses()
    told, untold = (
        {
            name: lossscale.simulate(
                loss_scale, limit=limit, bad_losses=bad, nonfinite_loss=how
            )
            for name, loss_scale in schedules().items()
        }
        for how in ("backoff", "skip")
    )
    print(f"{len(limit)} steps of a made-up run\n")
    print(f"{'':24}{'told of the NaN losses':>45}{'not told':>30}")
    figures = f"{'steps lost':>12}{'longest stall':>15}{'log2 below limit':>18}"
    print(f"{'':24}{figures}{'steps lost':>12}{'log2 below limit':>18}")
    for name, one in told.items():
        lost, stall, other = one.steps_lost, one.longest_stall, untold[name]
        print(
            f"{name:24}{lost:>12}{stall:>15}{one.log2_below_limit:>18.2f}"
            f"{other.steps_lost:>12}{other.log2_below_limit:>18.2f}"
        )
    drawn = told if given.all else most_different(told)
    draw(drawn, untold, given.output)
    print(f"\nThe picture is {given.output}, of {', '.join(drawn)}.")
    print(f"It took {time.time() - started:.0f} seconds.")


if __name__ == "__main__":
    main()
