"""benchmarks/replicas.py, as a module: its count of what crosses replicas."""

from __future__ import annotations

import importlib.util

import tensorflow as tf
from installed import ROOT
from models import variable_of

from lossscale import LossScaleOptimizer

_PATH = ROOT / "benchmarks" / "replicas.py"
_spec = importlib.util.spec_from_file_location("replicas", _PATH)
replicas = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(replicas)


def count(strategy, family, shapes):
    """Returns what crosses replicas in a bare and a wrapped step, from the graph."""
    found = {}
    local = len(strategy.extended.worker_devices)
    for name, wrap in (("bare", lambda bare: bare), ("lossscale", LossScaleOptimizer)):
        with strategy.scope():
            optimizer = wrap(family.optimizers.SGD(1.0))
            weights = [variable_of(family, tf.ones(s)) for s in shapes]
        step = replicas.make_step(strategy, optimizer, weights)
        concrete = step.get_concrete_function(tf.TensorSpec([], tf.float32))
        found[name] = replicas.crossings(concrete, local)
    return found
