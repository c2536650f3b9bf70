"""Which loss scale do the gradients of examples/digits.py need? In a few seconds.

    python examples/gradient_ranges.py

The script takes the network and the loss of digits.py before the first step, when most
of its gradients are too small for float16. It prints the table, and draws the picture.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import digits  # the example beside this one
from matplotlib import pyplot as plt

import lossscale

PICTURE = os.path.splitext(os.path.abspath(__file__))[0] + ".png"


def draw(ranges, path):
    """Draws a report so narrow that a phone shows its words."""
    plt.rcParams["font.size"] = 13.2  # the names of rows have five sixths of it
    figure, ax = plt.subplots(figsize=(4.9, 9), layout="constrained")
    below = {"loc": "upper center", "bbox_to_anchor": (0.4, -0.1)}
    ranges.plot(ax).legend(fontsize="small", **below)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default=PICTURE, help="where the picture goes")
    output = parser.parse_args().output
    started = time.time()
    images, _, labels, _ = digits.load()
    model = digits.make_model("mixed_float16", digits.make_loss_scale())
    ranges = lossscale.gradient_ranges(
        model, images, labels, batch_size=digits.BATCH_SIZE
    )
    print(f"\n{ranges}\n")
    print(f"Without loss scaling:\n\n{ranges.at(1)}")
    draw(ranges, output)
    print(f"\nThe picture is {output}. It took {time.time() - started:.0f} seconds.")


if __name__ == "__main__":
    main()
