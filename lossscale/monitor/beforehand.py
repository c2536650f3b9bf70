"""What to say before training begins: what cannot be, and what will go wrong."""

from __future__ import annotations

from typing import Any, List

from lossscale.runtime import kerases, mode

_SEVERAL_OPTIMIZERS = """\
`record` must be None with several optimizers, since a file holds the steps of one, \
got {}. Create a LossScaleMonitor(optimizers=...) for each that is to be recorded."""
_NOT_CHECKED = """\
`{}` must be {} with a loss scale that does not look at the gradients, got {!r}. \
FixedLossScale(S, skip_nonfinite=True) does."""
_SHARPNESS = """\
SharpnessAwareMinimization of Keras computes its gradients without the loss scale, \
and adds them to the weights before anybody looks: one that is infinite stays there, \
and no optimizer can take it back. docs/custom-loops.md has a step that scales, and \
restores the weights to the last bit."""
_BACKUP = """\
BackupAndRestore deletes its backup when training ends, also if on_stall="stop" ends \
it: a run that was stopped because it was dying cannot be resumed. Write \
LossScaleMonitor(on_stall="raise"): an error leaves the backup where it is{other}."""
_OTHER = ", or BackupAndRestore(..., delete_checkpoint=False)"


def warnings_of(monitor: Any) -> List[str]:
    """Returns what a monitor should warn of when training begins.

    Args:
      monitor: A `LossScaleMonitor` whose `on_train_begin` is called.
    """
    found = []
    if type(monitor.model).__name__ == "SharpnessAwareMinimization":
        found.append(_SHARPNESS)
    if monitor.on_stall == "stop":
        for each in kerases.callbacks_beside(monitor):
            if any(c.__name__ == "BackupAndRestore" for c in type(each).__mro__):
                # Those without the argument always delete it (seen on 2.4).
                deletes = getattr(each, "delete_checkpoint", None)
                other = "" if deletes is None else _OTHER
                found += [] if deletes is False else [_BACKUP.format(other=other)]
    return found


def check(optimizers: List[Any], record: Any, check_underflow: bool) -> None:
    """Raises unless a monitor can watch these optimizers."""
    if not mode.current().knows_values:
        raise RuntimeError(
            "`LossScaleMonitor` must read variables between steps, got `fit` in a "
            "tf.compat.v1 graph, where it cannot. Leave it out."
        )
    if record and len(optimizers) > 1:
        raise ValueError(_SEVERAL_OPTIMIZERS.format(len(optimizers)))
    for scale in [optimizer.loss_scale for optimizer in optimizers]:
        if record and not scale.checks_gradients:
            raise ValueError(_NOT_CHECKED.format("record", None, scale))
        if check_underflow and not scale.checks_gradients:
            raise ValueError(_NOT_CHECKED.format("check_underflow", False, scale))
