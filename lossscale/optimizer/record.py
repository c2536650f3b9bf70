"""Why the last steps were skipped: not finite, a bad loss, or a finite one left out.

Of the last skipped step the record holds which gradients were at fault, of the last few
their numbers and reasons. It is kept on the device and written on a skipped step only.
It is in no checkpoint, so that a model that has changed can still restore, but in a
SavedModel of a training step, which writes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, cast

import tensorflow as tf

from lossscale.gradients.arithmetic import largest_of_each
from lossscale.gradients.check import Check, worst_of_all
from lossscale.optimizer.bundle import Bundle
from lossscale.runtime import kerases, mode, replicas
from lossscale.runtime.aliases import Flag, Op, PerGradient, Scalar, Tensor, Variable
from lossscale.runtime.control import group_ops
from lossscale.scales.base import LossScale, new_variable
from lossscale.scales.spike_guard import SpikeGuard

#: Of so many skipped steps the numbers and reasons are kept.
_KEPT = 16
#: Why a step was skipped, in the order of the numbers that stand for it on the device:
#: gradients overflowed, the unscaled loss was infinite or NaN, or the loss scale has
#: left out a finite step.
LEFT_OUT = "left out"
REASONS = ("gradients", "inf", "nan", LEFT_OUT)
_GRADIENTS, _INF, _NAN, _LEFT_OUT = range(len(REASONS))


def _without_values(record: Any, *names: str) -> str:
    """Returns a text with these fields of a record, and its variable's shape."""
    fields = [f"{name}={getattr(record, name)!r}" for name in names]
    shape = tuple(record.variable.shape)
    return f"{type(record).__name__}({', '.join(fields)}, shape={shape})"


class NonfiniteGradient(NamedTuple):
    """A gradient that was not finite.

    Attributes:
      name: The name of its variable; in Keras 3, the variable's path.
      kind: `"nan"` if it held a NaN, else `"inf"`.
      variable: The variable. Printed is its shape, not its values.
    """

    name: str
    kind: str
    variable: Variable

    def __repr__(self) -> str:
        return _without_values(self, "name", "kind")


class NonfiniteGradients(List[NonfiniteGradient]):
    """A list that is printed in lines, one for each gradient."""

    def __repr__(self) -> str:
        return "[" + ",\n ".join(map(repr, self)) + "]"


class Spike(NamedTuple):
    """A step that a `SpikeGuard` skipped.

    Attributes:
      name: The name of the variable whose gradient was the largest; in Keras 3, its
        path. Gradients are compared as they would have been applied, so clipped ones
        after clipping.
      largest: The greatest magnitude of the step's true gradients, a float.
      limit: The guard's `limit` at that step, a float.
      variable: The variable. Printed is its shape, not its values.
    """

    name: str
    largest: float
    limit: float
    variable: Variable

    def __repr__(self) -> str:
        return _without_values(self, "name", "largest", "limit")


class OwnSteps(NamedTuple):
    """The steps that one optimizer skipped itself, not others that share its scale."""

    skipped: int
    #: Consecutive skips up to the last step; 0 if that step was applied.
    in_a_row: int
    #: Those of them at which the unscaled loss was not finite, up to the last step.
    bad_losses: int


class Skips(NamedTuple):
    """Which steps one optimizer skipped since this process began."""

    total: int = 0
    #: Those of them at which the unscaled loss was not finite.
    losses: int = 0
    #: Of the last few, oldest first: the number of the step among all that this
    #: optimizer applied or skipped, from 0 on, and a word of `REASONS`.
    last: Tuple[Tuple[int, str], ...] = ()


