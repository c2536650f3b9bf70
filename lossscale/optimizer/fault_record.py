"""Which gradients were not finite at the last skipped step."""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.gradients import faults
from lossscale.gradients.check import Check
from lossscale.gradients.packing import groups_of_one
from lossscale.optimizer.bundle import Bundle
from lossscale.optimizer.spike_record import Spike, SpikeNumbers, latest
from lossscale.runtime import kerases, mode, replicas
from lossscale.runtime.aliases import Scalar, Tensor, Variable


class NonfiniteGradient(NamedTuple):
    """A gradient that was not finite.

    Attributes:
      name: The name of its variable: the path in Keras 3.
      kind: `"nan"` if it held a NaN, else `"inf"`.
      variable: The variable.
    """

    name: str
    kind: str
    variable: Variable


class OwnSteps(NamedTuple):
    """What an optimizer skipped: others that share its loss scale count in that, too.

    Attributes:
      skipped: How many steps, in this process.
      in_a_row: How many of them one after the other, the last step with them.
      bad_losses: At how many of these, the last with them, the loss was not finite
        before it was scaled.
    """

    skipped: int
    in_a_row: int
    bad_losses: int


class FaultRecord(tf.Module):
    """What was at fault in an optimizer's last skipped step, kept on the device.

    It is written on a skipped step only. An optimizer that was never built may apply
    the gradients of several lists of variables in turn: each has a variable here then.
    They tell what happened in this process, and are in no checkpoint: a model that has
    changed restores.
    """

    def __init__(self) -> None:
        super().__init__(name="faults")
        # Past tf.Module's __setattr__, which would track them.
        object.__setattr__(self, "_holders", [])

    # Not public: what a SavedModel of a training step must hold, since the step writes
    # it, and a checkpoint must not. The first is TensorFlow's since 2.9, the second was
    # its name before (seen on 2.4, 2.8 and 2.10 to 2.21).
    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        children = dict(super()._trackable_children(save_type, **kwargs))
        return {**children, **self._kept()} if save_type == "savedmodel" else children

    def _list_extra_dependencies_for_serialization(self, cache: Any) -> Any:
        listed = super()._list_extra_dependencies_for_serialization(cache)
        return {**listed, **self._kept()}

    def _kept(self) -> Dict[str, Any]:
        kept = {f"record{n}": each.value for n, each in enumerate(self._holders)}
        for number, holder in enumerate(self._holders):
            if holder.spike is not None:
                kept[f"spike{number}"] = holder.spike.value
        return kept

    def __deepcopy__(self, memo: Dict[int, Any]) -> FaultRecord:
        return FaultRecord()

    def entry_of(
        self, variables: List[Variable], skips_spikes: bool = False
    ) -> Optional[Entry]:
        """Returns where the faults of a list of variables go.

        Called when the optimizer is built, and again at each step: a `tf.function` that
        creates a variable is traced twice.

        Args:
          variables: What is trained.
          skips_spikes: Whether the loss scale skips finite steps, too.

        Returns:
          An `Entry`. None where there can be none.
        """
        if not mode.current().records_faults:
            return None  # it would have to initialize one
        for holder in self._holders:
            if all(id(variable) in holder.positions for variable in variables):
                break
        else:
            holder = WorstNumbers(list({id(each): each for each in variables}.values()))
            self._holders.append(holder)
        if skips_spikes and holder.spike is None:
            holder.spike = SpikeNumbers(len(holder.variables))
        return Entry(holder, [holder.positions[id(each)] for each in variables])

    def own_steps(self, skipped: int, in_a_row: int) -> OwnSteps:
        """Returns what this optimizer skipped, and what was so in a row.

        Args:
          skipped: How many steps the loss scale has skipped.
          in_a_row: How many of them since its last good step.
        """
        read = [holder.value.numpy().tolist()[-4:] for holder in self._holders]
        count = int(sum(own for own, *_ in read))
        _, run, losses, stamp = max(read, key=lambda each: each[-1], default=[0.0] * 4)
        if len(read) > 1:
            run = in_a_row  # each list of variables is a step
        if stamp != skipped:
            run = losses = 0
        return OwnSteps(count, min(int(run), in_a_row), min(int(losses), in_a_row))

    def _last(self) -> List[Tuple[WorstNumbers, List[float], float]]:
        """Returns what the last skipped step wrote to, and what that holds."""
        read = [(holder, *holder.read()) for holder in self._holders]
        latest = max((stamp for *_, stamp in read), default=0.0)
        return [each[:3] for each in read if each[3] == latest > 0.0]

    def gradients(self) -> List[NonfiniteGradient]:
        """Returns the gradients that were not finite at the last skipped step."""
        return [
            NonfiniteGradient(kerases.variable_name(variable), kind, variable)
            for holder, worst, _ in self._last()
            for variable, kind in zip(holder.variables, map(_kind, worst))
            if kind is not None
        ]

    def spike(self) -> Optional[Spike]:
        """Returns the last spike that was skipped, None if there was none."""
        return latest(self._holders, kerases.variable_name)

    def loss(self) -> Optional[str]:
        """Returns "inf" or "nan" if the unscaled loss was that, too, else None."""
        return _kind(sum(of_loss for *_, of_loss in self._last()))


