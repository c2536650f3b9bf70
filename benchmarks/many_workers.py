"""What a sum over 8 to 1,024 workers loses if it is added up in float16 or bfloat16.

    python benchmarks/many_workers.py

Nobody here has a thousand machines, so this adds up in NumPy as a ring and as a tree of
machines do. A ring adds one worker's gradient after the other to each part of the sum;
a tree adds sums of equal size in pairs. Each addition is rounded to the dtype. Each
worker divides its loss by the size of the whole batch, so its gradient is about the sum
divided by the number of workers. "equal" gradients are the same on each worker. In
"noisy" ones a worker's noise is ten times its share of the sum, as late in a training.

The error is the length of the difference from the exact sum, over the length of the
exact sum, at a loss scale that makes the largest element of the sum 2**12. "lost" is
the share of the elements of a worker's gradient that are zero in float16 there. "peak"
is the largest partial sum divided by the largest element of the sum: for so much more
the loss scale must leave room. All are medians over several random gradients.
"""

import argparse

import numpy as np
import tensorflow as tf
import timing

WORKERS = (8, 32, 128, 512, 1024)
DTYPES = {"float16": np.float16, "bfloat16": tf.bfloat16.as_numpy_dtype}
#: The elements' sizes are spread by so many powers of two: three in four lie between.
SPREAD = 4.0
LARGEST = 2.0**12
NOISE = {"equal": 0.0, "noisy": 10.0}


def gradients(workers, noise, elements, rng):
    """Returns each worker's gradient, scaled, in float64."""
    mean = rng.normal(size=elements) * 2.0 ** (SPREAD * rng.normal(size=elements))
    mean *= LARGEST / np.abs(mean).max()
    added = rng.normal(size=[workers, elements]) * np.abs(mean) * noise
    # The noise of all workers adds up to nothing, so that the sum stays as it was.
    added -= added.mean(0)
    return (mean + added) / workers


def ring(terms):
    """Returns the sum, each term added after the other, and the largest on the way."""
    total, peak = terms[0], np.abs(terms[0])
    for term in terms[1:]:
        total = total + term
        peak = np.maximum(peak, np.abs(total))
    return total, peak


def tree(terms):
    """Returns the sum, added up in pairs, and the largest on the way."""
    peak = np.abs(terms).max(0)
    while len(terms) > 1:
        terms = terms[0::2] + terms[1::2]
        peak = np.maximum(peak, np.abs(terms).max(0))
    return terms[0], peak


def numbers(workers, kind, elements, seed):
    """Returns the numbers of a row: four errors, what is lost, and the peak."""
    rng = np.random.default_rng(seed)
    exact = gradients(workers, NOISE[kind], elements, rng)
    total, found = exact.sum(0), []
    for dtype in DTYPES.values():
        for add_up in (ring, tree):
            summed, peak = add_up(exact.astype(dtype))
            error = np.linalg.norm(summed.astype(np.float64) - total)
            found.append(error / np.linalg.norm(total))
            if dtype is np.float16 and add_up is ring:
                room = float(peak.astype(np.float64).max()) / LARGEST
    is_lost = (exact.astype(np.float16) == 0) & (exact != 0)
    return [*found, is_lost.mean(), room]


def row(workers, kind, elements, seeds):
    """Returns a row of the table: medians over seeds."""
    every = [numbers(workers, kind, elements, seed) for seed in range(seeds)]
    *errors, lost, peak = np.median(every, axis=0)
    shown = [f"{error:.1e}" for error in errors]
    return [f"{workers} workers, {kind}", *shown, f"{lost:.1%}", f"{peak:.1f}"]


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--elements", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=11)
    options = parser.parse_args()
    sums = [f"{name}, {way}" for name in DTYPES for way in ("ring", "tree")]
    sizes = (options.elements, options.seeds)
    rows = [row(n, kind, *sizes) for kind in NOISE for n in options.workers]
    print(timing.markdown(["", *sums, "lost", "peak"], rows))


if __name__ == "__main__":
    main()
