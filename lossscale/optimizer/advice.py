"""What the wrappers warn of: a loss scale that does not do what it is there for."""

from __future__ import annotations

import sys
import warnings

#: Whose lines a user did not write.
_NOT_THE_USERS = {"lossscale", "tensorflow", "keras", "tf_keras"}


class LossScaleWarning(UserWarning):
    """A loss scale is there, but does not do what it is there for."""


def warn(message: str) -> None:
    """Gives a `LossScaleWarning` of the user's line that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in _NOT_THE_USERS:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, LossScaleWarning, stacklevel=level)


NEVER_SCALED = """\
The loss was never scaled: small float16 gradients are lost. Gradients are applied as \
they came, not divided by the loss scale. Add the two lines marked below to your \
training step:

    with tf.GradientTape() as tape:
        loss = ...
        scaled_loss = optimizer.scale_loss(loss)           # <- add
    grads = tape.gradient(scaled_loss, variables)          # <- scaled_loss, not loss
    optimizer.apply_gradients(zip(grads, variables))
"""
BARE_CHECKPOINT = """\
The checkpoint that was restored into this optimizer holds one without loss scaling, \
and none of its state was restored. Restore it into `optimizer.inner_optimizer`:

    tf.train.Checkpoint(optimizer=optimizer.inner_optimizer).read(path)
"""
MOVED = """\
The loss scale may have moved since it multiplied the loss of these gradients, in a \
function that was traced before: they are divided by what it is now. Scale the loss in \
the tf.function in which the gradients are applied, or unscale them where they are made:

    grads = optimizer.get_unscaled_gradients(grads)
"""
AMBIGUOUS = """\
It cannot be told whether these gradients are still multiplied with the loss scale: \
gradients like them were unscaled before, or nothing in sight has scaled their loss. \
{assumed} Apply gradients in the same tf.function in which their loss is scaled, or \
apply the very tensors, in these two lines:

    grads = optimizer.get_unscaled_gradients(grads)        # or none of them
    optimizer.apply_gradients(zip(grads, variables))
"""
