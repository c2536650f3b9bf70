"""Which gradients were not finite at the last skipped step."""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, cast

import tensorflow as tf

from lossscale.gradients.check import Check, worst_of_each
from lossscale.gradients.packing import groups_of_one
from lossscale.optimizer.bundle import Bundle
from lossscale.optimizer.spike_record import Spike, SpikeNumbers, latest
from lossscale.runtime import kerases, mode, replicas
from lossscale.runtime.aliases import Op, PerGradient, Tensor, Variable
from lossscale.scales.base import LossScale
from lossscale.scales.spike_guard import SpikeGuard


class NonfiniteGradient(NamedTuple):
    """A gradient that was not finite.

    Attributes:
      name: The name of its variable; in Keras 3, the variable's path.
      kind: `"nan"` if it held a NaN, else `"inf"`.
      variable: The variable.
    """

    name: str
    kind: str
    variable: Variable


class OwnSteps(NamedTuple):
    """The steps that one optimizer skipped itself.

    The loss scale's own counts include the other optimizers that share it.

    Attributes:
      skipped: How many steps the optimizer skipped in this process.
      in_a_row: Consecutive skips up to the last step; 0 if that step was applied.
      bad_losses: Consecutive skips up to the last step at which the unscaled loss was
        not finite.
    """

    skipped: int
    in_a_row: int
    bad_losses: int


class FaultRecord(tf.Module):
    """Which gradients were at fault in an optimizer's last skipped step.

    The record is kept on the device and written on a skipped step only. An optimizer
    that was never built may apply the gradients of several lists of variables in turn;
    then each list has a variable here. These variables tell what happened in this
    process. They are in no checkpoint, so that a model which has changed can restore.
    """

    _holders: List[WorstNumbers]

    def __init__(self) -> None:
        super().__init__(name="faults")
        # Bypasses tf.Module's __setattr__, which would track the variables.
        object.__setattr__(self, "_holders", [])

    # Not public: the variables must be in a SavedModel of a training step, which writes
    # them, and must not be in a checkpoint. TensorFlow calls the first method since
    # 2.9, and called the second before (seen on 2.4, 2.8 and 2.10 to 2.21).
    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> Dict[str, Variable]:
        children = dict(super()._trackable_children(save_type, **kwargs))
        return {**children, **self._kept()} if save_type == "savedmodel" else children

    def _list_extra_dependencies_for_serialization(
        self, cache: Any
    ) -> Dict[str, Variable]:
        listed = super()._list_extra_dependencies_for_serialization(cache)
        return {**listed, **self._kept()}

    def _kept(self) -> Dict[str, Variable]:
        kept = {f"record{n}": each.value for n, each in enumerate(self._holders)}
        for number, holder in enumerate(self._holders):
            if holder.spike is not None:
                kept[f"spike{number}"] = holder.spike.value
        return kept

    def __deepcopy__(self, memo: object) -> FaultRecord:
        return FaultRecord()

    def entry_of(
        self, variables: List[Variable], skips_spikes: bool = False
    ) -> Optional[Entry]:
        """Returns the entry that records the faults of a list of variables.

        Called when the optimizer is built, so that no step has to create the variable:
        a `tf.function` that creates one is traced twice. Called again at each step.

        Args:
          variables: The variables that are trained.
          skips_spikes: Whether the loss scale also skips finite steps.

        Returns:
          The entry. None in a mode that cannot have one.
        """
        if not mode.current().records_faults:
            return None  # a session would have to initialize its variable
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
        """Returns how many steps this optimizer skipped itself.

        Args:
          skipped: How many steps the loss scale has skipped.
          in_a_row: How many steps it has skipped since its last good step.
        """
        read = [holder.value.numpy().tolist()[-4:] for holder in self._holders]
        count = int(sum(own for own, *_ in read))
        _, run, losses, stamp = max(read, key=lambda each: each[-1], default=[0.0] * 4)
        if len(read) > 1:
            run = in_a_row  # with several lists, each list is a step of its own
        if stamp != skipped:
            run = losses = 0
        return OwnSteps(count, min(int(run), in_a_row), min(int(losses), in_a_row))

    def _last(self) -> List[Tuple[WorstNumbers, List[float], float]]:
        """Returns the holders that the last skipped step wrote to.

        Each is followed by its gradients' worst numbers, and that of the loss.
        """
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
        """Returns "inf" or "nan" if the unscaled loss was not finite, else None."""
        return _kind(sum(of_loss for *_, of_loss in self._last()))


