"""Is a division pending? What divides each gradient, and did it overflow before?

*`scale_loss` makes a division pending. `get_unscaled_gradients` divides.
`apply_gradients` divides if the division is still pending.* The kind of a gradient
tells whether it is, where it can be seen (`kinds`). Otherwise the state of the step
does: a few numbers of each optimizer on each replica, which cross what tracing cannot
see, such as functions that are called again, loops, branches and NumPy.

```
the last call              pending   apply divides gradients of unknown kind
none of ours               0         as its Keras's own wrapper: `_divisor_of_unknown`
scale_loss                 S         yes, by what multiplied the last loss
get_unscaled_gradients     -S        no, unless they are those that it was given
apply_gradients            as it was: a second apply of a step does what the first did
```

The law, where two lists of gradients or two optimizers meet:

1. What the program has said of a value is not asked of the state: what
   `get_unscaled_gradients` is given is scaled, and what it returns is unscaled.
2. A state belongs to one optimizer. What another one does, or `LossScale.scale` and
   `unscale`, moves it only while none of its own gradients wait to be applied, or if it
   is known that the gradients are its own.
3. What a body (a branch, a loop, a function) returns has the kind that its operations
   make of what it was given, if nobody scales or unscales inside.
4. An overflow that was seen waits until an apply has counted it. A counted one ends
   with the step: with its optimizer's next `scale_loss`, at the latest.
5. Where nobody knows, divide, and warn where Python can see it. A gradient that is
   divided twice hardly moves a weight, one that is not divided destroys it.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.bundle import Bundle, as_they_are, unscale_and_check
from lossscale.gradients.check import CLEAN, Check, all_true, dense_part, is_small
from lossscale.optimizer.kinds import SCALE, SCALED, UNKNOWN, UNSCALED, Kind, Kinds
from lossscale.optimizer.mistakes import Mistakes, Reads
from lossscale.runtime import graphs, mode, op_callbacks, replicas
from lossscale.runtime.aliases import Divisors, Flag, Grad, Grads, Scalar, Tensor
from lossscale.runtime.control import select
from lossscale.scales.base import (
    LossScale,
    observer_of,
    takes_the_flag,
    unguarded,
    value_of,
    was_used,
)
from lossscale.scales.ignored_losses import IgnoredLosses

#: The attribute of an unscaled tensor that tells what it was before.
_BEFORE = "_lossscale_before"
#: The attribute of a tensor of S that tells which loss it multiplied.
_LOSS = "_lossscale_loss"
#: What `overflow_seen` holds: there was none; an apply has counted it; none has yet.
NO_OVERFLOW, COUNTED, SEEN = 0.0, 1.0, 2.0


class StepState:
    """The state of one optimizer's step: `float32` scalars on each replica.

    `pending` is as in the table above. `overflow` tells whether unscaled gradients had
    overflowed. `waiting` is 1 while gradients of this optimizer's own loss wait to be
    applied, and always 0 if no other one shares the loss scale. `given` is a number of
    the last list that `get_unscaled_gradients` was given, to know it again.
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

    def move(self, pending: Scalar, where: Optional[Flag] = None) -> None:
        """Notes that a loss was scaled, or gradients unscaled, if `where` is True."""
        if where is not None:
            pending = select(where, pending, tf.convert_to_tensor(self.pending))
        self.pending.assign(pending, read_value=False)

    def note_check(self, is_finite: Optional[Flag]) -> None:
        """Gradients were unscaled. `is_finite` is None if nobody looked at them."""
        is_seen = tf.convert_to_tensor(self.overflow) > COUNTED
        now = select(is_seen, SEEN, NO_OVERFLOW)  # a counted one has ended
        if is_finite is not None:
            now = select(is_finite, now, SEEN)
        self.overflow.assign(now, read_value=False)

    def count_overflow(self, kind: str) -> Flag:
        """Counts an overflow for an apply of this kind. Returns whether there was none.

        A second apply of the same step, as of other variables, counts a counted one
        again, but not for gradients that are still scaled.
        """
        least = SEEN
        if kind != SCALED:
            goes_on = tf.convert_to_tensor(self.pending) < 0.0
            least = select(goes_on, COUNTED, SEEN)
        is_none = tf.convert_to_tensor(self.overflow) < least
        now = select(is_none, NO_OVERFLOW, COUNTED)
        self.overflow.assign(now, read_value=False)
        return is_none


class Unscaled(NamedTuple):
    """A list of gradients that was unscaled: the source of what is made of them."""

    division: PendingDivision  # of the optimizer that unscaled it
    check: Check
    length: int  # `None`s count, too
    losses: List[Tensor]  # those of which it is known that it was made of them


