"""The state of one optimizer's step, on the device, and who moves it."""

from __future__ import annotations

import enum
import weakref
from functools import partial
from typing import Any, Dict, List, NamedTuple, Optional

import tensorflow as tf

from lossscale.provenance.witness import Witness
from lossscale.runtime import graphs, op_callbacks
from lossscale.runtime.aliases import Flag, Grads, Scalar, Variable
from lossscale.runtime.control import select
from lossscale.scales.base import LossScale
from lossscale.scales.uses import Product

#: What `StepState.overflow` holds: no overflow was seen; one was, and an apply has
#: counted it; one was, and no apply has counted it yet.
NO_OVERFLOW, COUNTED, SEEN = 0.0, 1.0, 2.0


class Stage(enum.Enum):
    """The stage of a step: which of our methods was the last, as torch's `OptState`.

    `apply_gradients` leaves it as it is: a second apply does what the first one did.
    """

    NOTHING = "neither of these so far"
    SCALED = "scale_loss: the division is pending"
    UNSCALED = "get_unscaled_gradients: it is done"


class Reading(NamedTuple):
    """A stage, and the loss scale S of that call, as they were read from the device.

    One number holds both: S if scaled, -S if unscaled, 0 if nothing.
    """

    number: Scalar

    def is_at(self, stage: Stage) -> Flag:
        if stage is Stage.NOTHING:
            return tf.equal(self.number, 0.0)
        return self.number > 0.0 if stage is Stage.SCALED else self.number < 0.0

    @property
    def loss_scale(self) -> Scalar:
        """What multiplied the loss, or divided the gradients."""
        return tf.abs(self.number)


