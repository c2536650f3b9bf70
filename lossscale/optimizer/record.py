"""Why the last step was skipped: which gradients were not finite, or which was a spike.

The record is kept on the device and written on a skipped step only. It tells what
happened in this process, so it is in no checkpoint: a model that has changed can still
restore. It is in a SavedModel of a training step, which writes it.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, cast

import tensorflow as tf

from lossscale.gradients.arithmetic import largest_of_each
from lossscale.gradients.check import Check, worst_of_each
from lossscale.gradients.packing import groups_of_one
from lossscale.optimizer.bundle import Bundle
from lossscale.runtime import kerases, mode, replicas
from lossscale.runtime.aliases import Op, PerGradient, Tensor, Variable
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


class Spike(NamedTuple):
    """A step that a `SpikeGuard` skipped.

    Attributes:
      name: The name of the variable whose gradient was the largest; in Keras 3, its
        path. Gradients are compared as they would have been applied, so clipped ones
        after clipping.
      largest: The greatest magnitude of the step's true gradients, a float.
      limit: The guard's `limit` at that step, a float.
      variable: The variable.
    """

    name: str
    largest: float
    limit: float
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


class Record(tf.Module):
    """Why the last steps of an optimizer were skipped.

    An optimizer that was never built may apply the gradients of several lists of
    variables in turn; then each list has numbers here.
    """

    _numbers: List[Numbers]
    _others: Dict[str, Variable]

    def __init__(self, others: Optional[Dict[str, Variable]] = None) -> None:
        """Begins empty. `others` are further variables that no checkpoint holds."""
        super().__init__(name="faults")
        # Bypasses tf.Module's __setattr__, which would track the variables.
        object.__setattr__(self, "_numbers", [])
        object.__setattr__(self, "_others", others or {})

    # Not public: the variables must be in a SavedModel and not in a checkpoint.
    # TensorFlow calls the first method since 2.9, and called the second before.
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
        kept = dict(self._others)
        for number, each in enumerate(self._numbers):
            kept[f"record{number}"] = each.faults
            if each.spike is not None:
                kept[f"spike{number}"] = each.spike
        return kept

    def entry_of(
        self, variables: List[Variable], skips_spikes: bool = False
    ) -> Optional[Entry]:
        """Returns the entry that records the skipped steps of a list of variables.

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
        for numbers in self._numbers:
            if all(id(variable) in numbers.positions for variable in variables):
                break
        else:
            numbers = Numbers(list({id(each): each for each in variables}.values()))
            self._numbers.append(numbers)
        if skips_spikes and numbers.spike is None:
            numbers.spike = _zeros(len(numbers.variables) + 3, "spiking_gradients")
        return Entry(numbers, [numbers.positions[id(each)] for each in variables])

    def own_steps(self, skipped: int, in_a_row: int) -> OwnSteps:
        """Returns how many steps this optimizer skipped itself.

        Args:
          skipped: How many steps the loss scale has skipped.
          in_a_row: How many steps it has skipped since its last good step.
        """
        read = [each.faults.numpy().tolist()[-4:] for each in self._numbers]
        count = int(sum(own for own, *_ in read))
        _, run, losses, stamp = max(read, key=lambda each: each[-1], default=[0.0] * 4)
        if len(read) > 1:
            run = in_a_row  # with several lists, each list is a step of its own
        if stamp != skipped:
            run = losses = 0
        return OwnSteps(count, min(int(run), in_a_row), min(int(losses), in_a_row))

    def gradients(self) -> List[NonfiniteGradient]:
        """Returns the gradients that were not finite at the last skipped step."""
        return [
            NonfiniteGradient(kerases.variable_name(variable), kind, variable)
            for numbers, worst in self._last()
            for variable, kind in zip(numbers.variables, map(_kind, worst))
            if kind is not None
        ]

    def loss(self) -> Optional[str]:
        """Returns "inf" or "nan" if the unscaled loss was not finite, else None."""
        return _kind(sum(of_loss for _, (*_, of_loss) in self._last()))

    def _last(self) -> List[Tuple[Numbers, List[float]]]:
        """Returns the numbers that the last skipped step wrote: those of its loss last.

        They are the worst numbers of each list of variables.
        """
        read = [(each, each.faults.numpy().tolist()) for each in self._numbers]
        latest = max((stamp for _, (*_, stamp) in read), default=0.0)
        return [(each, n[:-4]) for each, n in read if n[-1] == latest > 0.0]

    def spike(self) -> Optional[Spike]:
        """Returns the last spike that was skipped, None if there was none."""
        read = [
            (each.spike.numpy().tolist(), each.variables)
            for each in self._numbers
            if each.spike is not None
        ]
        if not read:
            return None
        (*each, largest, limit, stamp), variables = max(
            read, key=lambda one: one[0][-1]
        )
        if not stamp:
            return None
        variable = variables[each.index(max(each))]
        return Spike(kerases.variable_name(variable), largest, limit, variable)


