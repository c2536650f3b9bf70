"""What is compiled by XLA is seen from wherever it is asked."""

from __future__ import annotations

import tensorflow as tf

from lossscale.runtime.mode import COMPILED_BY_XLA, in_xla


def test_xla_is_seen_from_within_branches_and_nested_functions():
    inner = tf.function(lambda: tf.constant(in_xla()), autograph=False)
    once = tf.function(
        lambda x: tf.cond(x > 0, inner, lambda: tf.constant(False)),
        **COMPILED_BY_XLA,
        autograph=False,
    )
    assert bool(once(tf.constant(1.0)))
    assert not bool(tf.function(lambda: tf.constant(in_xla()), autograph=False)())
    assert not in_xla()