class Record(tf.Module):
    """Why the last steps of an optimizer were skipped, for each list of variables."""

    _entries: List[Entry]
    #: See `Entry`. None before there is an entry.
    _ring: Optional[Variable]
    _applied: Optional[Callable[[], Any]]
    #: The variables that a SavedModel holds and no checkpoint, by name.
    _kept: Dict[str, Variable]

    def __init__(
        self,
        others: Dict[str, Variable],
        applied: Optional[Callable[[], Any]] = None,
    ) -> None:
        """`others` are further ones of `_kept`.

        `applied` returns the optimizer's count of applied steps, a variable. None: the
        optimizer has no entries.
        """
        super().__init__(name="faults")
        # Bypasses tf.Module's __setattr__, which would track the variables.
        self.__dict__.update(_entries=[], _kept=dict(others))
        self.__dict__.update(_ring=None, _applied=applied)

    # Not public: the variables must be in a SavedModel and not in a checkpoint.
    # TensorFlow calls the first method since 2.9, and called the second before.
    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> Dict[str, Variable]:
        children = dict(super()._trackable_children(save_type, **kwargs))
        return {**children, **self._kept} if save_type == "savedmodel" else children

    def _list_extra_dependencies_for_serialization(
        self, cache: Any
    ) -> Dict[str, Variable]:
        listed = super()._list_extra_dependencies_for_serialization(cache)
        return {**listed, **self._kept}

    def entry_of(
        self, variables: List[Variable], loss_scale: LossScale
    ) -> Optional[Entry]:
        """Returns the entry for a list of trained variables. None: nothing is recorded.

        Called when the optimizer is built, so that no step has to create the variable:
        a `tf.function` that creates one is traced twice. Called again at each step.
        """
        # A session would have to initialize the variable.
        if mode.current().runs_parts or not loss_scale.checks_gradients:
            return None
        for entry in self._entries:
            number_of = {id(each): i for i, each in enumerate(entry.variables)}
            if all(id(each) in number_of for each in variables):
                positions = [number_of[id(each)] for each in variables]
                is_whole = positions == entry.positions
                return entry if is_whole else replace(entry, positions=positions)
        recorded = list({id(each): each for each in variables}.values())
        count, number, spike = len(recorded), len(self._entries), None
        # Every replica writes the same values to these.
        faults = new_variable("nonfinite_gradients", [0.0] * (count + 5), tf.float32)
        self._kept[f"record{number}"] = faults
        if loss_scale.skips_spikes:
            spike = new_variable("spiking_gradients", [0.0] * (count + 3), tf.float32)
            self._kept[f"spike{number}"] = spike
        if self._ring is None:
            ring = new_variable("skipped_last", [0] * (2 * _KEPT + 2), tf.int64)
            self.__dict__.update(_ring=ring)
            self._kept["skipped_last"] = ring
        places = list(range(count))
        entry = Entry(recorded, faults, spike, places, self._ring, self._applied)
        self._entries.append(entry)
        return self.entry_of(variables, loss_scale)

    def keep(self, variables: Dict[str, Variable]) -> None:
        """Takes variables that a SavedModel holds and no checkpoint, by name."""
        self._kept.update(variables)

    def trained(self) -> List[List[Variable]]:
        """Returns the lists of variables that have an entry."""
        return [each.variables for each in self._entries]

    def own_steps(self, skipped: int, in_a_row: int) -> OwnSteps:
        """Returns how many steps this optimizer skipped itself.

        The arguments are the loss scale's counts: of all skipped steps, and of those
        since its last good step.
        """
        read = [each.faults.numpy().tolist()[-4:] for each in self._entries]
        count = int(sum(own for own, *_ in read))
        _, run, losses, stamp = max(read, key=lambda each: each[-1], default=[0.0] * 4)
        if len(read) > 1:
            run = in_a_row  # with several lists, each list is a step of its own
        if stamp != skipped:
            run = losses = 0
        return OwnSteps(count, min(int(run), in_a_row), min(int(losses), in_a_row))

    def skips(self) -> Skips:
        """Returns which steps this optimizer skipped, and why."""
        if self._ring is None:
            return Skips()
        count, losses, *last = self._ring.numpy().tolist()
        pairs = [*zip(last[::2], last[1::2])][-count:] if count else []
        named = tuple((number, REASONS[reason]) for number, reason in pairs)
        return Skips(count, losses, named)

    def gradients(self) -> List[NonfiniteGradient]:
        """Returns the gradients that were not finite at the last skipped step."""
        return NonfiniteGradients(
            NonfiniteGradient(kerases.variable_name(variable), kind, variable)
            for entry, worst in self._last()
            for variable, kind in zip(entry.variables, map(_kind, worst))
            if kind is not None
        )

    def loss(self) -> Optional[str]:
        """Returns "inf" or "nan" if the unscaled loss was not finite, else None."""
        return _kind(sum(of_loss for _, (*_, of_loss) in self._last()))

    def _last(self) -> List[Tuple[Entry, List[float]]]:
        """Returns the entries that the last skipped step wrote, with worst numbers.

        The last of these numbers is the loss's.
        """
        read = [(each, each.faults.numpy().tolist()) for each in self._entries]
        latest = max((stamp for _, (*_, stamp) in read), default=0.0)
        return [(each, n[:-4]) for each, n in read if n[-1] == latest > 0.0]

    def spike(self) -> Optional[Spike]:
        """Returns the last spike that was skipped, None if there was none."""
        found, last = None, 0.0
        for entry in self._entries:
            if entry.spike is not None:
                *each, largest, limit, stamp = entry.spike.numpy().tolist()
                if stamp > last:
                    variable = entry.variables[each.index(max(each))]
                    name = kerases.variable_name(variable)
                    found, last = Spike(name, largest, limit, variable), stamp
        return found


