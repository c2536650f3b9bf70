"""Uses: what becomes of one loss scale S, for all optimizers that share it."""

from __future__ import annotations

import weakref
from typing import Any, List, Optional

import tensorflow as tf

from lossscale.gradients.bundle import Bundle, as_they_are
from lossscale.gradients.check import dense_part, is_small
from lossscale.provenance import origins as of_lists
from lossscale.provenance.kinds import SCALE, SCALED, UNKNOWN, UNSCALED, Kind
from lossscale.provenance.origins import LOSS, Origins, Unscaled
from lossscale.provenance.walk import Kinds, notes_of
from lossscale.provenance.warnings import Reads
from lossscale.runtime import graphs, mode, op_callbacks, replicas
from lossscale.runtime.aliases import Divisors, Flag, Grads, Scalar
from lossscale.runtime.control import select
from lossscale.scales.base import LossScale, Product


class Uses:
    """The uses of a loss scale S, which reports each of them here.

    It notes of which kind values are, then tells the optimizers that share S, each a
    `PendingDivision`, which move the states of their steps.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        #: What S is read from. A `FixedLossScale` has no variable.
        variable = getattr(loss_scale, "current_loss_scale", None)
        self._has_variable = variable is not None
        self.reads = Reads()
        #: Of which kind all values are, as far as it can be seen.
        self.kinds = Kinds(variable, self.reads.note_operation)
        #: The optimizers that share S.
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        #: The last step that they share: see `sharing.SharedStep`.
        self.shared_step: Any = None
        #: Whether a loss was scaled since gradients were unscaled. Where an optimizer
        #: has a state, that knows it better.
        self.is_scaled = False

    def __deepcopy__(self, memo: object) -> None:
        """The copy of a loss scale has other optimizers, or none."""

    @property
    def has_several(self) -> bool:
        return len(self.optimizers) > 1

    # What the loss scale reports.

    @graphs.do_not_convert
    def note_read(self, tensor: Scalar) -> None:
        """A program read S as a tensor, perhaps to multiply a loss or to unscale."""
        if op_callbacks.are_paused():
            return  # we read it ourselves
        self.kinds.note(tensor, Kind(SCALE, (tensor,)))
        if not hasattr(tensor, LOSS):
            self.reads.tensors += 1
        if not self._has_variable and graphs.is_building():
            # What reads a state counts as what scales or unscales, as one that reads S.
            for optimizer in self._with_state():
                optimizer.state.read()

    def note_float(self) -> None:
        """A program read S as a Python number. No graph shows where that goes."""
        self.reads.read_as_number()

    @graphs.do_not_convert
    def note_loss(self, product: Product, owner: Any) -> None:
        """S multiplied a loss, for an optimizer. None: `LossScale.scale` did."""
        of_lists.note_product(self.kinds, product, owner)
        self.is_scaled = True
        self.reads.loss_scaled()
        with op_callbacks.paused():
            for optimizer in list(self.optimizers):
                optimizer.loss_scaled(product.loss_scale, owner)

    def unscale(self, loss_scale: LossScale, grads: Grads) -> Grads:
        """Returns gradients divided by what multiplied their loss, else by S of now."""
        scaled = as_they_are(grads)
        with op_callbacks.paused():
            last = now = loss_scale._value()
            optimizers = self._with_state()
            states = [optimizer.state for optimizer in optimizers]
            free: List[Optional[Flag]] = [None] * len(states)
            if states:
                scales = tf.stack([state.read() for state in states])
                if self.has_several:
                    waiting = tf.stack([state.waiting for state in states])
                    waits = tf.logical_and(scales > 0.0, waiting > 0.0)
                    has_own = tf.logical_and(waits, waiting >= 1.0)
                    # If the only loss that waits is an optimizer's own, they are that
                    # one's. If no own loss waits, they may be anybody's: eager mode
                    # sees later whose, as a graph may not.
                    is_one = tf.math.count_nonzero(waits) < 2
                    is_its = tf.logical_and(has_own, is_one)
                    if not mode.current().knows_values:
                        is_its = tf.where(tf.reduce_any(has_own), is_its, waiting < 1.0)
                    free = tf.unstack(is_its)
                    is_any = tf.logical_or(waits, tf.logical_not(tf.reduce_any(waits)))
                    scales = tf.where(is_any, scales, 0.0)
                greatest = tf.reduce_max(scales)  # of several, it does the least harm
                last = select(greatest > 0.0, greatest, now)
            else:
                last = self.last_scale(now)
            divisors = Origins(scaled, self.kinds).divisors(lambda: last)
            # What is unscaled already is divided again, as the program says.
            divisors = [now if by is None else by for by in divisors]
            unscaled = Bundle(loss_scale, scaled, divisors).divided().grads
            for state, is_free in zip(states, free):
                state.note_unscaled(next(iter(divisors), now), is_free)
                state.note_check(None)
                if is_free is not None:
                    state.note_returned(unscaled, tf.logical_not(is_free))
        self.reads.unscaled_count += sum(grad is not None for grad in unscaled)
        waiting = [each for each in self.optimizers if each.waits]
        for optimizer in list(self.optimizers):
            is_one = optimizer.waits and len(waiting) > 1
            if not waiting:  # now all states say that nothing is scaled
                optimizer.warnings.is_unclear = False
            elif is_one or not optimizer.warnings.has_own:
                optimizer.warnings.is_unclear = True
        for optimizer, is_free in zip(optimizers, free):
            # A function that was traced before may have scaled its loss.
            is_known = mode.current().knows_values and is_free is not None
            if is_known and not is_free and float(optimizer.state.waiting) > 0.0:
                optimizer.warnings.is_unclear = True
        self._note_all_unscaled(unscaled)
        return unscaled

    # What an optimizer reports and asks. Much it notes and asks of `kinds`.

    def note_last_scale(self, loss_scale: Scalar) -> None:
        """S multiplied a loss, and an optimizer has no state that holds it."""
        graph = graphs.current_graph()
        if graph is not None:
            notes_of(graph, self, dict)[replicas.this_one()] = loss_scale

    def note_unscaled(
        self,
        source: Unscaled,
        origins: Origins,
        scaled: Grads,
        divisors: Divisors,
        unscaled: Grads,
    ) -> None:
        """`source.owner` unscaled a list of these `origins`."""
        self._note_all_unscaled(unscaled, source)
        tensors = map(dense_part, unscaled)
        rows = zip(scaled, origins.kinds, divisors, tensors)
        for grad, kind, divisor, tensor in rows:
            if divisor is None:
                continue
            if kind.name == UNKNOWN:
                self.kinds.note(dense_part(grad), Kind(SCALED, (divisor,)))
            if graphs.is_building() or is_small(tensor):
                setattr(tensor, of_lists.BEFORE, of_lists.Before(grad, divisor))

    def last_scale(self, now: Scalar) -> Scalar:
        """Returns what `note_last_scale` was given here last, `now` if nothing was."""
        replica = replicas.this_one()
        for graph in filter(None, graphs.visible_graphs()):
            last = notes_of(graph, self, dict).get(replica)
            if last is not None:
                return last if graphs.is_visible(last) else now
        return now

    def _note_all_unscaled(self, unscaled: Grads, *sources: object) -> None:
        self.is_scaled = False
        self.reads.unscaled()
        for tensor in map(dense_part, unscaled):
            if tf.is_tensor(tensor):
                self.kinds.note(tensor, Kind(UNSCALED, sources))

    def _with_state(self) -> List[Any]:
        return [each for each in list(self.optimizers) if each.state is not None]