class Numbers:
    """What is recorded of a list of variables.

    Attributes:
      variables: The variables.
      positions: The position of each, by its `id`.
      faults: The worst number of each gradient and of the loss (`gradients/check`),
        three counts (steps skipped, skipped in a row, and in a row with a loss that was
        not finite) and a stamp: the loss scale's count of skipped steps then.
      spike: The greatest magnitude of each gradient at the last spike, the greatest of
        the step, the limit, and a stamp: the guard's count of spikes then. None: no
        guard skips steps of theirs.
    """

    def __init__(self, variables: List[Variable]) -> None:
        self.variables = variables
        self.positions = {id(variable): i for i, variable in enumerate(variables)}
        self.faults = _zeros(len(variables) + 5, "nonfinite_gradients")
        self.spike: Optional[Variable] = None


class Entry(NamedTuple):
    """Records skipped steps of one list of variables. Called within the branch.

    Attributes:
      numbers: Where they are recorded.
      positions: The positions of the list's variables there.
    """

    numbers: Numbers
    positions: List[int]

    def write_faults(self, bundle: Bundle, agreed: Check, skipped: Tensor) -> Op:
        """Records the gradients that were at fault on any replica.

        It adds their worst numbers to those of the same step, or starts anew.

        Args:
          bundle: Each replica's gradients.
          agreed: The check that the replicas share, also of the gradients' sum.
          skipped: How many steps have been skipped, with this one.
        """
        worst = replicas.call_for_each_replica(_worst_with_loss, bundle)
        worst = replicas.all_reduce_sum(worst)
        if agreed.worst is not None:
            worst += tf.pad(agreed.worst(), [[0, 1]])
        size = len(self.numbers.variables) + 1
        worst = self._placed(worst, [*self.positions, size - 1], size)
        held = tf.convert_to_tensor(self.numbers.faults)
        old, counts, old_stamp = tf.split(held, [size, 3, 1])
        stamp = tf.cast(tf.reshape(skipped, [1]), tf.float32)
        since = stamp - old_stamp
        worst += tf.where(tf.equal(since, 0.0), old, 0.0)
        # A good step in between writes nothing. So `own_steps` compares the stamp with
        # the loss scale's count. `since` is 0 or 1 if the run of skips goes on.
        goes_on = tf.cast(tf.equal(since * since, since), tf.float32)
        is_bad = 1.0 - tf.cast(tf.math.is_finite(worst[-1:]), tf.float32)
        one = tf.ones([1])
        counts *= tf.concat([one, goes_on, goes_on * is_bad], 0)
        counts += tf.concat([one, one, is_bad], 0)
        value = tf.concat([worst, counts, stamp], 0)
        return self.numbers.faults.assign(value, read_value=False)

    def write_spike(self, bundle: Bundle, agreed: Check, guard: SpikeGuard) -> Op:
        """Records which gradient was the largest of a step that was too large.

        Args:
          bundle: Each replica's gradients.
          agreed: The check that the replicas share.
          guard: The guard, which has already counted the spike.
        """
        rows = replicas.call_for_each_replica(_largest_in_own_row, bundle)
        each = tf.reduce_max(replicas.all_reduce_sum(rows), 0)
        each = self._placed(each, self.positions, len(self.numbers.variables))
        limit, spikes = map(replicas.local_result, (guard.limit, guard.spikes))
        known = [tf.cast(one, tf.float32) for one in (agreed.largest, limit, spikes)]
        value = tf.concat([each, tf.stack(known)], 0)
        return cast(Variable, self.numbers.spike).assign(value, read_value=False)

    @staticmethod
    def _placed(values: Tensor, positions: List[int], size: int) -> Tensor:
        """Returns `size` numbers: values at their positions, 0 elsewhere."""
        if positions == list(range(size)):
            return values
        # Those at one place are added up.
        return tf.scatter_nd([[position] for position in positions], values, [size])


def _worst_with_loss(bundle: Bundle) -> PerGradient:
    """Returns the worst numbers of one replica's gradients, and then its loss's."""
    losses = [*bundle.losses, None]  # a list that is never empty
    of_losses = worst_of_each(losses, groups_of_one(len(losses)))
    of_loss = tf.reshape(tf.reduce_sum(of_losses), [1])
    return tf.concat([bundle.check.worst_of(bundle.count), of_loss], 0)


def _largest_in_own_row(bundle: Bundle) -> Tensor:
    """Returns a matrix with a row for each replica, all 0 but this replica's own."""
    found = largest_of_each(bundle.quotients(), bundle.groups)
    if replicas.count() == 1:
        return tf.expand_dims(found, 0)
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    own = tf.one_hot(number, replicas.count())
    return tf.expand_dims(own, 1) * tf.expand_dims(found, 0)


def _zeros(size: int, name: str) -> Variable:
    """Returns a variable to which every replica writes the same values."""
    with tf.init_scope():
        return tf.Variable(
            tf.zeros([size]),
            trainable=False,
            name=name,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )


def _kind(worst: float) -> Optional[str]:
    """Returns the fault that a worst number tells: "nan", "inf", or None."""
    return "nan" if math.isnan(worst) else "inf" if math.isinf(worst) else None
