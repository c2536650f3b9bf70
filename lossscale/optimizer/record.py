"""Why the last steps were skipped: not finite, a bad loss, or a finite one left out.

It is kept on the device, and written on a skipped step only. No checkpoint holds it, so
that a model that has changed can still restore. A SavedModel of a training step does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.arithmetic import largest_of_each
from lossscale.gradients.bundle import Bundle
from lossscale.gradients.check import Check, worst_of_all
from lossscale.runtime import keras_versions, mode, replicas
from lossscale.runtime.aliases import Flag, Op, PerGradient, Scalar, Tensor, Variable
from lossscale.runtime.control import group_ops
from lossscale.runtime.saved_models import OnlyInSavedModels
from lossscale.scales.guard import Guard
from lossscale.scales.ignored_losses import read_count

#: How many skipped steps the record keeps, with their reasons.
KEPT = 16
#: Why a step was skipped: gradients overflowed, the unscaled loss was infinite or NaN,
#: or the guard, or a loss scale's own `update`, has left out a finite step.
GRADIENTS, LEFT_OUT, BY_UPDATE = "gradients", "left out", "update"
REASONS = (GRADIENTS, "inf", "nan", LEFT_OUT, BY_UPDATE)
_GRADIENTS, _INF, _NAN, _LEFT_OUT, _BY_UPDATE = range(len(REASONS))


def _without_values(record: Any, *names: str) -> str:
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
      name: The name of the variable whose gradient was the largest, after clipping; in
        Keras 3, its path.
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


class Record(OnlyInSavedModels):
    """Why the last steps of an optimizer were skipped."""

    entries: List[Entry]
    #: How many steps were skipped for each of `REASONS`, then a pair as `skipped`
    #: returns it for each of the last ones. None before there is an entry.
    _skipped: Any
    _applied: Any
    _records_spikes: bool
    #: The variables that a SavedModel holds and no checkpoint, by name.
    kept: Dict[str, Variable]

    def __init__(
        self, applied: Optional[Callable[[], Any]], guard: Optional[Guard]
    ) -> None:
        """`applied` returns the count of applied steps. None: nothing is recorded."""
        super().__init__(name="faults")
        # Bypasses tf.Module's __setattr__, which would track the variables.
        self.__dict__.update(entries=[], kept={}, _skipped=None, _applied=applied)
        self._records_spikes = guard is not None and guard.left_out_as == "spike"

    def _kept(self) -> Dict[str, Variable]:
        return self.kept

    def entry_of(self, variables: List[Variable]) -> Optional[Entry]:
        """Returns the entry for a list of trained variables. None: nothing is recorded.

        Called when the optimizer is built, too, so that no step creates variables.
        """
        # A session would have to initialize the variable.
        if mode.current().runs_parts or self._applied is None:
            return None
        for entry in self.entries:
            places = {id(variable): i for i, variable in enumerate(entry.variables)}
            positions = [places.get(id(variable), -1) for variable in variables]
            if -1 not in positions:
                return replace(entry, positions=positions)
        recorded = list({id(variable): variable for variable in variables}.values())
        count, number, spike = len(recorded), len(self.entries), None
        # Every replica writes the same values to these.
        new = replicas.new_variable
        faults = new("nonfinite_gradients", [0.0] * (count + 2), tf.float32)
        self.kept[f"record{number}"] = faults
        if self._records_spikes:
            spike = new("spiking_gradients", [0.0] * (count + 3), tf.float32)
            self.kept[f"spike{number}"] = spike
        if self._skipped is None:
            zeros = [0] * (len(REASONS) + 2 * KEPT)
            skipped = new("skipped_last", zeros, tf.int64)
            self.__dict__.update(_skipped=skipped)
            self.kept["skipped_last"] = skipped
        self.entries.append(Entry(self, recorded, faults, spike, []))
        return self.entry_of(variables)

    def count(self, reason: Scalar) -> Tuple[Op, Scalar]:
        """Counts a skipped step, for a branch. Returns the op, and the new total."""
        applied = read_count(self._applied)
        held, size = tf.convert_to_tensor(self._skipped), len(REASONS)
        # No GPU splits integers, or sums them along an axis.
        total = tf.add_n([held[i : i + 1] for i in range(size)])
        counts = held[:size] + tf.one_hot(reason, size, dtype=tf.int64)
        newest = [applied + total, tf.reshape(reason, [1])]
        value = tf.concat([counts, held[size + 2 :], *newest], 0)
        return self._skipped.assign(value, read_value=False), tf.cast(
            total + 1, tf.float32
        )

    def counts(self) -> Tensor:
        """Returns the count of each of `REASONS`, as a tensor: no host waits for it."""
        size = len(REASONS)
        if self._skipped is None:
            return tf.zeros([size], tf.int64)
        return tf.convert_to_tensor(self._skipped)[:size]

    def skipped(self) -> Tuple[List[int], List[Tuple[int, str]]]:
        """Returns how many steps were skipped for each of `REASONS`, and the last ones.

        Of each of these, oldest first: its number among all steps that this optimizer
        applied or skipped, from 0 on, and a word of `REASONS`.
        """
        size = len(REASONS)
        read = [0] * size if self._skipped is None else self._skipped.numpy().tolist()
        counts, pairs = read[:size], [*zip(read[size::2], read[size + 1 :: 2])]
        last = pairs[max(KEPT - sum(counts), 0) :]
        return counts, [(number, REASONS[reason]) for number, reason in last]

    def gradients(self) -> List[NonfiniteGradient]:
        variables, worst = self._last("faults")
        return NonfiniteGradients(
            NonfiniteGradient(keras_versions.variable_name(variable), kind, variable)
            for variable, kind in zip(variables, map(_kind, worst))
            if kind is not None
        )

    def loss(self) -> Optional[str]:
        _, (*_, worst, _) = self._last("faults")
        return _kind(worst)

    def spike(self) -> Optional[Spike]:
        variables, (*magnitudes, largest, limit, stamp) = self._last("spike")
        if not stamp:
            return None
        variable = variables[magnitudes.index(max(magnitudes))]
        return Spike(keras_versions.variable_name(variable), largest, limit, variable)

    def _last(self, attribute: str) -> Tuple[List[Variable], List[float]]:
        pairs = [(entry.variables, getattr(entry, attribute)) for entry in self.entries]
        read = [(of, held.numpy().tolist()) for of, held in pairs if held is not None]
        return max(read, key=lambda pair: pair[1][-1], default=([], [0.0] * 3))


@dataclass(eq=False)
class Entry:
    """What is recorded of a list of variables.

    Attributes:
      variables: The variables.
      faults: The worst number of each gradient and of the loss (`gradients/check`) at
        the last step that was not finite, and a stamp: how many were skipped then.
      spike: The greatest magnitude of each gradient at the last spike, the greatest of
        the step, the limit, and such a stamp. None: there is no `SpikeGuard`.
      positions: Where in `variables` those are that a step trains.
    """

    record: Record
    variables: List[Variable]
    faults: Variable
    spike: Any
    positions: List[int]

    def write_faults(
        self, bundle: Bundle, check: Check, loss_is_at_fault: Callable[[Bundle], Flag]
    ) -> Op:
        """Records which gradients, or their sum, were at fault. For a branch."""
        worst = replicas.call_for_each_replica(worst_numbers, bundle)
        worst = replicas.all_reduce_sum(worst)
        if check.worst is not None:
            worst += tf.pad(check.worst(), [[0, 1]])
        is_nan = tf.cast(tf.math.is_nan(worst[-1]), tf.int64)
        # _NAN is the number after _INF.
        reason = tf.where(loss_is_at_fault(bundle), _INF + is_nan, _GRADIENTS)
        counted, stamp = self.record.count(reason)
        size = len(self.variables) + 1
        worst = _placed(worst, [*self.positions, size - 1], size)
        value = tf.concat([worst, stamp], 0)
        return group_ops([counted, self.faults.assign(value, read_value=False)])

    def write_left_out_by_update(self) -> Op:
        """Records a finite step that a loss scale's own `update` has left out."""
        counted, _ = self.record.count(tf.constant(_BY_UPDATE, tf.int64))
        return counted

    def write_left_out(self, bundle: Bundle, check: Check, guard: Any) -> Op:
        """Records a finite step that was left out, and of a spike the gradients."""
        counted, stamp = self.record.count(tf.constant(_LEFT_OUT, tf.int64))
        if self.spike is None:
            return counted

        def measure(local: Bundle) -> PerGradient:
            return largest_of_each(local.divided().grads, local.groups)

        magnitudes = replicas.greatest(replicas.call_for_each_replica(measure, bundle))
        magnitudes = _placed(magnitudes, self.positions, len(self.variables))
        # A user's own may call its steps spikes, too, and have no such variable.
        limit = tf.cast(replicas.local_result(getattr(guard, "limit", 0.0)), tf.float32)
        of_step = tf.stack([check.largest, limit])
        value = tf.concat([magnitudes, of_step, stamp], 0)
        return group_ops([counted, self.spike.assign(value, read_value=False)])


def worst_numbers(bundle: Bundle) -> PerGradient:
    """Returns the worst number of each gradient of a replica, then of its losses."""
    of_gradients = bundle.check.worst_of(bundle.count)
    return tf.concat([of_gradients, worst_of_all(bundle.losses)], 0)


def _placed(values: Tensor, positions: List[int], size: int) -> Tensor:
    """Returns `size` numbers: values at their positions, 0 elsewhere."""
    if positions == list(range(size)):
        return values
    # Those at one place are added up.
    return tf.scatter_nd([[position] for position in positions], values, [size])


def _kind(worst: float) -> Optional[str]:
    return "nan" if math.isnan(worst) else "inf" if math.isinf(worst) else None
