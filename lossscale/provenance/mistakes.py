"""Warns of a program's likely mistakes, of each once. No step depends on it."""

from __future__ import annotations

import math
from typing import Dict, List, Optional, Set

from lossscale.provenance import kinds
from lossscale.provenance.kinds import SCALED, UNKNOWN, Kind
from lossscale.runtime import keras_versions
from lossscale.runtime.aliases import Op, Tensor, Variable
from lossscale.runtime.graphs import captured_by
from lossscale.runtime.loss_scale_warning import warn
from lossscale.scales.base import LossScale

_NEVER_SCALED = """\
The loss was never scaled before this step was traced or run: small float16 gradients \
are lost. Add the two lines marked below to your training step:

    with tf.GradientTape() as tape:
        loss = ...
        scaled_loss = optimizer.scale_loss(loss)           # <- add
    grads = tape.gradient(scaled_loss, variables)          # <- scaled_loss, not loss
    optimizer.apply_gradients(zip(grads, variables))
"""
_CHANGED = """\
While these gradients were still scaled, they were bounded, compared with a number, \
passed through a function or mixed with unscaled ones, which is right for unscaled \
gradients only. They are now divided by the loss scale. If a library clips them, as \
TF-Agents does with `gradient_clipping`, turn its clipping off, and let the inner \
optimizer clip: Adam(1e-3, clipnorm=1.0). In code of your own unscale the gradients \
first, then change them:

    grads = optimizer.get_unscaled_gradients(grads)        # <- before they are changed
    grads, _ = tf.clip_by_global_norm(grads, 1.0)
    optimizer.apply_gradients(zip(grads, variables))
"""
_READ = """\
The loss scale was read between `scale_loss` and `apply_gradients`, or other gradients \
were unscaled by it, and lossscale cannot see whether these gradients were divided by \
it. They are now divided by it. If your code already divided them, they are now \
divided twice. Replace your division with:

    grads = optimizer.get_unscaled_gradients(grads)        # also remembers an overflow
"""
_ADDED = """\
A term that depends on the weights was added to a loss that was scaled before, or to \
its gradients. It is divided by the loss scale with them, and so nearly lost. Add it \
to the loss, then scale the loss:

    scaled_loss = optimizer.scale_loss(loss + penalty)     # not scale_loss(loss) + ...
"""
_ADDITIONS = {"Add", "AddV2", "AddN", "Sub"}
#: What reads a weight, and what no gradient goes through.
_READS = {"ReadVariableOp", "ResourceGather"}
_STOPS = {"StopGradient", "PreventGradient", *kinds.NUMBERS}
#: How many operations are followed from a term of a sum back to the weights.
_TERM = 1000


class Reads:
    """How a program used a loss scale S, by which it may divide gradients itself."""

    def __init__(self) -> None:
        self.ever_unscaled = False
        #: Whether a graph adds a term that depends on weights to what is scaled. None:
        #: not looked for any more, since that was warned of, or since S was read as a
        #: number, by which the term may have been multiplied.
        self.adds_a_term: Optional[bool] = False
        self._begin(harmless=1.0)

    def _begin(self, harmless: float) -> None:
        #: How many reads of S as a tensor divide no gradients, and how often S was read
        #: since, as a tensor and as a number.
        self.harmless, self.tensors, self.numbers = harmless, 0, 0

    def loss_scaled(self) -> None:
        self._begin(harmless=0.0)

    def unscaled(self) -> None:
        """All gradients since the last loss are divided: what reads S now logs it."""
        self.ever_unscaled = True
        self._begin(harmless=math.inf)

    def stepped(self) -> None:
        """A step was made. Without `scale_loss` the next read may scale the loss."""
        self._begin(min(self.harmless, 1.0))

    def read(self) -> None:
        """S was read as a tensor."""
        self.tensors += 1
        if self.harmless:  # a loss may be multiplied by this tensor only now
            self.numbers = 0

    def read_as_number(self) -> None:
        self.numbers += 1
        self.adds_a_term = None

    def note_operation(self, op: Op, kind_of: Dict[int, Optional[Kind]]) -> None:
        """A graph has an operation. `kind_of` has the kinds of what is before it."""
        if self.adds_a_term is False and op.type in _ADDITIONS:
            names = [(kind_of.get(id(t)) or Kind(UNKNOWN)).name for t in op.inputs]
            terms = [t for t, name in zip(op.inputs, names) if name == UNKNOWN]
            depend = (_depends_on_weights(term, kind_of) for term in terms)
            self.adds_a_term = SCALED in names and any(depend)