class Before(NamedTuple):
    """What an unscaled gradient was, and what divided it. It hangs on the tensor."""

    grad: Grad
    divisor: Scalar


class Loss(NamedTuple):
    """A loss and the optimizer that scaled it. It hangs on the tensor of S."""

    value: Tensor
    #: Returns None for `LossScale.scale` itself.
    owner: Callable[[], Optional[PendingDivision]]


class StepObserver:
    """Is told of the uses of a `LossScale` for all optimizers that share it."""

    def __init__(self, loss_scale: LossScale) -> None:
        self.divisions: weakref.WeakSet[PendingDivision] = weakref.WeakSet()
        #: What S is read from. A `FixedLossScale` has no variable.
        self._variable = getattr(unguarded(loss_scale), "current_loss_scale", None)
        self.kinds, self.reads = Kinds(self._variable), Reads()
        self.kinds.on_operation = self.reads.note_operation
        #: The last step that the optimizers share: see `step._SharedStep`.
        self.shared_step: Any = None
        #: The optimizer that scales a loss now. None: `LossScale.scale` itself.
        self.owner: Optional[PendingDivision] = None
        #: Where there is no state: whether a loss was scaled since gradients were
        #: unscaled, and each replica's `last_scale` of eager mode.
        self.is_scaled = False
        self._in_eager: Dict[object, Scalar] = {}

    def __deepcopy__(self, memo: object) -> None:
        return None  # the copy of a loss scale has other optimizers

    @graphs.do_not_convert
    def note_read(self, tensor: Scalar) -> None:
        """S was read as a tensor, by a program or to scale a loss."""
        if op_callbacks.are_paused():
            return  # we read it ourselves
        self.kinds.note(tensor, Kind(SCALE, (tensor,)))
        if self._variable is None and graphs.is_building():
            # What reads a state counts as what scales or unscales, as one that reads S.
            for state in self._states():
                tf.convert_to_tensor(state.pending)
        if not hasattr(tensor, _LOSS):
            self.reads.read()

    def note_float(self) -> None:
        """A program read S as a Python number."""
        self.reads.read_as_number()

    @graphs.do_not_convert
    def note_loss(self, loss: Tensor, loss_scale: Scalar) -> None:
        """A loss is multiplied by a tensor of S."""
        owner = self.owner
        of_whom = weakref.ref(owner) if owner else lambda: None
        setattr(loss_scale, _LOSS, Loss(loss, of_whom))
        self._last_scales(graphs.current_graph())[replicas.this_one()] = loss_scale
        self.is_scaled = True
        self.reads.loss_scaled()
        with op_callbacks.paused():
            for each in list(self.divisions):
                each.note_scaled(loss_scale, is_own=each is owner)

    def note_unscaled_by(self, grads: Grads, divisor: Scalar) -> None:
        """Gradients were divided by S, by `LossScale.unscale`, which checks nothing."""
        self.mark_unscaled(grads, ())
        own = [each for each in list(self.divisions) if each.waits]
        if len(own) > 1:
            for each in own:
                each.mistakes.unscaled_elsewhere(whose_is_unknown=True)
        with op_callbacks.paused():
            states = self._states()
            free: List[Optional[Flag]] = [None] * len(states)
            if self.has_several:
                waiting = tf.stack([state.waiting > 0.0 for state in states])
                scaled = tf.stack([state.pending > 0.0 for state in states])
                # If the scaled loss of only one optimizer waits, they are that one's.
                scaled = tf.logical_and(waiting, scaled)
                is_one = tf.math.count_nonzero(scaled) < 2
                is_its = tf.logical_and(scaled, is_one)
                free = tf.unstack(tf.logical_or(is_its, tf.logical_not(waiting)))
            for state, is_free in zip(states, free):
                state.move(-divisor, is_free)
                state.note_check(None)

    def note_restored(self) -> None:
        """A checkpoint is read into the loss scale: see `LossScale._lookup_dependency`.

        Those of 3.0.0 and older hold no level.
        """
        for each in list(self.divisions):
            if each.ignored_losses is not None:
                each.ignored_losses.reset()

    def mark_unscaled(self, grads: Grads, sources: Tuple[object, ...]) -> None:
        """Gradients were unscaled. From now on it is seen what is made of them."""
        self.is_scaled = False
        self.reads.unscaled()
        for tensor in map(dense_part, grads):
            if tf.is_tensor(tensor):
                self.kinds.note(tensor, Kind(UNSCALED, sources))

    def _last_scales(self, graph: Any) -> Dict[object, Scalar]:
        return self._in_eager if graph is None else graphs.notes_of(graph, self, dict)

    def last_scale(self) -> Optional[Scalar]:
        """Returns the tensor of S that multiplied the last loss that is seen here."""
        every = map(self._last_scales, graphs.visible_graphs())
        replica = replicas.this_one()
        last = next((each[replica] for each in every if replica in each), None)
        return last if last is not None and graphs.is_visible(last) else None

    def _states(self) -> List[StepState]:
        every = [each.state for each in list(self.divisions)]
        return [state for state in every if state is not None]

    @property
    def has_several(self) -> bool:
        """Whether several optimizers share the loss scale."""
        return len(self.divisions) > 1


