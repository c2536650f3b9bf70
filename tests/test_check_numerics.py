"""`tf.debugging.enable_check_numerics()`, with which people look for a NaN.

It stops a run at each infinity and NaN, so none of our operations makes one of finite
numbers: support/check_numerics.py. An overflow of scaled gradients stops it, too.
"""

from __future__ import annotations

import os
import sys

import pytest
from processes import SUPPORT, printed

#: An overflow, which is found: the check is on.
OVERFLOWS = """
import tensorflow as tf
tf.debugging.enable_check_numerics()
import lossscale
engine, weights = lossscale.LossScaleEngine(2.0**30), tf.Variable([1.0])
try:
    engine.scale_loss(tf.constant(1e35))
except tf.errors.InvalidArgumentError as error:
    print("stopped" if "Infinity or NaN" in str(error) else error)
"""


@pytest.mark.slow
def test_a_healthy_run_is_not_stopped():
    path = os.pathsep.join(sys.path)
    found = printed("-W", "ignore", SUPPORT / "check_numerics.py", PYTHONPATH=path)
    assert "All runs are done." in found
    assert "STOPPED" not in found


@pytest.mark.slow
def test_an_overflow_stops_a_run():
    assert printed("-c", OVERFLOWS, PYTHONPATH=os.pathsep.join(sys.path)) == "stopped\n"
