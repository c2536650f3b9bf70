"""benchmarks/replicas.py and timing.py as modules; what crosses replicas, counted."""

import sys

import tensorflow as tf
from installed import ROOT
from models import variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer

sys.path.append(str(ROOT / "benchmarks"))

import replicas
import timing as timing


def count(strategy, family, shapes, loss_scale=DynamicLossScale):
    """Returns what crosses replicas in a bare and a wrapped step, from the graph."""
    found = {}
    local = len(strategy.extended.worker_devices)
    for name in ("bare", "lossscale"):
        with strategy.scope():
            optimizer = family.optimizers.SGD(1.0)
            if name == "lossscale":
                optimizer = LossScaleOptimizer(optimizer, loss_scale())
            weights = [variable_of(family, tf.ones(s)) for s in shapes]
        step = replicas.make_step(strategy, optimizer, weights)
        concrete = step.get_concrete_function(tf.TensorSpec([], tf.float32))
        found[name] = replicas.crossings(concrete, local)
    return found
