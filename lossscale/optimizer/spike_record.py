"""The last step that was skipped for its size, and where its largest gradient was."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional

import tensorflow as tf

from lossscale.gradients.largest import largest_of_each
from lossscale.optimizer.bundle import Bundle
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Scalar, Tensor, Variable


class Spike(NamedTuple):
    """A step that a `SpikeGuard` skipped.

    Attributes:
      name: The name of the variable whose gradient was the largest: the path in Keras
        3. Gradients are compared as they were to be applied, clipped ones as clipped.
      largest: The greatest magnitude of the step's true gradients, a float.
      limit: The guard's `limit` at that step, a float.
      variable: The variable.
    """

    name: str
    largest: float
    limit: float
    variable: Variable


class SpikeNumbers:
    """What is kept of the last spike for a list of variables, in one variable.

    That is the greatest magnitude of each gradient, of the whole step, the limit, and
    when they were written: the guard's count of spikes, 0 if there was none.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        with tf.init_scope():
            self.value = tf.Variable(
                tf.zeros([count + 3]),
                trainable=False,
                name="spiking_gradients",
                # Every replica writes the same value, and one must be taken.
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    def write(
        self, positions: List[int], bundle: Bundle, largest: Scalar, guard: Any
    ) -> Any:
        """Keeps a spike. Called on a skipped step only, within the branch.

        Args:
          positions: Whose gradients are in the bundle.
          bundle: Each replica's gradients.
          largest: The greatest magnitude of the step, a `float32` tensor of shape `[]`.
          guard: The `SpikeGuard`, which has counted the spike.
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

    def read(self) -> Any:
        """Returns the magnitudes of the gradients, and the three numbers behind."""
        numbers = self.value.numpy().tolist()
        return numbers[:-3], numbers[-3:]


def latest(holders: List[Any], name_of: Any) -> Optional[Spike]:
    """Returns the last spike of several lists of variables, None if there was none.

    Args:
      holders: What has `variables`, and `spike`: a `SpikeNumbers` or None.
      name_of: Returns a variable's name.
    """
    kept = [(h.variables, *h.spike.read()) for h in holders if h.spike is not None]
    variables, each, (largest, limit, stamp) = max(
        kept, key=lambda one: one[2][2], default=([], [], [0.0] * 3)
    )
    if not stamp:
        return None
    variable = variables[each.index(max(each))]
    return Spike(name_of(variable), largest, limit, variable)


def _in_own_row(bundle: Bundle) -> Tensor:
    """Returns one replica's magnitudes in its row of a matrix of zeros."""
    found = largest_of_each(bundle.quotients(), bundle.groups)
    if replicas.count() == 1:
        return tf.expand_dims(found, 0)
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    own = tf.one_hot(number, replicas.count())
    return tf.expand_dims(own, 1) * tf.expand_dims(found, 0)