class WorstNumbers:
    """The worst numbers of the gradients of a list of variables (`gradients/faults`).

    One variable holds that of each gradient, that of the loss, three counts (steps
    skipped, in a row, and in a row with a loss that was not finite), and when they were
    written: the loss scale's count of skipped steps.
    """

    def __init__(self, variables: List[Variable]) -> None:
        self.variables = variables
        self.spike: Optional[SpikeNumbers] = None
        self.positions = {id(variable): i for i, variable in enumerate(variables)}
        with tf.init_scope():
            self.value = tf.Variable(
                tf.zeros([len(variables) + 5]),
                trainable=False,
                name="nonfinite_gradients",
                # Every replica writes the same value, and one must be taken.
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    def write(self, positions: List[int], worst: Tensor, skipped: Scalar) -> Any:
        """Adds numbers to those of the same step, or begins anew.

        Args:
          positions: Whose numbers they are.
          worst: A `float32` tensor of shape `[positions + 1]`, the last of the loss.
          skipped: How many steps have been skipped, this one too.
        """
        size = len(self.variables) + 1
        held = tf.convert_to_tensor(self.value)
        old, counts, old_stamp = tf.split(held, [size, 3, 1])
        stamp = tf.cast(tf.reshape(skipped, [1]), tf.float32)
        since = stamp - old_stamp
        if positions != list(range(size - 1)):
            places = [[position] for position in [*positions, size - 1]]
            worst = tf.scatter_nd(places, worst, [size])  # adds up those at one place
        worst += tf.where(tf.equal(since, 0.0), old, 0.0)
        # A good step between writes nothing: who reads compares with the loss scale's.
        goes_on = tf.cast(tf.equal(since * since, since), tf.float32)  # it is 0 or 1
        is_bad = 1.0 - tf.cast(tf.math.is_finite(worst[-1:]), tf.float32)
        one = tf.ones([1])
        counts *= tf.concat([one, goes_on, goes_on * is_bad], 0)
        counts += tf.concat([one, one, is_bad], 0)
        value = tf.concat([worst, counts, stamp], 0)
        return self.value.assign(value, read_value=False)

    def read(self) -> Tuple[List[float], float, float]:
        """Returns the numbers of the gradients, that of the loss, and the time."""
        *worst, of_loss, _, _, _, stamp = self.value.numpy().tolist()
        return worst, of_loss, stamp


class Entry(NamedTuple):
    """Where the worst numbers of one list of variables go.

    Attributes:
      holder: What holds them.
      positions: Those of the list's variables in it.
    """

    holder: WorstNumbers
    positions: List[int]

    def write(self, bundle: Bundle, agreed: Check, skipped: Scalar) -> Any:
        """Keeps what was at fault on any replica.

        Called on a skipped step only, within the branch.

        Args:
          bundle: Each replica's gradients.
          agreed: What the replicas know together, of the gradients' sum, too.
          skipped: How many steps have been skipped, this one too.
        """
        worst = replicas.call_for_each_replica(_worst_with_loss, bundle)
        worst = replicas.all_reduce_sum(worst)
        if agreed.worst is not None:
            worst += tf.pad(agreed.worst(), [[0, 1]])
        return self.holder.write(self.positions, worst, skipped)

    def write_spike(self, bundle: Bundle, agreed: Check, guard: Any) -> Any:
        """Keeps which gradient was the largest of a step that was too large.

        Args:
          bundle: Each replica's gradients.
          agreed: What the replicas know together.
          guard: The `SpikeGuard`.
        """
        numbers: Any = self.holder.spike  # there is one where a guard skips
        return numbers.write(self.positions, bundle, agreed.largest, guard)


def _worst_with_loss(bundle: Bundle) -> Tensor:
    """Returns the worst numbers of one replica's gradients, and its loss's behind."""
    losses = [*bundle.losses, None]  # at least one
    of_losses = faults.worst_of_each(losses, groups_of_one(len(losses)))
    of_loss = tf.reshape(tf.reduce_sum(of_losses), [1])
    return tf.concat([bundle.check.worst_of(bundle.count), of_loss], 0)


def _kind(worst: float) -> Optional[str]:
    """Returns what a worst number tells: "nan", "inf", or None of a finite one."""
    return "nan" if math.isnan(worst) else "inf" if math.isinf(worst) else None
