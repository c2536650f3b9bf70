"""The texts of the wrappers' warnings."""

from __future__ import annotations

from lossscale.runtime import warning

LossScaleWarning, warn = warning.LossScaleWarning, warning.warn
#: The sentence that stands for `{assumed}`, by whether the gradients are divided.
ASSUMED = {
    True: "They are divided by the loss scale.",
    False: "They are applied without dividing them by the loss scale.",
}
NEVER_SCALED = """\
The loss was never scaled: small float16 gradients are lost. The gradients are applied \
without dividing them by the loss scale. Add the two lines marked below to your \
training step:

    with tf.GradientTape() as tape:
        loss = ...
        scaled_loss = optimizer.scale_loss(loss)           # <- add
    grads = tape.gradient(scaled_loss, variables)          # <- scaled_loss, not loss
    optimizer.apply_gradients(zip(grads, variables))
"""
BARE_CHECKPOINT = """\
The checkpoint that you restored into this optimizer was written by an optimizer \
without loss scaling. None of its state was restored. Restore the checkpoint into \
`optimizer.inner_optimizer`:

    tf.train.Checkpoint(optimizer=optimizer.inner_optimizer).read(path)
"""
MOVED = """\
These gradients are divided by the present loss scale, which may not be the one that \
multiplied their loss. The loss was scaled in another tf.function, or in a dataset's \
function, which runs ahead, and a step may have changed the loss scale since then. \
Scale the loss in the tf.function that applies the gradients, or unscale the gradients \
where they are computed:

    grads = optimizer.get_unscaled_gradients(grads)
"""
AMBIGUOUS = """\
lossscale cannot tell whether these gradients are still scaled: they came from NumPy, \
from another process or as an argument of a tf.function, or their loss was scaled in a \
place that lossscale cannot see from here. {assumed} To be sure, scale the loss and \
apply the gradients in one tf.function, or unscale the gradients and apply the result:

    grads = optimizer.get_unscaled_gradients(grads)
    optimizer.apply_gradients(zip(grads, variables))
"""
UNSURE = """\
While these gradients were still scaled, an operation changed them that is right for \
unscaled gradients only: {cause}. {assumed} Unscale the gradients first, then change \
them:

    grads = optimizer.get_unscaled_gradients(grads)        # <- before they are changed
    grads, _ = tf.clip_by_global_norm(grads, 1.0)
    optimizer.apply_gradients(zip(grads, variables))
"""
WRONG = """\
These gradients contain the loss scale to the power of {exponent}. Gradients of a \
scaled loss contain it to the power of 1, unscaled gradients to the power of 0. \
{assumed} Scale each loss once, and unscale each gradient once:

    scaled_loss = optimizer.scale_loss(loss)               # once
    grads = tape.gradient(scaled_loss, variables)
    optimizer.apply_gradients(zip(grads, variables))
"""
NUMBER = """\
The loss scale was read as a Python number after the loss was scaled. lossscale cannot \
see whether you divided these gradients by that number. If you did, they are now \
divided a second time. Divide by `optimizer.loss_scale` itself, or write:

    grads = optimizer.get_unscaled_gradients(grads)
"""
HIDDEN = """\
An overflow in these gradients may go unnoticed, so that a bad step is applied. The \
gradients were unscaled in another tf.function, or under XLA in a loop, a branch or a \
nested function. Then they were changed in a way that makes infinities finite, as \
clipping by value does. Apply the gradients in the tf.function that unscales them, or \
clip them by their norm:

    grads, _ = tf.clip_by_global_norm(grads, 1.0)
"""
UNSEEN = """\
An overflow in these gradients may go unnoticed, so that the loss scale keeps growing: \
elements were chosen by `is_finite`, `is_nan` or `is_inf` before the gradients were \
checked. Unscale the gradients first, which checks them, then replace what you like:

    grads = optimizer.get_unscaled_gradients(grads)        # <- checks them
    grads = [tf.where(tf.math.is_finite(g), g, 0.0) for g in grads]
    optimizer.apply_gradients(zip(grads, variables))
"""