class PendingDivision:
    """Whether the gradients of one optimizer are still to be divided."""

    def __init__(
        self, loss_scale: LossScale, *, unscales_in_apply: bool, unscales_itself: bool
    ) -> None:
        """See `LossScaleEngine._set_up`."""
        self.loss_scale, self._unscales_itself = loss_scale, unscales_itself
        self.observer = observer = observer_of(loss_scale, StepObserver)
        self._unscales_in_apply = unscales_in_apply
        self.mistakes = Mistakes(loss_scale, observer.reads, is_silent=unscales_itself)
        #: How many bad losses the loss scale has ignored. None: it ignores none.
        self.ignored_losses: Optional[IgnoredLosses] = None
        # A session runs any part of a graph, and parameter servers are asked over the
        # network: there is no state where nothing orders the calls.
        has_state = not (mode.current().runs_parts or replicas.train_apart())
        self._state = StepState() if has_state else None
        #: A function that was traced before tells the state of this optimizer nothing.
        self._is_late = was_used(loss_scale)
        #: Whether gradients of its own loss wait to be applied, as far as Python sees.
        self.waits = False
        #: Whether gradients of its own were ever unscaled: if not, no overflow waits.
        self._may_hold_overflow = False
        observer.divisions.add(self)
        observer.kinds.note_variables(self.kept().values(), Kind(SCALE))

    def scale(self, loss: Tensor) -> Any:
        """Returns a loss of its own times the loss scale."""
        self.observer.owner = self
        try:
            return self.loss_scale.scale(loss)
        finally:
            self.observer.owner = None

    def note_scaled(self, loss_scale: Scalar, is_own: bool) -> None:
        """A loss was multiplied."""
        if is_own or not self.waits:
            self.mistakes.owner_known(is_own)
        if self.state is not None:
            is_its = is_own or not self.observer.has_several
            self.state.move(loss_scale, None if is_its else self.state.waiting < 1.0)
        if is_own:
            self._note_waiting(True)

    def _note_own_unscaled(self, grads: Grads, divisor: Scalar, check: Check) -> None:
        """Gradients were unscaled that are taken for those of its own loss."""
        self.mistakes.owner_known(is_own=True)
        self._may_hold_overflow = True
        if self.state is not None:
            self.state.move(-divisor)
            if not check.is_clean:
                self.state.note_check(check.quick)
            number = _number_of(grads)
            if number is not None:
                self.state.given.assign(number, read_value=False)
        self._note_waiting(True)

    def _note_waiting(self, waits: bool) -> None:
        """Notes whether gradients of its own loss wait to be applied."""
        self.waits = waits
        if self.state is not None and self.observer.has_several:
            self.state.waiting.assign(float(waits), read_value=False)

    @property
    def state(self) -> Optional[StepState]:
        """The state of the step. None in a session and under parameter servers."""
        return None if mode.current().runs_parts else self._state

    def go_on_from(self, other: PendingDivision) -> None:
        """Takes the state of another one's step. Traced functions go on to write it."""
        self._state, self.waits = other._state, other.waits
        self._may_hold_overflow = other._may_hold_overflow
        self.mistakes.has_own = other.mistakes.has_own
        self.observer.kinds.note_variables(self.kept().values(), Kind(SCALE))
        # What others that share its loss scale do is no step of this one.
        other.observer.divisions.discard(other)

    @property
    def is_shared(self) -> bool:
        """Whether it counts steps together with others that share its loss scale."""
        sharing = [
            each for each in self.observer.divisions if not each._unscales_itself
        ]
        return len(sharing) > 1 and self in sharing and takes_the_flag(self.loss_scale)

    def kept(self) -> Dict[str, tf.Variable]:
        """Returns the variables that a SavedModel of a training step needs."""
        state = {} if self._state is None else vars(self._state)
        return {each.name.split(":")[0]: each for each in state.values()}

    def unscale(self, grads: Grads) -> Grads:
        """Returns the true gradients, and remembers whether they were finite."""
        scaled = as_they_are(grads)
        with op_callbacks.paused():
            kinds = self._kinds_of(scaled)
            if _lists_among(kind for kind in kinds if kind.name == UNSCALED):
                raise ValueError(
                    "`grads` must be gradients of the scaled loss, got one that was "
                    "unscaled already. Unscale each gradient once."
                )
            divisors = self._divisors_of_scaled(scaled, kinds)
            bundle = Bundle(self.loss_scale, scaled, divisors)
            unscaled, check = unscale_and_check(bundle)
            check = check.without_gradients(len(scaled))
            done = next((each for each in divisors if each is not None), None)
            if done is not None:
                # One may unscale what several have scaled.
                owners = [loss.owner() for loss in _losses_among(kinds)]
                for each in list(self.observer.divisions):
                    if each is self or (each in owners and each.waits):
                        each._note_own_unscaled(scaled, done, check)
                    else:
                        each.mistakes.unscaled_elsewhere()
        source = Unscaled(self, check, len(scaled), _known_losses(kinds))
        self.observer.mark_unscaled(unscaled, (source,))
        dense = map(dense_part, unscaled)
        for grad, kind, divisor, after in zip(scaled, kinds, divisors, dense):
            if divisor is None:
                continue
            if kind.name == UNKNOWN:
                self.observer.kinds.note(dense_part(grad), Kind(SCALED, (divisor,)))
            if graphs.is_building() or is_small(after):
                setattr(after, _BEFORE, Before(grad, divisor))
        return unscaled

    def _kinds_of(self, grads: Grads) -> List[Kind]:
        """Returns the kinds of gradients. Numbers are unknown: the state decides."""
        return [kind or Kind(UNKNOWN) for kind in self.observer.kinds.of(grads)]

    def _divisors_of_scaled(self, grads: Grads, kinds: List[Kind]) -> Divisors:
        """Returns what divides each gradient if those of unknown kind are scaled."""
        scaled_by: Optional[Scalar] = None
        divisors: Divisors = [None] * len(grads)
        for i, (grad, kind) in enumerate(zip(grads, kinds)):
            if grad is None or kind.name == UNSCALED:
                continue
            scales = [each for each in kind.sources if not isinstance(each, Unscaled)]
            if len(scales) == 1 and graphs.is_visible(scales[0]):
                divisors[i] = scales[0]
            else:
                scaled_by = self._scaled_by() if scaled_by is None else scaled_by
                divisors[i] = scaled_by
        return divisors

    def _scaled_by(self) -> Scalar:
        """Returns what multiplied the last loss, a `float32` tensor of shape `[]`."""
        now = value_of(self.loss_scale)
        if self.state is not None:
            scaled_by = tf.abs(tf.convert_to_tensor(self.state.pending))
            return select(scaled_by > 0.0, scaled_by, now)
        last = self.observer.last_scale()
        return now if last is None else last

    def resolve(self, grads: Grads, trains: str) -> Bundle:
        """Returns the gradients to apply, with their divisors and checks.

        A warning tells that they train the variable `trains`.
        """
        grads = as_they_are(grads)
        with op_callbacks.paused():
            kinds = self._kinds_of(grads)
            names = {k.name for grad, k in zip(grads, kinds) if grad is not None}
            rest = self._divisor_of_unknown(grads) if UNKNOWN in names else None
            self.mistakes.warn(names, trains, is_divided=rest is not None)
            by = self._divisors_of_scaled(grads, kinds)
            by = [rest if k.name == UNKNOWN else each for k, each in zip(kinds, by)]
            losses = _known_losses(kinds)
            bundle = Bundle(self.loss_scale, grads, by, of_unknown=rest, losses=losses)
            if self.loss_scale.checks_gradients:
                bundle = self._with_earlier_check(bundle, _lists_among(kinds), names)
            self._note_waiting(False)
        return bundle

    def _with_earlier_check(
        self, bundle: Bundle, lists: List[Unscaled], names: set[str]
    ) -> Bundle:
        """Returns a bundle with the check of when its gradients were unscaled.

        `lists` are the unscaled lists that they were made of, `names` their kinds.
        """
        check = CLEAN
        for each in lists:
            if each.check.is_clean or graphs.is_visible(each.check.quick):
                check &= each.check
        # The worst numbers are known if all gradients are of one list, in its order.
        if len(lists) != 1 or lists[0].length != len(bundle.grads):
            check = check._replace(worst=None)
        before = list(map(before_division, bundle.grads))
        is_known = all(b or g is None for g, b in zip(bundle.grads, before))
        if is_known and not check.is_clean:  # nobody has changed them since
            bundle = bundle.but(is_checked=True)
            # Under XLA one replica divides them once more, in its branch, as if nobody
            # had unscaled them, and needs no memory for the quotients.
            if replicas.count() == 1 and mode.current().by_xla:
                bundle = bundle.but(
                    grads=[each and each.grad for each in before],
                    divisors=[each and each.divisor for each in before],
                )
        unscaled_by = dict.fromkeys((each.division for each in lists), UNSCALED)
        if UNKNOWN in names:
            unscaled_by.setdefault(self, UNKNOWN)
        elif self._may_hold_overflow:
            unscaled_by.setdefault(self, SCALED)
        counted = [(each.state, kind) for each, kind in unscaled_by.items()]
        flags = [state.count_overflow(kind) for state, kind in counted if state]
        # What a program keeps from earlier steps, as momentum, was counted then.
        if bundle.is_checked or not (flags or check.is_clean):
            flags.append(check.quick)
        if flags:
            check = check._replace(quick=all_true(flags))
        return bundle.but(check=check)

    def _divisor_of_unknown(self, grads: Grads) -> Optional[Scalar]:
        """Returns what divides gradients of unknown kind: 1 or None if unscaled."""
        if self._unscales_itself:
            return None
        # Whether they are divided if nobody scaled or unscaled. If a function is given
        # gradients, the loss may be scaled after the function is traced.
        by_nobody = (self._unscales_in_apply or self._is_late) and (
            was_used(self.loss_scale) or graphs.are_arguments(map(dense_part, grads))
        )
        if self.state is None:
            is_scaled = by_nobody or self.observer.is_scaled
            return self._scaled_by() if is_scaled else None
        pending = tf.convert_to_tensor(self.state.pending)
        others = 1.0
        if by_nobody:
            others = select(pending < 0.0, 1.0, value_of(self.loss_scale))
        number = _number_of(grads)
        if number is not None:
            # They may be those that `get_unscaled_gradients` was given.
            is_given = tf.logical_and(tf.equal(number, self.state.given), number != 0.0)
            is_given = tf.logical_and(is_given, pending < 0.0)
            others = select(is_given, -pending, others)
        divisor = select(pending > 0.0, pending, others)
        is_known = mode.current().knows_values
        return None if is_known and float(divisor) == 1.0 else divisor


