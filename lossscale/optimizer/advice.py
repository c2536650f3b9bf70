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


#: What is done where two answers are possible, by whether gradients are divided.
ASSUMED = {True: "They are divided by it.", False: "They are applied as they came."}
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
UNSURE = """\
These gradients were changed while they were still multiplied with the loss scale, and \
what came out depends on it: {cause}. {assumed} Unscale them first, then change them:

    grads = optimizer.get_unscaled_gradients(grads)        # <- before they are changed
    grads, _ = tf.clip_by_global_norm(grads, 1.0)
    optimizer.apply_gradients(zip(grads, variables))
"""
WRONG = """\
These gradients are multiplied with the loss scale to the power of {exponent}, where 1 \
is scaled and 0 unscaled. {assumed} Scale each loss once, unscale each gradient once:

    scaled_loss = optimizer.scale_loss(loss)               # once
    grads = tape.gradient(scaled_loss, variables)
    optimizer.apply_gradients(zip(grads, variables))
"""
NUMBER = """\
The loss scale was read as a Python number after the loss was scaled. If gradients \
were divided by that number, nobody can see it, and they are divided a second time \
now. Divide by `optimizer.loss_scale` itself, or in this line:

    grads = optimizer.get_unscaled_gradients(grads)
"""
HIDDEN = """\
These gradients were unscaled in another tf.function, or under XLA in a loop, a branch \
or a nested function, and then clipped by value, or changed in another way that makes \
infinities finite. An overflow cannot be seen any more, and the step is applied even \
if there was one. Apply them in the same tf.function, or clip them by their norm there:

    grads, _ = tf.clip_by_global_norm(grads, 1.0)
"""
