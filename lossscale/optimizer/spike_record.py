"""The last step that was skipped for its size, and where its largest gradient was."""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Optional, Protocol, Sequence, Tuple

import tensorflow as tf

from lossscale.gradients.arithmetic import largest_of_each
from lossscale.optimizer.bundle import Bundle
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Op, Scalar, Tensor, Variable
from lossscale.scales.spike_guard import SpikeGuard


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


class SpikeNumbers:
    """The numbers of the last spike for a list of variables, kept in one variable.

    These are the greatest magnitude of each gradient, the greatest of the whole step,
    the limit, and a stamp: the guard's count of spikes then, 0 if there was none.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        with tf.init_scope():
            self.value = tf.Variable(
                tf.zeros([count + 3]),
                trainable=False,
                name="spiking_gradients",
                # Every replica writes the same value, so any one serves.
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    def write(
        self, positions: List[int], bundle: Bundle, largest: Scalar, guard: SpikeGuard
    ) -> Op:
        """Records a spike. Called on a skipped step only, within the branch.

        Args:
          positions: The positions of the variables whose gradients are in the bundle.
          bundle: Each replica's gradients.
          largest: The greatest magnitude of the step, a `float32` tensor of shape `[]`.
          guard: The guard, which has already counted the spike.
        """
        rows = replicas.call_for_each_replica(_in_own_row, bundle)
        each = tf.reduce_max(replicas.all_reduce_sum(rows), 0)
        if positions != list(range(self._count)):
            places = [[position] for position in positions]
            each = tf.scatter_nd(places, each, [self._count])
        limit, spikes = map(replicas.local_result, (guard.limit, guard.spikes))
        known = [tf.cast(one, tf.float32) for one in (largest, limit, spikes)]
        value = tf.concat([each, tf.stack(known)], 0)
        return self.value.assign(value, read_value=False)

    def read(self) -> Tuple[List[float], float, float, float]:
        """Returns the magnitudes of the gradients, the step's, the limit, the stamp."""
        *each, largest, limit, stamp = self.value.numpy().tolist()
        return each, largest, limit, stamp


class Holder(Protocol):
    """What holds the last spike of a list of variables.

    Attributes:
      variables: The variables.
      spike: The spike's numbers. None: no guard has skipped a step of theirs.
    """

    variables: List[Variable]
    spike: Optional[SpikeNumbers]


def latest(
    holders: Sequence[Holder], name_of: Callable[[Variable], str]
) -> Optional[Spike]:
    """Returns the last spike of several lists of variables, None if there was none.

    Args:
      holders: What holds the spike of each list.
      name_of: Returns a variable's name.
    """
    kept = [(*h.spike.read(), h.variables) for h in holders if h.spike is not None]
    if not kept:
        return None
    each, largest, limit, stamp, variables = max(kept, key=lambda one: one[3])
    if not stamp:
        return None
    variable = variables[each.index(max(each))]
    return Spike(name_of(variable), largest, limit, variable)


def _in_own_row(bundle: Bundle) -> Tensor:
    """Returns a matrix with a row for each replica, all 0 but this replica's own."""
    found = largest_of_each(bundle.quotients(), bundle.groups)
    if replicas.count() == 1:
        return tf.expand_dims(found, 0)
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    own = tf.one_hot(number, replicas.count())
    return tf.expand_dims(own, 1) * tf.expand_dims(found, 0)
