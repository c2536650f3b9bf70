"""What a monitor says. Each text has places for what was read or diagnosed."""

from __future__ import annotations

STALL = """\
{steps} steps in a row were skipped{unit}{where}. The loss scale is {scale}."""
LOSS = """\
The loss itself{name} is {kind}, before it is scaled{steps}: no loss scale can help."""
CAUSES = """\
lossscale.find_nonfinite(model, x, y) on that batch names the layer, or says that the \
data are not finite. Likeliest first: {causes}."""
#: The causes of a bad loss. Each is named only where it can be true.
BAD_DATA = "inf or NaN in the data"
LEARNING_RATE = "a learning rate that is too high"
ACTIVATIONS = """\
activations beyond float16's 65504, for which their layer needs dtype="float32\""""
ACTIVATIONS_AND_LAST = """\
activations beyond float16's 65504, for which their layer, and the last one, need \
dtype="float32\""""
DIVISION = "a logarithm of zero or a division by zero"
GRADIENTS = """\
Gradients that were not finite, the model's last ones first: {names}."""
INPUT = """\
The gradient of {kernel} is NaN, and that of {bias} is finite. So the input of this \
layer held inf or NaN{where}, or numbers whose products overflow in float32, and the \
layer's activation hid it from the loss, as relu does. Look at these rows of the data, \
and at what the layers before it make of them."""
BACKWARD = """\
No inf or NaN was seen in the loss itself, so this begins in the backward pass. """
SEARCH = """\
Most likely the loss scale is still too high. {search} {largest}"""
FIXED = """\
Most likely the loss scale, which is fixed, is too high. Use a smaller one, or a \
DynamicLossScale, which falls by itself."""
FLOOR = """\
Most likely `min_loss_scale` is too high: the loss scale is at that floor, {floor}, \
and cannot fall further. Lower it: the default is 1."""
IF_NOT = """ \
If steps are still skipped when it is low, look for an infinite derivative, as a \
square root has at zero: lossscale.find_nonfinite(model, x, y) names the layer."""
UNSCALED = """\
The loss scale is {now}: the gradients are not finite even without being scaled up. \
Either a derivative is infinite, as that of a square root is at zero. Or they are too \
large for float16, {rate}. lossscale.find_nonfinite(model, x, y) on that batch says \
which, and what to write."""
WIDE = """\
No layer computes in float16, so a loss scale of {now} is not the cause. Either a \
derivative is infinite, as that of a square root is at zero. Or the gradients are too \
large for float32, {rate}. lossscale.find_nonfinite(model, x, y) on that batch names \
the layer."""
RATE = "as they become where the learning rate is too high"
ENDS = "which ends at {end}"
ACCUMULATORS = """\
Variables of the model with the shape of such a gradient hold inf or NaN, too: \
{names}. If your program adds gradients up in them, clear them with \
assign(tf.zeros_like(total)). Multiplied by 0, an infinity becomes NaN and stays, and \
no step is applied again, at any loss scale."""
SPIKE = """\
A step was skipped as a spike, {last}. It changed neither a weight nor the loss scale. \
Look at that batch for wrong labels, damaged inputs, or a loss that is not averaged. \
If such gradients are normal for this run, raise `threshold` of the SpikeGuard. Later \
ones are counted as `spikes`."""
WEIGHTS = """\
Weights that hold inf or NaN: {names}. No step repairs them. Go back to a checkpoint."""
UNCHECKED = (
    WEIGHTS
    + """ \
This loss scale checks no gradient, so a step that overflows is applied, too: \
FixedLossScale(S, skip_nonfinite=True) skips it, and a DynamicLossScale also falls."""
)
STATISTICS = """\
Variables that are not trained, such as BatchNormalization's statistics, hold inf or \
NaN: {names}. Skipping a step does not undo what its forward pass did to them, and \
later steps cannot repair them: predictions are lost. Go back to a checkpoint, or \
reset them, and keep the data and that layer's inputs finite. \
LossScaleMonitor(restore_statistics=True) puts them back after each such step."""
SEARCHED = """\
Since training began, it was read between {low} and {high}."""
SEARCHING = """\
It has been lowered {done} times, from {high} to {scale}. After {left} more it reaches \
its floor, {floor}."""
LARGEST = """\
The largest gradient of the last good step that was read was {largest:.3g}: times the \
loss scale {scaled:.3g}, and float16 ends at 65504."""
LARGEST_UNSEEN = """\
The largest gradient is not known, since no good step was read."""
LARGEST_NOT_KEPT = """\
The largest gradient is not known: LossScaleMonitor(check_underflow=True) keeps it."""
BAD_LOSSES = """\
{steps} skipped because the loss{name} was {kinds} before it was scaled{where}{rows}."""
BAD_LOSS_COUNTED = """\
Each of these steps counted as an overflow, though no loss scale is at fault: it was \
{before} when the epoch began, and is {now}. \
LossScaleOptimizer(..., nonfinite_loss="skip") leaves it as it is at such steps."""
MANY_BAD_LOSSES = """\
With nonfinite_loss="skip" the loss scale ignores a bad loss. But ten steps in a row, \
or more than one in five, had one, so {counted}: the loss scale was {before} when the \
epoch began, and is {now}. Most likely the loss is computed in float16, and overflows \
there. Compute the loss in float32: give the last layer dtype="float32", and cast to \
tf.float32 before you sum."""
LEFT_OUT = """\
Steps were skipped as {reason}{where}."""
LAST_SPIKE = """\
with a gradient of {largest:.3g} in {name}, {times:.3g} times the limit of \
{limit:.3g}"""
UNDERFLOW = """\
Gradients may underflow: for {epochs} epochs no step was skipped, and the largest \
scaled gradient stayed {least} doublings or more below 65504, where float16 ends. Only \
{left} of float16's {all} doublings are left below it, and smaller gradients become \
zero. The loss scale is {scale}, and could be {possible}. Write

    scale = lossscale.HeadroomLossScale()  # finds it by itself
    optimizer = lossscale.LossScaleOptimizer(inner_optimizer, scale)
"""
