"""Is a division pending? What divides each gradient, and did it overflow before?

*`scale_loss` makes a division pending. `get_unscaled_gradients` divides.
`apply_gradients` divides if the division is still pending.* The kind of a gradient
tells whether it is, where it can be seen (`kinds`). Otherwise the state of the step
does: a few numbers of each optimizer on each replica, which cross what tracing cannot
see, such as functions that are called again, loops, branches and NumPy.

```
the last call              pending   apply divides gradients of unknown kind
none of ours               0         with Keras 3, as its own wrapper; not with Keras 2
scale_loss                 S         yes, by what multiplied the last loss
get_unscaled_gradients     -S        no, unless they are those that it was given
apply_gradients            as it was: a second apply of a step does what the first did
```

The law, where two lists of gradients or two optimizers meet:

1. What the program has said of a value is not asked of the state: what
   `get_unscaled_gradients` is given is scaled, and what it returns is unscaled.
2. A state belongs to one optimizer. What another one does, or `LossScale.scale` and
   `unscale`, moves it only while none of its own gradients wait to be applied.
3. A body (a branch, a loop, a function) hands on the kind of what it was given, if
   nobody scales or unscales inside.
4. An overflow that was seen waits until an apply has counted it. A counted one ends
   with the step: with its optimizer's next `scale_loss`, at the latest.
5. Where nobody knows, divide, and warn where Python can see it. A gradient that is
   divided twice leaves weights as they are, one that is not divided destroys them.
"""

from __future__ import annotations

import enum
import math
import weakref
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.arguments import FLOAT32_MAX
from lossscale.gradients.bundle import Bundle, as_they_are, unscale_and_check
from lossscale.gradients.check import CLEAN, Check, all_true, dense_part, is_small
from lossscale.optimizer.kinds import SCALE, SCALED, UNKNOWN, UNSCALED, Kind, Kinds
from lossscale.runtime import mode, op_callbacks, replicas
from lossscale.runtime.aliases import (
    Divisors,
    Flag,
    Grad,
    Grads,
    Graph,
    Scalar,
    Tensor,
    Variable,
)
from lossscale.runtime.graphs import (
    are_arguments,
    current_graph,
    do_not_convert,
    is_visible,
    notes_of,
    visible_graphs,
)
from lossscale.runtime.loss_scale_warning import warn
from lossscale.scales.base import LossScale, observer_of, unguarded, value_of

#: The attribute of an unscaled tensor that tells what it was before.
_BEFORE = "_lossscale_before"
#: The attribute of a tensor of S that tells which loss it multiplied.
_LOSS = "_lossscale_loss"

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
gradients only. They are now divided by the loss scale. Unscale the gradients first, \
then change them:

    grads = optimizer.get_unscaled_gradients(grads)        # <- before they are changed
    grads, _ = tf.clip_by_global_norm(grads, 1.0)
    optimizer.apply_gradients(zip(grads, variables))
"""
_READ = """\
The loss scale was read between `scale_loss` and `apply_gradients`, or other gradients \
were unscaled by it, and lossscale cannot see whether these gradients were divided by \
it. They are now divided by it. If your program divided them before, that is once too \
often. Let the optimizer that applies them divide them:

    grads = optimizer.get_unscaled_gradients(grads)        # also remembers an overflow
"""
_ADDED = """\
A term that depends on the weights was added to a loss that was scaled before, or to \
its gradients. It is divided by the loss scale with them, and so nearly lost. Add it \
to the loss, then scale the loss:

    scaled_loss = optimizer.scale_loss(loss + penalty)     # not scale_loss(loss) + ...