class StepState:
    """The state of one optimizer's step: `float32` scalars on each replica.

    `pending` is the stage, as a `Reading`. `overflow` tells whether unscaled gradients
    had overflowed, and whether an apply has counted that. `waiting` is 1 while
    gradients of this optimizer's own loss wait to be applied. It is written and read
    only while several optimizers share the loss scale. `given` is a number of the last
    list that `get_unscaled_gradients` was given, to recognize that list.
    """

    def __init__(self) -> None:
        variable = partial(
            tf.Variable,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        with tf.init_scope():
            self.pending = variable(0.0, name="pending")
            self.overflow = variable(NO_OVERFLOW, name="overflow_seen")
            self.waiting = variable(0.0, name="waiting")
            self.given = variable(0.0, name="given")

    def variables(self) -> Dict[str, Variable]:
        return {v.name.split(":")[0]: v for v in vars(self).values()}

    def read(self) -> Reading:
        return Reading(tf.convert_to_tensor(self.pending))

    def move(
        self, stage: Stage, loss_scale: Scalar, where: Optional[Flag] = None
    ) -> None:
        """Moves the step to a stage, by this loss scale, unless `where` is False."""
        number = loss_scale if stage is Stage.SCALED else -loss_scale
        if where is not None:
            number = select(where, number, self.read().number)
        self.pending.assign(number, read_value=False)

    def note_waiting(self, waits: bool) -> None:
        self.waiting.assign(float(waits), read_value=False)

    def note_given(self, grads: Grads) -> None:
        number = _number_of(grads)
        if number is not None:
            self.given.assign(number, read_value=False)

    def was_given(self, grads: Grads) -> Flag:
        """Whether `get_unscaled_gradients` is known to have had this list last."""
        number = _number_of(grads)
        if number is None:
            return False
        return tf.logical_and(tf.equal(number, self.given), number != 0.0)

    def note_check(self, is_finite: Optional[Flag]) -> None:
        """Notes whether unscaled gradients were finite. None: they were not checked."""
        is_seen = tf.convert_to_tensor(self.overflow) > COUNTED
        now = select(is_seen, SEEN, NO_OVERFLOW)  # a counted one has ended
        if is_finite is not None:
            now = select(is_finite, now, SEEN)
        self.overflow.assign(now, read_value=False)

    def count_overflow(self, are_scaled: bool) -> Flag:
        """Counts an overflow for an apply. Returns True if there is none to count.

        A second apply of the same step, as of other variables, counts the same overflow
        again, unless it is known that its gradients `are_scaled`.
        """
        least = SEEN
        if not are_scaled:
            is_same_step = self.read().is_at(Stage.UNSCALED)
            least = select(is_same_step, COUNTED, SEEN)
        is_none = tf.convert_to_tensor(self.overflow) < least
        now = select(is_none, NO_OVERFLOW, COUNTED)
        self.overflow.assign(now, read_value=False)
        return is_none


def _number_of(grads: Grads) -> Optional[Scalar]:
    """Returns the first number of the last gradient, often a bias's and so not 0."""
    for grad in reversed(grads):
        is_dense = grad is not None and not isinstance(grad, tf.IndexedSlices)
        if is_dense and grad.dtype.is_floating and grad.shape.num_elements():
            return tf.cast(tf.reshape(grad, [-1])[0], tf.float32)
    return None


class StepObserver:
    """Moves the states of all optimizers that share a loss scale, when it is used."""

    def __init__(self, loss_scale: LossScale) -> None:
        #: The `PendingDivision` of each optimizer that shares it.
        self.divisions: weakref.WeakSet[Any] = weakref.WeakSet()
        self.witness = Witness(loss_scale)
        #: The last step that the optimizers share: see `sharing.SharedStep`.
        self.shared_step: Any = None

    def __deepcopy__(self, memo: object) -> None:
        return None  # the copy of a loss scale has other optimizers

    @property
    def has_several(self) -> bool:
        return len(self.divisions) > 1

    @graphs.do_not_convert
    def note_read(self, tensor: Scalar) -> None:
        if op_callbacks.are_paused():
            return  # we read it ourselves
        self.witness.note_read(tensor)
        if not self.witness.has_variable and graphs.is_building():
            # What reads a state counts as what scales or unscales, as one that reads S.
            for state in self._states():
                state.read()

    def note_float(self) -> None:
        self.witness.note_float()

    @graphs.do_not_convert
    def note_loss(self, product: Product, owner: Any) -> None:
        self.witness.note_loss(product, owner)
        with op_callbacks.paused():
            for division in list(self.divisions):
                state = division.state
                if state is None:
                    self.witness.note_last_scale(product.loss_scale)
                elif division is owner or not self.has_several:
                    state.move(Stage.SCALED, product.loss_scale)
                else:  # rule 2: see `pending`
                    is_free = state.waiting < 1.0
                    state.move(Stage.SCALED, product.loss_scale, is_free)
                if division is owner:
                    division.note_waiting(True)

    def note_unscaled_by(self, grads: Grads, divisor: Scalar) -> None:
        self.witness.note_unscaled_by(grads)
        with op_callbacks.paused():
            states = self._states()
            free: List[Optional[Flag]] = [None] * len(states)
            if states and self.has_several:
                waiting = tf.stack([state.waiting > 0.0 for state in states])
                scaled = [state.read().is_at(Stage.SCALED) for state in states]
                # If the scaled loss of only one optimizer waits, they are that one's.
                scaled = tf.logical_and(waiting, tf.stack(scaled))
                is_one = tf.math.count_nonzero(scaled) < 2
                is_its = tf.logical_and(scaled, is_one)
                free = tf.unstack(tf.logical_or(is_its, tf.logical_not(waiting)))
            for state, is_free in zip(states, free):
                state.move(Stage.UNSCALED, divisor, is_free)
                state.note_check(None)

    def note_restored(self) -> None:
        """A checkpoint is read into the loss scale. Those of 3.0.0 hold no level."""
        for division in list(self.divisions):
            if division.ignored_losses is not None:
                division.ignored_losses.reset()

    def _states(self) -> List[StepState]:
        states = [division.state for division in list(self.divisions)]
        return [state for state in states if state is not None]