class WorstNumbers:
    """The worst numbers of the gradients of a list of variables (`gradients/faults`).

    One variable holds the worst number of each gradient and that of the loss. Behind
    them come three counts (steps skipped, skipped in a row, and in a row with a loss
    that was not finite) and a stamp: the loss scale's count of skipped steps then.
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
                # Every replica writes the same value, so any one serves.
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    def write(self, positions: List[int], worst: PerGradient, skipped: Tensor) -> Op:
        """Adds worst numbers to those of the same step, or starts a new record.

        Args:
          positions: The positions of the variables that the numbers belong to.
          worst: A `float32` tensor of shape `[positions + 1]`. The last is the loss's.
          skipped: How many steps have been skipped, with this one.
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
        # A good step in between writes nothing. So `own_steps` compares the stamp with
        # the loss scale's count. `since` is 0 or 1 if the run of skips goes on.
        goes_on = tf.cast(tf.equal(since * since, since), tf.float32)
        is_bad = 1.0 - tf.cast(tf.math.is_finite(worst[-1:]), tf.float32)
        one = tf.ones([1])
        counts *= tf.concat([one, goes_on, goes_on * is_bad], 0)
        counts += tf.concat([one, one, is_bad], 0)
        value = tf.concat([worst, counts, stamp], 0)
        return self.value.assign(value, read_value=False)

    def read(self) -> Tuple[List[float], float, float]:
        """Returns the numbers of the gradients, that of the loss, and the stamp."""
        *worst, of_loss, _, _, _, stamp = self.value.numpy().tolist()
        return worst, of_loss, stamp


class Entry(NamedTuple):
    """Writes the worst numbers of one list of variables.

    Attributes:
      holder: Holds the numbers.
      positions: The positions of the list's variables in the holder.
    """

    holder: WorstNumbers
    positions: List[int]

    def write(self, bundle: Bundle, agreed: Check, skipped: Tensor) -> Op:
        """Records the gradients that were at fault on any replica.

        Called on a skipped step only, within the branch.

        Args:
          bundle: Each replica's gradients.
          agreed: The check that the replicas share, also of the gradients' sum.
          skipped: How many steps have been skipped, with this one.
        """
        worst = replicas.call_for_each_replica(_worst_with_loss, bundle)
        worst = replicas.all_reduce_sum(worst)
        if agreed.worst is not None:
            worst += tf.pad(agreed.worst(), [[0, 1]])
        return self.holder.write(self.positions, worst, skipped)

    def write_spike(self, bundle: Bundle, agreed: Check, guard: LossScale) -> Op:
        """Records which gradient was the largest of a step that was too large.

        Args:
          bundle: Each replica's gradients.
          agreed: The check that the replicas share.
          guard: The `SpikeGuard`.
        """
        numbers = cast(SpikeNumbers, self.holder.spike)  # a guard's holder has one
        spiking = cast(SpikeGuard, guard)
        return numbers.write(self.positions, bundle, agreed.largest, spiking)


def _worst_with_loss(bundle: Bundle) -> PerGradient:
    """Returns the worst numbers of one replica's gradients, and then its loss's."""
    losses = [*bundle.losses, None]  # a list that is never empty
    of_losses = worst_of_each(losses, groups_of_one(len(losses)))
    of_loss = tf.reshape(tf.reduce_sum(of_losses), [1])
    return tf.concat([bundle.check.worst_of(bundle.count), of_loss], 0)


def _kind(worst: float) -> Optional[str]:
    """Returns the fault that a worst number tells: "nan", "inf", or None."""
    return "nan" if math.isnan(worst) else "inf" if math.isinf(worst) else None
