"""Errors and warnings before training begins."""

from __future__ import annotations

from typing import Any, List

from lossscale.runtime import kerases, mode

_SEVERAL_OPTIMIZERS = """\
`record` must be None with several optimizers, since a file holds the steps of one, \
got {}. Create a LossScaleMonitor(optimizers=...) for each one to record."""
_NOT_CHECKED = """\
`{}` must be {} with a loss scale that does not look at the gradients, got {!r}. \
FixedLossScale(S, skip_nonfinite=True) looks at them."""
_SHARPNESS = """\
SharpnessAwareMinimization of Keras computes its gradients without the loss scale, \
and adds them to the weights before anything checks them. An infinite one makes \
weights infinite, and no optimizer can undo that. docs/custom-loops.md has a step that \
scales the loss, and restores the weights to the last bit."""
_BACKUP = """\
BackupAndRestore deletes its backup when training ends, even if on_stall="stop" ends \
it. So a run that the monitor stopped cannot be resumed. Write \
LossScaleMonitor(on_stall="raise"), since an error keeps the backup{other}."""
_OTHER = ", or BackupAndRestore(..., delete_checkpoint=False)"


def warnings_of(monitor: Any) -> List[str]:
    """Returns the warnings that a monitor should give when training begins.

    Args:
      monitor: A `LossScaleMonitor` whose `on_train_begin` runs now.
    """
    found = []
    if type(monitor.model).__name__ == "SharpnessAwareMinimization":
        found.append(_SHARPNESS)
    if monitor.on_stall == "stop":
        for each in kerases.callbacks_beside(monitor):
            if any(c.__name__ == "BackupAndRestore" for c in type(each).__mro__):
                # Without this argument it always deletes the backup (seen on 2.4).
                deletes = getattr(each, "delete_checkpoint", None)
                other = "" if deletes is None else _OTHER
                found += [] if deletes is False else [_BACKUP.format(other=other)]
    return found


def check(optimizers: List[Any], record: Any, check_underflow: bool) -> None:
    """Raises unless a monitor can watch these optimizers."""
    if not mode.current().knows_values:
        raise RuntimeError(
            "`LossScaleMonitor` must read variables between steps, got `fit` in a "
            "tf.compat.v1 graph, where it cannot. Remove this callback."
        )
    if record and len(optimizers) > 1:
        raise ValueError(_SEVERAL_OPTIMIZERS.format(len(optimizers)))
    for scale in [optimizer.loss_scale for optimizer in optimizers]:
        if record and not scale.checks_gradients:
            raise ValueError(_NOT_CHECKED.format("record", None, scale))
        if check_underflow and not scale.checks_gradients:
            raise ValueError(_NOT_CHECKED.format("check_underflow", False, scale))
