"""A stand-in for `horovod.tensorflow`."""

from __future__ import annotations

import tensorflow as tf

#: How many gradients were added up, of which a test wants to know.
reduced = 0


def init():
    """Starts Horovod."""


def allreduce(tensor):
    """Returns the mean over all workers."""
    global reduced  # noqa: PLW0603 - a count of a module is enough for a stand-in
    reduced += 1
    return tf.identity(tensor)


class DistributedGradientTape:
    """Adds up what a tape computes. Horovod asks for variables of TensorFlow."""

    def __init__(self, tape):
        self._tape = tape

    def gradient(self, target, sources):
        """Returns the mean gradients over all workers."""
        for source in sources:
            source.ref()  # which Horovod calls, and Keras 3's variables do not have
        return [allreduce(grad) for grad in self._tape.gradient(target, sources)]
