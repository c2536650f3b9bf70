"""What the replicas know together. The only file that reduces across replicas.

Code runs in one of three places: without a strategy, in *replica context* (inside
`strategy.run`, once for every replica) and in *cross-replica context* (once for all
of them, values are `PerReplica`). Each function here works in all three.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, Hashable, List

import tensorflow as tf

from lossscale.runtime import op_types
from lossscale.runtime.aliases import Flag


def count() -> int:
    """Returns how many replicas train in step, 1 without a strategy."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def this_one() -> Hashable:
    """Returns what names this replica, across `strategy.run`s, or else this thread."""
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        context = tf.distribute.get_replica_context()
        with tf.init_scope():  # no constant in the graph of the step
            number = tf.get_static_value(context.replica_id_in_sync_group)
        if number is not None:
            return ("replica", int(number))
    return threading.get_ident()


def on_tpu() -> bool:
    """Tells whether the strategy is one for TPUs."""
    classes = (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy)
    return isinstance(tf.distribute.get_strategy(), classes)


def refuse_tpu() -> None:
    """Raises under a strategy for TPUs."""
    # Keras 2 refuses too, Keras 3 does not. Nobody has seen it work there.
    if on_tpu():
        raise ValueError(
            "`LossScaleOptimizer` must not be used with TPUStrategy: TPUs compute in "
            "bfloat16, which needs no loss scale. Use the inner optimizer as it is."
        )


def check_can_apply() -> None:
    """Raises where gradients cannot be applied."""
    refuse_tpu()
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "apply_gradients must be called in replica context, got a call in "
            "cross-replica context. Call it within strategy.run."
        )


def train_apart() -> bool:
    """Tells whether each worker takes steps of its own: parameter servers."""
    of_v1 = tf.compat.v1.distribute.experimental
    spaces = (tf.distribute, tf.distribute.experimental, of_v1)
    found = (getattr(each, "ParameterServerStrategy", None) for each in spaces)
    classes = tuple(each for each in found if each is not None)
    return isinstance(tf.distribute.get_strategy(), classes)


