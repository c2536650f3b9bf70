"""A process in which TensorFlow looks for infinities, with runs that have none but one.

It prints STOPPED and more for each run that `enable_check_numerics()` stops. The first
has an overflow.
"""

import itertools

import numpy as np
import tensorflow as tf
from every_loss_scale import CASES
from exact import Trained, clip
from installed import each_keras, make_strategy
from models import compiled, compiled_by, policy_of

import lossscale
from lossscale import DynamicLossScale, LossScaleMonitor, LossScaleOptimizer

tf.debugging.enable_check_numerics()

EVERY = [
    *CASES.values(),
    # The next step's product would be infinite.
    lambda: DynamicLossScale(2.0**127, 1),
    lambda: DynamicLossScale(2.0**127, 1, max_loss_scale=2.0**127),
]
#: What an optimizer is given besides a loss scale.
OPTIONS = [
    dict,
    lambda: {"nonfinite_loss": "skip"},
    lambda: {"guard": lossscale.SpikeGuard(threshold=1e30, window=2)},
]


def alone(make, mode):
    """Tells a loss scale of gradients of every size."""
    loss_scale = make()
    update = compiled(lambda grad: loss_scale.update([grad])[1], mode)
    adjust = compiled(lambda size: loss_scale.adjust(True, size)[1], mode)
    for size in (0.0, 2.0**-126, 1.0, 2.0, 0.0, 3e38, 3e38):
        update(tf.constant([size, 0.0]))
        adjust(tf.constant(size))


def trained(family, mode, options):
    """Takes steps of both kinds of loop."""
    one = Trained(family, DynamicLossScale(), (2,), **options)

    def step(x, unscales):
        one.apply(clip(one.unscaled(x)) if unscales else one.scaled(x))

    step = compiled(step, mode)
    for x, unscales in itertools.product((1e-6, 0.0, 1e-6), (False, True)):
        step(tf.constant([x, 0.0]), unscales)


def fitted(family, mode, options):
    """Trains a model of float16, with all that the monitor and the reports look at."""
    keras = family.keras
    with policy_of(keras, "mixed_float16"):
        layers = [keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(1, dtype="float32")])
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.01), **options)
    model.compile(optimizer, "mse", **compiled_by(mode))
    x, y = np.ones([16, 4], np.float32), np.zeros([16, 1], np.float32)
    monitor = LossScaleMonitor(
        verbose=0, check_underflow=True, restore_statistics=True, every=2
    )
    model.fit(x, y, 4, epochs=2, verbose=0, callbacks=[monitor])
    if optimizer.loss_scale.skipped_steps.numpy():
        raise ValueError("This run must be a healthy one.")
    if not tf.distribute.has_strategy():
        lossscale.gradient_ranges(model, x, y)
        lossscale.forward_ranges(model, x)
        lossscale.find_nonfinite(model, x, y)


def an_overflow():
    lossscale.LossScaleEngine(2.0**30).scale_loss(tf.constant(1e35))


def attempt(run, *arguments):
    try:
        run(*arguments)
    except (tf.errors.InvalidArgumentError, ValueError) as error:
        said = str(error)[-600:].replace("\n", " ")
        print("STOPPED", run.__name__, *arguments, said)


attempt(an_overflow)
for mode in ("eager", "graph"):
    for make in EVERY:
        attempt(alone, make, mode)
    for family, options in itertools.product(each_keras(), OPTIONS):
        attempt(trained, family, mode, options())
        attempt(fitted, family, mode, options())
with make_strategy().scope():
    attempt(fitted, each_keras()[0], "graph", {})
print("All runs are done.")