def _lists_among(kinds: Iterable[Kind]) -> List[Unscaled]:
    """Returns the unscaled lists that values were made of, each once."""
    sources = {id(source): source for kind in kinds for source in kind.sources}
    return [each for each in sources.values() if isinstance(each, Unscaled)]


def _losses_among(kinds: Iterable[Kind]) -> List[Loss]:
    """Returns the losses that were multiplied by what values were made of."""
    sources = [source for kind in kinds for source in kind.sources]
    return [getattr(each, _LOSS) for each in sources if hasattr(each, _LOSS)]


def _known_losses(kinds: List[Kind]) -> List[Tensor]:
    """Returns the losses of which it is known that values were made of them.

    This is the law of blame. A loss is at fault only if the tensor of S that multiplied
    it is a source of the gradients, or of the unscaled lists that they were made of.
    Where that is not known, none is: the rule is told of an overflow. To be told of one
    too many halves the loss scale; never to be told is the end of a run.
    """
    kinds = [kind for kind in kinds if kind.name != UNKNOWN]
    values = [loss.value for loss in _losses_among(kinds)]
    values += [value for each in _lists_among(kinds) for value in each.losses]
    return list({id(each): each for each in values if graphs.is_visible(each)}.values())


def _number_of(grads: Grads) -> Optional[Scalar]:
    """Returns the first number of the last dense gradient, None if there is none.

    The last gradient is often that of the output's bias, and so not 0.
    """
    for grad in reversed(grads):
        is_dense = grad is not None and not isinstance(grad, tf.IndexedSlices)
        if is_dense and grad.dtype.is_floating and grad.shape.num_elements():
            return tf.cast(tf.reshape(grad, [-1])[0], tf.float32)
    return None


def before_division(grad: Grad) -> Optional[Before]:
    """Returns what a gradient was before `get_unscaled_gradients`. None: not known.

    Eager mode keeps it of small gradients only.
    """
    found: Optional[Before] = getattr(dense_part(grad), _BEFORE, None)
    return found