"""


class Overflow(float, enum.Enum):
    """What is known of an overflow, as the number that stands for it on the device.

    In this order, so that one comparison with `pending` tells what counts: -S, which is
    below COUNTED, says that the step of a counted overflow goes on. All are finite, for
    runs that look for infinities.
    """

    NONE = -FLOAT32_MAX  # no -S is below it
    COUNTED = 0.0
    SEEN = FLOAT32_MAX  # and no apply has counted it


class StepState:
    """The state of one optimizer's step: `float32` scalars on each replica.

    `pending` is as in the table above. `overflow` tells whether unscaled gradients had
    overflowed. `waiting` is 1 while gradients of this optimizer's own loss wait to be
    applied; it is kept only if optimizers share the loss scale. `given` is a number of
    the last gradients that were unscaled, from which they are known again.
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
            self.overflow = variable(Overflow.NONE, name="overflow_seen")
            self.waiting = variable(0.0, name="waiting")
            self.given = variable(0.0, name="given")

    def move(self, pending: Scalar, where: Optional[Flag] = None) -> None:
        """Notes that a loss was scaled, or gradients unscaled, if `where` is True."""
        if where is not None:
            pending = tf.where(where, pending, tf.convert_to_tensor(self.pending))
        self.pending.assign(pending, read_value=False)

    def note_check(self, is_finite: Optional[Flag]) -> None:
        """Gradients were unscaled. `is_finite` is None if nobody looked at them."""
        held = tf.convert_to_tensor(self.overflow)
        # A counted one has ended.
        now = tf.where(held > Overflow.COUNTED, Overflow.SEEN, Overflow.NONE)
        if is_finite is not None:
            now = tf.where(is_finite, now, Overflow.SEEN)
        self.overflow.assign(now, read_value=False)

    def count_overflow(self, kind: str) -> Flag:
        """Counts an overflow for an apply of this kind. Returns whether there was none.

        An overflow that was counted counts again for what was made of that list in the
        same step, and never for scaled gradients.
        """
        ends_at = Overflow.COUNTED
        if kind != SCALED:
            ends_at = tf.minimum(tf.convert_to_tensor(self.pending), Overflow.COUNTED)
        is_bad = tf.convert_to_tensor(self.overflow) > ends_at
        now = tf.where(is_bad, Overflow.COUNTED, Overflow.NONE)
        self.overflow.assign(now, read_value=False)
        return tf.logical_not(is_bad)


class Unscaled(NamedTuple):
    """A list of gradients that was unscaled: the source of what is made of them."""

    pending: PendingDivision  # of the optimizer that unscaled it
    check: Check
    length: int  # also counts `None`s
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
        self.optimizers: weakref.WeakSet[PendingDivision] = weakref.WeakSet()
        #: What S is read from. A `FixedLossScale` has no variable.
        self._variable = getattr(unguarded(loss_scale), "current_loss_scale", None)
        self.kinds = Kinds(self._variable)
        #: The last step that the optimizers share: see `step._SharedStep`.
        self.shared_step: Any = None
        #: The optimizer that scales a loss now. None: `LossScale.scale` itself.
        self.owner: Optional[PendingDivision] = None
        #: The last tensor of S that multiplied a loss in eager mode, of each replica.
        self._last_in_eager_mode: Dict[object, Scalar] = {}
        self.has_unscaled = False  # whether anybody has unscaled gradients
        #: Whether a loss was scaled since gradients were unscaled, and how often S was
        #: read since, as a tensor and as a number. Tensors are counted from -1 on if
        #: the first one may scale the loss, and from minus infinity if none can harm.
        self.is_scaled, self.reads, self.numbers = False, -1.0, 0

    def __deepcopy__(self, memo: object) -> None:
        return None  # the copy of a loss scale has other optimizers

    @do_not_convert
    def note_read(self, tensor: Scalar) -> None:
        """A program read S as a tensor."""
        if op_callbacks.are_paused():
            return  # a step is being applied, which itself moves the loss scale
        self.kinds.note(tensor, Kind(SCALE, (tensor,)))
        if self._variable is None:  # so that a body is seen to read S
            for each in list(self.optimizers):
                each.read_state()
        if not hasattr(tensor, _LOSS):
            self.reads += 1
            if not self.is_scaled:  # a loss may be multiplied by this tensor only now
                self.numbers = 0

    def note_float(self) -> None:
        """A program read S as a Python number."""
        self.numbers += 1
        self.kinds.adds_a_term = None

    @do_not_convert
    def note_loss(self, loss: Tensor, loss_scale: Scalar) -> None:
        """A loss is multiplied by a tensor of S."""
        owner = self.owner
        of_whom = (lambda: None) if owner is None else weakref.ref(owner)
        setattr(loss_scale, _LOSS, Loss(loss, of_whom))
        self._last_scales(current_graph())[replicas.this_one()] = loss_scale
        self.is_scaled, self.reads, self.numbers = True, 0.0, 0
        with op_callbacks.paused():
            for each in list(self.optimizers):
                each.note_scaled(loss_scale, is_own=each is owner)

    def note_unscaled_by(self, grads: Grads, divisor: Scalar) -> None:
        """Gradients were divided by S, without a check."""
        self.note_unscaled(grads, ())
        optimizers = list(self.optimizers)
        own = [each for each in optimizers if each.waits]
        if len(own) > 1:  # nobody knows whose these were
            for each in own:
                each.is_unclear = True
        with op_callbacks.paused():
            states = [each.state for each in optimizers if each.state is not None]
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

    def note_unscaled(self, grads: Grads, sources: Tuple[object, ...]) -> None:
        """Gradients were unscaled."""
        self.has_unscaled = True
        # All gradients since the last loss are divided: what reads S now logs it.
        self.is_scaled, self.reads, self.numbers = False, -math.inf, 0
        for tensor in map(dense_part, grads):
            if tf.is_tensor(tensor):
                self.kinds.note(tensor, Kind(UNSCALED, sources))

    def stepped(self) -> None:
        """A step is applied or skipped."""
        # A program that does not call `scale_loss` reads S to scale the loss.
        self.reads, self.numbers = 0.0 if self.is_scaled else -1.0, 0

    @property
    def has_several(self) -> bool:
        """Whether several optimizers share the loss scale, of whatever kind."""
        return len(self.optimizers) > 1

    def _last_scales(self, graph: Optional[Graph]) -> Dict[object, Scalar]:
        is_eager = graph is None
        return self._last_in_eager_mode if is_eager else notes_of(graph, self, dict)

    def last_scale(self) -> Optional[Scalar]:
        """Returns the tensor of S that multiplied the last loss that is seen here."""
        replica = replicas.this_one()
        found = (self._last_scales(graph).get(replica) for graph in visible_graphs())
        last = next((each for each in found if each is not None), None)
        return last if last is not None and is_visible(last) else None