@dataclass(eq=False)
class Entry:
    """What is recorded of a list of variables.

    Attributes:
      variables: The variables.
      faults: The worst number of each gradient and of the loss (`gradients/check`),
        three counts (steps skipped, skipped in a row, and in a row with a loss that was
        not finite) and a stamp: the loss scale's count of skipped steps then.
      spike: The greatest magnitude of each gradient at the last spike, the greatest of
        the step, the limit, and a stamp: the guard's count of spikes then. None: no
        guard skips steps of theirs.
      positions: Where in `variables` those are that a step trains.
      ring: What `Skips` holds, of all entries: two counts, then a pair for each of the
        last skipped steps, the newest at the end.
      applied: Returns the optimizer's count of applied steps, a variable.
    """

    variables: List[Variable]
    faults: Variable
    spike: Optional[Variable]
    positions: List[int]
    ring: Any
    applied: Any

    def write_faults(
        self, bundle: Bundle, agreed: Check, scale: LossScale, is_of_loss: Flag
    ) -> Op:
        """Records which gradients were at fault on any replica. For a branch.

        It adds their worst numbers to those of the same step, or starts anew. `agreed`
        also covers the gradients' sum. `is_of_loss` tells whether a bad loss was at
        fault. The loss scale has counted the step.
        """

        def worst_with_loss(local: Bundle) -> PerGradient:
            of_gradients = local.check.worst_of(local.count)
            return tf.concat([of_gradients, worst_of_all(local.losses)], 0)

        worst = replicas.call_for_each_replica(worst_with_loss, bundle)
        worst = replicas.all_reduce_sum(worst)
        if agreed.worst is not None:
            worst += tf.pad(agreed.worst(), [[0, 1]])
        size = len(self.variables) + 1
        worst = _placed(worst, [*self.positions, size - 1], size)
        held = tf.convert_to_tensor(self.faults)
        old, own, run, losses, old_stamp = tf.split(held, [size, 1, 1, 1, 1])
        skipped = replicas.local_result(scale.skipped_steps)
        stamp = tf.cast(tf.reshape(skipped, [1]), tf.float32)
        since = stamp - old_stamp
        of_this_loss = tf.reshape(worst[-1:], [])
        worst += tf.where(tf.equal(stamp, old_stamp), old, 0.0)
        _, of_loss = tf.split(worst, [size - 1, 1])
        is_bad = tf.cast(tf.logical_not(tf.math.is_finite(of_loss)), tf.float32)
        # A good step in between writes nothing. So `own_steps` compares the stamp with
        # the loss scale's count. `since` is 0 or 1 if the run of skips goes on.
        goes_on = tf.cast(tf.equal(since * since, since), tf.float32)
        one = tf.ones([1])
        counts = [own + one, goes_on * run + one, (goes_on * losses + one) * is_bad]
        value = tf.concat([worst, *counts, stamp], 0)
        reasons = (tf.constant(each, tf.int64) for each in (_GRADIENTS, _INF, _NAN))
        of_gradients, of_inf, of_nan = reasons
        reason = tf.where(tf.math.is_nan(of_this_loss), of_nan, of_inf)
        reason = tf.where(is_of_loss, reason, of_gradients)
        written = self.faults.assign(value, read_value=False)
        return group_ops([written, self._write_reason(reason)])

    def _write_reason(self, reason: Scalar) -> Op:
        """Adds this step to the last skipped ones."""
        with tf.init_scope():  # a legacy optimizer's is created when it is asked for
            applied = kerases.tensor_of(self.applied())
        steps = tf.cast(replicas.local_result(applied), tf.int64)
        held = tf.convert_to_tensor(self.ring)  # no GPU splits integers
        count, losses, kept = held[:1], held[1:2], held[4:]
        is_loss = tf.logical_or(tf.equal(reason, _INF), tf.equal(reason, _NAN))
        losses += tf.cast(is_loss, tf.int64)
        newest = [steps + count, tf.reshape(reason, [1])]
        value = tf.concat([count + 1, losses, kept, *newest], 0)
        return self.ring.assign(value, read_value=False)

    def write_left_out(self, bundle: Bundle, agreed: Check, scale: LossScale) -> Op:
        """Records a finite step that the loss scale has left out, and counted.

        Of a spike also which gradient was the largest.
        """
        written = self._write_reason(tf.constant(_LEFT_OUT, tf.int64))
        if self.spike is None:
            return written

        def magnitudes(local: Bundle) -> PerGradient:
            return largest_of_each(local.quotients(), local.groups)

        each = replicas.call_for_each_replica(magnitudes, bundle)
        each = replicas.greatest(each)
        each = _placed(each, self.positions, len(self.variables))
        guard = cast(SpikeGuard, scale)
        limit, spikes = map(replicas.local_result, (guard.limit, guard.spikes))
        known = [tf.cast(one, tf.float32) for one in (agreed.largest, limit, spikes)]
        value = tf.concat([each, tf.stack(known)], 0)
        return group_ops([written, self.spike.assign(value, read_value=False)])


def _placed(values: Tensor, positions: List[int], size: int) -> Tensor:
    """Returns `size` numbers: values at their positions, 0 elsewhere."""
    if positions == list(range(size)):
        return values
    # Those at one place are added up.
    return tf.scatter_nd([[position] for position in positions], values, [size])


def _kind(worst: float) -> Optional[str]:
    """Returns the fault that a worst number tells: "nan", "inf", or None."""
    return "nan" if math.isnan(worst) else "inf" if math.isinf(worst) else None