def call_for_each_replica(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function` on every replica with that replica's part of `args`.

    In cross-replica context it is called once per replica and the results come back
    as `PerReplica`. Elsewhere there is one replica here, and it is called once.
    """
    if tf.distribute.in_cross_replica_context():
        strategy = tf.distribute.get_strategy()
        return strategy.extended.call_for_each_replica(function, args=args)
    return function(*args)


def all_reduce_sum(value: Any) -> Any:
    """Returns the sum of a tensor over all replicas, equal on all of them.

    In cross-replica context `value` is `PerReplica`, and the sum a plain tensor.
    """
    if count() == 1:
        return local_result(value)
    if tf.distribute.in_cross_replica_context():
        # Onto the devices where it is: Strategy.reduce would take it to the host.
        extended = tf.distribute.get_strategy().extended
        return local_result(
            extended.reduce_to(tf.distribute.ReduceOp.SUM, value, value)
        )
    (total,) = all_reduce_sums([value])
    return total


def all_reduce_sums(values: List[Any]) -> List[Any]:
    """Returns the sum over all replicas of each of several tensors, equal on all.

    Those of one dtype cross together. In a graph `MultiWorkerMirroredStrategy` makes
    one message of them. Called in replica context.

    Args:
      values: Tensors, `tf.IndexedSlices` and Nones. Of what is sparse the rows of all
        replicas are put together, and added up by whoever applies them.
    """
    context, sums = tf.distribute.get_replica_context(), list(values)
    of_dtype: Dict[Any, List[int]] = {}
    for position, value in enumerate(values):
        if value is not None:
            of_dtype.setdefault(value.dtype, []).append(position)
    for dtype, positions in of_dtype.items():
        together = [_as_gathered(values[position]) for position in positions]
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, together)
        for position, total in zip(positions, reduced):
            sums[position] = _with_bits_of(total, dtype)
    return sums


def can_sum(dtype: str) -> bool:
    """Tells whether this TensorFlow's collectives add up a dtype.

    float16 they do since 2.4. bfloat16 they do not on 2.4, and do on 2.15 and 2.21.
    """
    return op_types.takes("CollectiveReduceV2", "T", tf.as_dtype(dtype))


def _as_gathered(value: Any) -> Any:
    """Returns sparse bfloat16 rows by their bits: collectives gather no bfloat16.

    They put the rows of all replicas together and compute nothing (seen on 2.4 to
    2.21).
    """
    if not isinstance(value, tf.IndexedSlices) or value.dtype != tf.bfloat16:
        return value
    return _with_bits_of(value, tf.float16)


def _with_bits_of(value: Any, dtype: Any) -> Any:
    if value.dtype == dtype:
        return value
    bits = tf.bitcast(value.values, dtype)
    return tf.IndexedSlices(bits, value.indices, value.dense_shape)


def agree(is_finite: Flag) -> Any:
    """Returns whether `is_finite` holds on every replica: the same answer on each.

    The replicas at fault are counted, as booleans cannot be reduced. One scalar
    crosses replicas, in `float32`, which every collective takes on every device.

    `LossScale.update` asks this. The step of an optimizer agrees in
    `lossscale/optimizer/step/reduction.py`, which has gradients' sums to look at, too.

    Args:
      is_finite: A `bool` tensor of shape `[]`, `PerReplica` in cross-replica context.

    Returns:
      A `bool` tensor of shape `[]`.
    """
    if not tf.distribute.has_strategy():
        return is_finite
    at_fault = call_for_each_replica(
        lambda flag: tf.cast(tf.logical_not(flag), tf.float32), is_finite
    )
    return tf.equal(all_reduce_sum(at_fault), 0.0)


def in_own_slot(value: Any) -> Any:
    """Returns `[replicas]` numbers: this replica's own one in its place, 0 in others.

    Their sum over all replicas holds the number of each, and so their greatest, which
    `tf.distribute` has no reduction for. Called in replica context.

    Args:
      value: A `float32` tensor of shape `[]`, not NaN.
    """
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    return tf.one_hot(number, count(), on_value=value, off_value=tf.zeros_like(value))


def greatest(value: Any) -> Any:
    """Returns the greatest of all replicas' numbers, equal on all of them.

    Args:
      value: A `float32` tensor of shape `[]`, not negative and not NaN, `PerReplica` in
        cross-replica context.
    """
    if count() == 1:
        return local_result(value)
    return tf.reduce_max(all_reduce_sum(call_for_each_replica(in_own_slot, value)))


def merge_call(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function` once for all replicas where they are threads, else right here.

    There it can branch, and change a variable once for all: where replicas are threads,
    a `tf.cond` in replica context cannot hold a branch that meets the other replicas,
    and a variable that is not mirrored would be changed by each thread in turn. So
    `function` is called in cross-replica context, with `PerReplica` arguments. Unlike
    TensorFlow's `merge_call`, this one does not give it the strategy.
    """
    if tf.distribute.in_cross_replica_context() or not _needs_merge_call():
        return function(*args)
    context = tf.distribute.get_replica_context()
    return context.merge_call(lambda _, *merged: function(*merged), args=args)


def local_result(value: Any) -> Any:
    """Returns this worker's first replica's part of a value that is equal on all."""
    if not tf.distribute.in_cross_replica_context():
        return value
    return tf.distribute.get_strategy().experimental_local_results(value)[0]


def _needs_merge_call() -> bool:
    """Tells whether replicas are threads of this process that must meet."""
    if not tf.distribute.has_strategy():
        return False
    # Keras asks the same question with the same private name; TensorFlow 2.4 has
    # neither the name nor a strategy without merge_call (seen on 2.4 and 2.8-2.21).
    internal = getattr(getattr(tf, "__internal__", None), "distribute", None)
    supports_none = getattr(internal, "strategy_supports_no_merge_call", None)
    return supports_none is None or not supports_none()