class PendingDivision:
    """Whether the gradients of one optimizer are still to be divided."""

    def __init__(
        self, loss_scale: LossScale, *, unscales_in_apply: bool, unscales_itself: bool
    ) -> None:
        """See `LossScaleEngine._set_up`."""
        self.loss_scale, self._unscales_itself = loss_scale, unscales_itself
        self.observer = observer = observer_of(loss_scale, StepObserver)
        self._unscales_in_apply, self._has_unscaled = unscales_in_apply, False
        self._warned: set[str] = set()
        #: The name of a variable that it trains, by which a warning names it.
        self.trains = ""
        # A session runs any part of a graph, and parameter servers are asked over the
        # network: there is no state where nothing orders the calls.
        has_state = not (mode.current().runs_parts or replicas.train_apart())
        self._state = StepState() if has_state else None
        #: A function that was traced before tells the state of this optimizer nothing.
        self._is_late = self._was_used()
        #: As far as Python sees: whether it ever had a loss of its own, whether
        #: gradients of one wait to be applied, and whether some that may be its own
        #: were unscaled without it.
        self.has_own, self.waits, self.is_unclear = False, False, observer.has_unscaled
        observer.optimizers.add(self)
        observer.kinds.note_variables(self.kept().values(), Kind(SCALE))

    def scale(self, loss: Tensor) -> Any:
        """Returns a loss of its own times the loss scale."""
        self.observer.owner = self
        try:
            return self.loss_scale.scale(loss)
        finally:
            self.observer.owner = None

    def read_state(self) -> None:
        """Makes a body that is being built one that uses the state."""
        if self.state is not None and current_graph() is not None:
            tf.convert_to_tensor(self.state.pending)

    def note_scaled(self, loss_scale: Scalar, is_own: bool) -> None:
        """A loss was multiplied."""
        self.is_unclear = self.is_unclear and self.waits and not is_own
        if self.state is not None:
            is_its = is_own or not self.observer.has_several
            self.state.move(loss_scale, None if is_its else self.state.waiting < 1.0)
        if is_own:
            self._note_waiting(True)

    def _note_unscaled(self, grads: Grads, divisor: Scalar, check: Check) -> None:
        """Gradients of its own loss were unscaled: see `unscale`."""
        self.is_unclear = False
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
        self.has_own, self.waits = self.has_own or waits, waits
        if self.state is not None and self.observer.has_several:
            self.state.waiting.assign(float(waits), read_value=False)

    @property
    def state(self) -> Optional[StepState]:
        """The state of the step. None in a session's graph."""
        return None if mode.current().runs_parts else self._state

    def go_on_from(self, other: PendingDivision) -> None:
        """Takes the state of another one's step, which traced functions write, too."""
        self._state, self.has_own, self.waits = other._state, other.has_own, other.waits
        self.observer.kinds.note_variables(self.kept().values(), Kind(SCALE))
        # What others that share its loss scale do is no step of this one.
        other.observer.optimizers.discard(other)

    @property
    def is_shared(self) -> bool:
        """Whether it counts steps together with others that share its loss scale."""
        sharing = [not each._unscales_itself for each in self.observer.optimizers]
        return not self._unscales_itself and sum(sharing) > 1

    def kept(self) -> Dict[str, Variable]:
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
            self._has_unscaled = True
            bundle = Bundle(self.loss_scale, scaled, divisors)
            unscaled, check = unscale_and_check(bundle)
            check = check.without_gradients(len(scaled))
            done = next((each for each in divisors if each is not None), None)
            if done is not None:
                # One may unscale what several have scaled.
                owners = [loss.owner() for loss in _losses_among(kinds)]
                for each in list(self.observer.optimizers):
                    if each is self or (each in owners and each.waits):
                        each._note_unscaled(scaled, done, check)
                    elif not each.has_own:
                        each.is_unclear = True
        source = Unscaled(self, check, len(scaled), _known_losses(kinds))
        self.observer.note_unscaled(unscaled, (source,))
        dense = map(dense_part, unscaled)
        for grad, kind, divisor, after in zip(scaled, kinds, divisors, dense):
            if divisor is None:
                continue
            if kind.name == UNKNOWN:
                self.observer.kinds.note(dense_part(grad), Kind(SCALED, (divisor,)))
            if current_graph() is not None or is_small(after):
                setattr(after, _BEFORE, Before(grad, divisor))
        return unscaled

    def _kinds_of(self, grads: Grads) -> List[Kind]:
        """Returns the kinds of gradients. The state decides of numbers, too."""
        return [kind or Kind(UNKNOWN) for kind in self.observer.kinds.of(grads)]

    def _divisors_of_scaled(self, grads: Grads, kinds: List[Kind]) -> Divisors:
        """Returns what divides each gradient if those of unknown kind are scaled."""
        scaled_by: Optional[Scalar] = None
        divisors: Divisors = [None] * len(grads)
        for i, (grad, kind) in enumerate(zip(grads, kinds)):
            if grad is None or kind.name == UNSCALED:
                continue
            scales = [each for each in kind.sources if not isinstance(each, Unscaled)]
            if len(scales) == 1 and is_visible(scales[0]):
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
            return tf.where(scaled_by > 0.0, scaled_by, now)
        last = self.observer.last_scale()
        return now if last is None else last

    def resolve(self, grads: Grads) -> Bundle:
        """Returns the gradients to apply, with their divisors and checks."""
        grads = as_they_are(grads)
        with op_callbacks.paused():
            kinds = self._kinds_of(grads)
            names = {k.name for grad, k in zip(grads, kinds) if grad is not None}
            rest = self._divisor_of_unknown(grads) if UNKNOWN in names else None
            self._warn_of(kinds, is_divided=rest is not None)
            divisors = self._divisors_of_scaled(grads, kinds)
            bundle = Bundle(
                self.loss_scale,
                grads,
                [rest if k.name == UNKNOWN else by for k, by in zip(kinds, divisors)],
                of_unknown=rest,
                losses=_known_losses(kinds),
            )
            if self.loss_scale.checks_gradients:
                bundle = self._with_earlier_check(bundle, _lists_among(kinds), names)
            self._note_waiting(False)
        self.observer.stepped()
        return bundle

    def _with_earlier_check(
        self, bundle: Bundle, lists: List[Unscaled], names: set[str]
    ) -> Bundle:
        """Returns a bundle with the check of when its gradients were unscaled.

        `lists` are the unscaled lists that they were made of, `names` their kinds.
        """
        check = CLEAN
        for each in lists:
            if each.check.is_clean or is_visible(each.check.quick):
                check &= each.check
        # The worst numbers are known if the gradients are one list, and as long.
        if len(lists) != 1 or lists[0].length != len(bundle.grads):
            check = check._replace(worst=None)
        if not check.is_clean:
            bundle = _unless_changed(bundle)
        unscaled_by = dict.fromkeys((each.pending for each in lists), UNSCALED)
        if UNKNOWN in names:
            unscaled_by.setdefault(self, UNKNOWN)
        elif self._has_unscaled:
            unscaled_by.setdefault(self, SCALED)
        flags = [
            each.state.count_overflow(kind)
            for each, kind in unscaled_by.items()
            if each.state is not None
        ]
        # What momentum carries on from earlier steps does not overflow again.
        if bundle.is_checked or not (flags or check.is_clean):
            flags.append(check.quick)
        if flags:
            check = check._replace(quick=all_true(flags))
        return bundle.but(check=check)

    def _was_used(self) -> bool:
        return self.loss_scale.has_scaled or self.loss_scale.has_been_read

    def _divisor_of_unknown(self, grads: Grads) -> Optional[Scalar]:
        """Returns what divides gradients of unknown kind: 1 or None if unscaled."""
        if self._unscales_itself:
            return None
        # Whether they are divided if nobody scaled or unscaled. The loss of a
        # function's arguments may be scaled before they come.
        by_nobody = (self._unscales_in_apply or self._is_late) and (
            self._was_used() or are_arguments(map(dense_part, grads))
        )
        if self.state is None:
            is_scaled = by_nobody or self.observer.is_scaled
            return self._scaled_by() if is_scaled else None
        pending = tf.convert_to_tensor(self.state.pending)
        others = 1.0
        if by_nobody:
            others = tf.where(pending < 0.0, 1.0, value_of(self.loss_scale))
        number = _number_of(grads)
        if number is not None:
            # They may be those that `get_unscaled_gradients` was given.
            is_given = tf.logical_and(tf.equal(number, self.state.given), number != 0.0)
            is_given = tf.logical_and(is_given, pending < 0.0)
            others = tf.where(is_given, -pending, others)
        divisor = tf.where(pending > 0.0, pending, others)
        is_known = mode.current().knows_values
        return None if is_known and float(divisor) == 1.0 else divisor

    def _warn_of(self, kinds: List[Kind], is_divided: bool) -> None:
        """Warns of the program's likely mistakes, of each once.

        `is_divided` tells whether gradients of unknown kind are there, and are divided.
        """
        seen, found = self.observer, []
        if not self._was_used():
            found.append(_NEVER_SCALED)
        are_scaled = any(kind.name == SCALED for kind in kinds)
        if any(kind.was_changed for kind in kinds):
            found.append(_CHANGED)
        elif (is_divided and (seen.reads > 0 or self.is_unclear)) or (
            seen.numbers > 0 and (is_divided or are_scaled)
        ):  # the program may have divided these gradients itself
            found.append(_READ)
        if seen.kinds.adds_a_term:
            found.append(_ADDED)
            seen.kinds.adds_a_term = None
        for message in found:
            if not self._unscales_itself and message not in self._warned:
                self._warned.add(message)
                # Also, Python shows equal warnings of one line once.
                warn(f"{message}This is the optimizer that trains {self.trains!r}.")


def _lists_among(kinds: Iterable[Kind]) -> List[Unscaled]:
    """Returns the unscaled lists that values were made of, each once."""
    every = [source for kind in kinds for source in kind.sources]
    found = {id(each): each for each in every if isinstance(each, Unscaled)}
    return list(found.values())


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
    return list({id(each): each for each in values if is_visible(each)}.values())


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


def _unless_changed(bundle: Bundle) -> Bundle:
    """Returns gradients that need no second check, if nobody has changed them.

    Under XLA one replica divides them once more, in its branch, as if nobody had
    unscaled them, and needs no memory for the quotients.
    """
    before = list(map(before_division, bundle.grads))
    if any(g is not None and b is None for g, b in zip(bundle.grads, before)):
        return bundle
    bundle = bundle.but(is_checked=True)
    if replicas.count() > 1 or not mode.current().by_xla:
        return bundle
    return bundle.but(
        grads=[None if each is None else each.grad for each in before],
        divisors=[None if each is None else each.divisor for each in before],
    )