class Mistakes:
    """The likely mistakes of a program with one optimizer."""

    def __init__(self, loss_scale: LossScale, reads: Reads, is_silent: bool) -> None:
        self._loss_scale, self._reads, self._is_silent = loss_scale, reads, is_silent
        self._warned: Set[str] = set()
        #: The class of the optimizer, for its warnings.
        self.kind = "LossScaleOptimizer"
        #: Whether the optimizer ever had a loss of its own, and whether gradients that
        #: may be its own were unscaled without it.
        self.has_own, self._is_unclear = False, reads.ever_unscaled

    def owner_known(self, is_own: bool) -> None:
        """It is known whose gradients wait now: its own loss's if `is_own`."""
        self.has_own, self._is_unclear = self.has_own or is_own, False

    def unscaled_elsewhere(self, whose_is_unknown: bool = False) -> None:
        """Another caller unscaled gradients, perhaps those of this optimizer."""
        self._is_unclear = self._is_unclear or whose_is_unknown or not self.has_own

    def warn(
        self, names: Set[str], variables: List[Variable], is_divided: bool
    ) -> None:
        """Warns of each mistake once, at a step that trains `variables`.

        `is_divided`: whether gradients of unknown kind are there, and are divided.
        """
        reads, messages = self._reads, []
        if not self._loss_scale._was_used:
            messages.append(_NEVER_SCALED)
        was_read = is_divided and (reads.tensors > reads.harmless or self._is_unclear)
        if names & {kinds.CHANGED, kinds.SQUARED, kinds.INVERSE}:
            messages.append(_CHANGED)
        elif was_read or (reads.numbers and (is_divided or SCALED in names)):
            messages.append(_READ)  # the program may have divided these itself
        if reads.adds_a_term:
            messages.append(_ADDED)
            reads.adds_a_term = None
        reads.stepped()
        for message in messages:
            if not self._is_silent and message not in self._warned:
                self._warned.add(message)
                # Python shows equal warnings of one line once, and the names differ.
                name = next(map(keras_versions.variable_name, variables), "")
                others = " and others" if len(variables) > 1 else ""
                warn(f"{self.kind} for {name!r}{others}: {message}")


def _depends_on_weights(tensor: Tensor, kind_of: Dict[int, Optional[Kind]]) -> bool:
    """Whether a gradient goes from a graph's tensor to weights, and S not in it.

    False where it is not known. Weights are variables that are known to be numbers, and
    what a function is given is data.
    """
    tensors, seen, reads_weight = [tensor], set(), False
    while tensors:
        op = tensors.pop().op
        if op.name in seen or op.type in _STOPS:
            continue
        seen.add(op.name)
        of_inputs = [kind_of.get(id(t)) for t in op.inputs]
        is_data = op.type == "Placeholder" and captured_by(op.outputs[0]) is None
        if len(seen) > _TERM or any(k and k.name != UNKNOWN for k in of_inputs):
            return False
        if op.type in _READS:
            if of_inputs[0] is not None:  # a variable of which nothing is known
                return False
            reads_weight = True
        elif kinds.is_call(op.type) and not is_data:
            return False
        else:
            factors = op.inputs if op.type in kinds.PRODUCTS else ()
            values = map(kinds.known_value, factors)
            if any(value is not None and not value.any() for value in values):
                return False  # programs write `+ 0.0 * x`, so that no gradient is None
            tensors += [t for t in op.inputs if t.dtype.is_floating]
    return reads_weight
