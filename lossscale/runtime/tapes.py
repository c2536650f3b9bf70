"""What the open gradient tapes record."""

from __future__ import annotations

import tensorflow as tf

# Not public: TensorFlow's own gradients of functions call these two functions. They are
# in the module `record` on TensorFlow 2.21, and in `tape` on 2.4.
try:
    from tensorflow.python.eager import record
except ImportError:
    from tensorflow.python.eager import tape as record

from lossscale.runtime.aliases import Tensor


def record_what_uses(tensor: Tensor) -> bool:
    """Tells whether a tape records operations on this tensor now."""
    return isinstance(tensor, tf.Tensor) and bool(
        record.should_record_backprop([tensor])
    )
