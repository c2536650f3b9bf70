"""The texts of warnings, and how they are given."""

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


#: What is done with gradients that may be scaled or not: are they divided?
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
These gradients are divided by the loss scale as it is now. Their loss was scaled in \
another tf.function, or in a dataset's, which runs ahead, and a step may have changed \
the loss scale since. Scale the loss in the tf.function in which the gradients are \
applied, or unscale them where they are made:

    grads = optimizer.get_unscaled_gradients(grads)
"""
AMBIGUOUS = """\
lossscale cannot tell whether these gradients are still scaled: they came from NumPy, \
from another process or as an argument of a tf.function, or their loss was scaled \
where it cannot be seen from here. {assumed} To be sure, scale the loss and apply the \
gradients in one tf.function, or unscale them and apply what you get:

    grads = optimizer.get_unscaled_gradients(grads)
    optimizer.apply_gradients(zip(grads, variables))
"""
UNSURE = """\
These gradients were changed while they were still scaled, by an operation whose \
result is right for unscaled gradients only: {cause}. {assumed} Unscale them first, \
then change them:

    grads = optimizer.get_unscaled_gradients(grads)        # <- before they are changed
    grads, _ = tf.clip_by_global_norm(grads, 1.0)
    optimizer.apply_gradients(zip(grads, variables))
"""
WRONG = """\
These gradients hold the loss scale to the power of {exponent}. Gradients of a scaled \
loss hold it to the power of 1, unscaled ones to the power of 0. {assumed} Scale each \
loss once, unscale each gradient once:

    scaled_loss = optimizer.scale_loss(loss)               # once
    grads = tape.gradient(scaled_loss, variables)
    optimizer.apply_gradients(zip(grads, variables))
"""
NUMBER = """\
The loss scale was read as a Python number after the loss was scaled. If you divided \
these gradients by that number, nobody can see it, and they are now divided a second \
time. Divide by `optimizer.loss_scale` itself, or write:

    grads = optimizer.get_unscaled_gradients(grads)
"""
HIDDEN = """\
An overflow in these gradients may go unseen, and be applied. They were unscaled in \
another tf.function, or under XLA in a loop, a branch or a nested function, and then \
changed in a way that makes infinities finite, as clipping by value does. Apply them \
in the same tf.function, or clip them by their norm:

    grads, _ = tf.clip_by_global_norm(grads, 1.0)
"""
UNSEEN = """\
An overflow in these gradients may go unseen, so that the loss scale grows on: \
`is_finite`, `is_nan` or `is_inf` chose what is left of them before anybody had \
looked. Unscale them first, then replace what you like:

    grads = optimizer.get_unscaled_gradients(grads)        # <- looks at them
    grads = [tf.where(tf.math.is_finite(g), g, 0.0) for g in grads]
    optimizer.apply_gradients(zip(grads, variables))
"""
