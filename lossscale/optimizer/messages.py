"""The texts of warnings."""

NEVER_SCALED = """\
The loss was never scaled before this step was traced or run: small float16 gradients \
are lost. Add the two lines marked below to your training step:

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
CHANGED = """\
While these gradients were still scaled, they were bounded, compared with a number, \
passed through a function or mixed with unscaled ones, which is right for unscaled \
gradients only. They are now divided by the loss scale. Unscale the gradients first, \
then change them:

    grads = optimizer.get_unscaled_gradients(grads)        # <- before they are changed
    grads, _ = tf.clip_by_global_norm(grads, 1.0)
    optimizer.apply_gradients(zip(grads, variables))
"""
READ = """\
The loss scale was read between `scale_loss` and `apply_gradients`, or other gradients \
were unscaled by it, and lossscale cannot see whether these gradients were divided by \
it. They are now divided by it. If your program divided them before, that is once too \
often. Let the optimizer that applies them divide them:

    grads = optimizer.get_unscaled_gradients(grads)        # also remembers an overflow
"""
