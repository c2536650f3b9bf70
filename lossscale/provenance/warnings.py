"""What optimizers warn of: a program that probably does not mean what it does.

Each warning is given once. No step depends on it.
"""

from __future__ import annotations

import weakref
from typing import Dict, List, Optional, Set, Union

from lossscale.provenance import kinds
from lossscale.provenance.kinds import SCALED, UNKNOWN, UNSCALED, Kind
from lossscale.provenance.origins import Origins
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
While these gradients were still scaled, a number such as a penalty was added to them \
or to their loss, or they were bounded, compared with a number, passed through a \
function or mixed with unscaled values. That is right only for what is not scaled. \
They are now divided by the loss scale. Add a penalty to the loss before you scale it. \
If a library clips, as TF-Agents does with `gradient_clipping`, turn its clipping off, \
and let the inner optimizer clip: Adam(1e-3, clipnorm=1.0). In code of your own \
unscale the gradients first, then change them:

    scaled_loss = optimizer.scale_loss(loss + penalty)     # not scale_loss(loss) + ...
    grads = tape.gradient(scaled_loss, variables)
    grads = optimizer.get_unscaled_gradients(grads)        # before they are changed
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
    """How a program has read a loss scale S, by which it may divide gradients itself.

    ```
    since                          a read as a tensor divides     a read as a number
    scale_loss                     perhaps                        divides, perhaps
    a step, or the beginning       not the first: it may          only after that first
                                   multiply a loss                read as a tensor
    gradients were unscaled        no: S is logged                no
    ```
    """

    def __init__(self) -> None:
        self.ever_unscaled = False
        #: How many gradients `LossScale.unscale` returned that no step has applied.
        self.unscaled_count = 0
        #: The warnings of all optimizers that share S.
        self.of_optimizers: weakref.WeakSet[Warnings] = weakref.WeakSet()
        #: Whether a graph adds a term that depends on weights to what is scaled. None:
        #: not looked for any more, since that was warned of, or since S was read as a
        #: number, by which the term may have been multiplied.
        self.adds_a_term: Optional[bool] = False
        self._begin(-1)

    def _begin(self, tensors: float) -> None:
        #: How many reads of S as a tensor, and as a number, may have divided gradients.
        self.tensors, self.numbers = tensors, 0

    def loss_scaled(self) -> None:
        self._begin(0)

    def unscaled(self) -> None:
        self.ever_unscaled = True
        self._begin(float("-inf"))

    def read_as_number(self) -> None:
        self.numbers += self.tensors >= 0
        self.adds_a_term = None

    def note_operation(self, op: Op, kind_of: Dict[int, Optional[Kind]]) -> None:
        """A graph has an operation. `kind_of` has the kinds of what is before it."""
        if self.adds_a_term is False and op.type in _ADDITIONS:
            names = [(kind_of.get(id(t)) or Kind(UNKNOWN)).name for t in op.inputs]
            terms = [t for t, name in zip(op.inputs, names) if name == UNKNOWN]
            depend = (_depends_on_weights(term, kind_of) for term in terms)
            self.adds_a_term = SCALED in names and any(depend)


class Warnings:
    """The warnings of one optimizer.

    Attributes:
      optimizer_class: The name of the optimizer's class.
      has_own: Whether the optimizer ever had a loss of its own.
      is_unclear: Whether somebody else may have unscaled its gradients: another
        optimizer, if this one never had a loss of its own, or the loss scale itself,
        while gradients of several optimizers waited to be applied.
      unscaled_count: How many gradients it has unscaled since its last step.
    """

    def __init__(self, loss_scale: LossScale, reads: Reads, is_silent: bool) -> None:
        self._loss_scale, self._reads, self._is_silent = loss_scale, reads, is_silent
        self._given: Set[str] = set()
        self.optimizer_class = "LossScaleOptimizer"
        self.has_own, self.is_unclear = False, reads.ever_unscaled
        self.unscaled_count = 0
        reads.of_optimizers.add(self)

    def owner_known(self, is_own: bool) -> None:
        """It is known whose gradients wait now: its own loss's if `is_own`."""
        self.has_own, self.is_unclear = self.has_own or is_own, False

    def warn(
        self, origins: Origins, variables: List[Variable], is_divided: bool
    ) -> None:
        """Warns at a step that trains `variables` with gradients of these origins.

        `is_divided`: whether gradients of unknown kind are there, and are divided.
        """
        reads, names, messages = self._reads, origins.names, []
        if not self._loss_scale._was_used:
            messages.append(_NEVER_SCALED)
        was_read = is_divided and (reads.tensors > 0 or self.is_unclear)
        if names & {kinds.CHANGED, kinds.SQUARED, kinds.INVERSE}:
            messages.append(_CHANGED)
        elif was_read or (reads.numbers and (is_divided or SCALED in names)):
            messages.append(_READ)  # the program may have divided these itself
        if reads.adds_a_term:
            messages.append(_ADDED)
            reads.adds_a_term = None
        reads._begin(-1)
        self._note_applied(origins)
        for message in messages:
            if not self._is_silent and message not in self._given:
                self._given.add(message)
                # Python shows equal warnings of one line once, and the names differ.
                name = next(map(keras_versions.variable_name, variables), "")
                others = " and others" if len(variables) > 1 else ""
                warn(f"{self.optimizer_class} for {name!r}{others}: {message}")

    def _note_applied(self, origins: Origins) -> None:
        """If all that was unscaled is applied here, others' gradients are scaled."""
        is_by_scale = origins.names == {UNSCALED} and not origins.lists
        by: Union[Reads, Warnings] = self._reads if is_by_scale else self
        if 0 < by.unscaled_count <= origins.count:
            for each in list(self._reads.of_optimizers):
                each.is_unclear = False
        by.unscaled_count = 0


def _depends_on_weights(tensor: Tensor, kind_of: Dict[int, Optional[Kind]]) -> bool:
    """Whether it is known that a gradient goes from a tensor to weights, without S.

    Weights are variables that are known to be numbers. Arguments of functions are data.
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
