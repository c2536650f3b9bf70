"""What the wrappers warn of: a loss scale that does not do what it is there for."""

from __future__ import annotations


class LossScaleWarning(UserWarning):
    """A loss scale is there, but does not do what it is there for."""


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
