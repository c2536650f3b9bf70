"""The replicas: in which context the code runs. No other file reduces across them.

Code runs in one of three places: without a strategy, in *replica context* (inside
`strategy.run`, once for every replica) or in *cross-replica context* (once for all
replicas; values are `PerReplica`). Each function here works in all three, unless its
docstring names one.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, Hashable, Iterable, List

import tensorflow as tf

from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Grad, Grads, Tensor, Variable


def count() -> int:
    """Returns how many replicas train in step, 1 without a strategy."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def this_one() -> Hashable:
    """Returns a key of this replica, or of this thread if no replica is known."""
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        context = tf.distribute.get_replica_context()
        with tf.init_scope():  # so that no constant is added to the step's graph
            number = tf.get_static_value(context.replica_id_in_sync_group)
        if number is not None:
            return ("replica", int(number))
    return threading.get_ident()


def refuse_tpu() -> None:
    """Raises under a strategy for TPUs, where nobody has seen a loss scale work."""
    classes = (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy)
    if isinstance(tf.distribute.get_strategy(), classes):
        raise ValueError(
            "`LossScaleOptimizer` must not be used with TPUStrategy: TPUs compute in "
            "bfloat16, which needs no loss scale. Use the inner optimizer as it is."
        )


def check_can_apply() -> None:
    """Raises if gradients cannot be applied here."""
    refuse_tpu()
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "`apply_gradients` must be called in replica context, got a call in "
            "cross-replica context. Call it within strategy.run."
        )


def train_apart() -> bool:
    """Whether each worker takes its own steps, as with parameter servers."""
    of_v1 = tf.compat.v1.distribute.experimental
    spaces = (tf.distribute, tf.distribute.experimental, of_v1)
    classes = tuple(getattr(space, "ParameterServerStrategy", ()) for space in spaces)
    return isinstance(tf.distribute.get_strategy(), classes)


def refuse_mesh(variables: Iterable[Variable]) -> None:
    """Raises if a variable lies on a mesh of DTensor, where counters would be wrong."""
    for variable in variables:
        if getattr(variable, "layout", None) is not None:
            raise ValueError(
                "`variables` must not lie on a DTensor mesh, got one that does. Use "
                "tf.distribute, or Keras 2's own LossScaleOptimizer."
            )


def call_for_each_replica(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function` on every replica with that replica's part of `args`.

    In cross-replica context it returns `PerReplica`, elsewhere what this replica does.
    """
    if tf.distribute.in_cross_replica_context():
        strategy = tf.distribute.get_strategy()
        return strategy.extended.call_for_each_replica(function, args=args)
    return function(*args)


def all_reduce_sum(value: Tensor) -> Tensor:
    """Returns the sum of a tensor over all replicas, equal on all of them.

    In cross-replica context, `value` is `PerReplica` and the sum is a plain tensor.
    """
    if count() == 1:
        return local_result(value)
    if tf.distribute.in_cross_replica_context():
        # This sum stays on the devices. Strategy.reduce brings it to the host.
        extended = tf.distribute.get_strategy().extended
        return local_result(
            extended.reduce_to(tf.distribute.ReduceOp.SUM, value, value)
        )
    return all_reduce_sums([value])[0]


def all_reduce_sums(values: Grads) -> Grads:
    """Sums each of several tensors over all replicas. The sums are equal on all.

    Tensors of one dtype cross together: in a graph, `MultiWorkerMirroredStrategy` packs
    them into one message. None stays None. Rows of `tf.IndexedSlices` are put together:
    the optimizer sums them when it applies them. Call it in replica context.
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
            sums[position] = _bitcast(total, dtype)
    return sums


def can_sum(dtype: str) -> bool:
    """Whether collectives can sum a dtype. Those of 2.4 cannot sum bfloat16."""
    with tf.Graph().as_default():  # where the operation does not run
        ends = {"merge_op": "Add", "final_op": "Id", "subdiv_offsets": [0]}
        keys = {"group_size": 2, "group_key": 1, "instance_key": 1}
        try:
            tf.raw_ops.CollectiveReduce(input=tf.zeros([], dtype), **keys, **ends)
        except TypeError:
            return False
    return True


def _as_gathered(value: Grad) -> Grad:
    """Returns bfloat16 rows as float16 with the same bits, which can be gathered."""
    is_sparse = isinstance(value, tf.IndexedSlices)
    is_hidden = is_sparse and value.dtype == tf.bfloat16
    return _bitcast(value, tf.float16) if is_hidden else value


def _bitcast(value: Grad, dtype: Any) -> Grad:
    if value.dtype == dtype:
        return value
    bits = tf.bitcast(value.values, dtype)
    return tf.IndexedSlices(bits, value.indices, value.dense_shape)


def agree(is_finite: Flag) -> Flag:
    """Returns whether `is_finite` holds on every replica: the same answer on each.

    It counts the replicas whose flag is False: booleans cannot be reduced, and every
    collective takes a `float32` scalar on every device. In cross-replica context,
    `is_finite` is `PerReplica`.
    """
    if not tf.distribute.has_strategy():
        return is_finite
    at_fault = call_for_each_replica(
        lambda flag: tf.cast(tf.logical_not(flag), tf.float32), is_finite
    )
    return tf.equal(all_reduce_sum(at_fault), 0.0)


def in_own_slot(value: Tensor) -> Tensor:
    """Returns this replica's tensor in its place among those of all, 0 in others.

    The sum over all replicas holds the numbers of each, and so the greatest, for which
    `tf.distribute` has no reduction. Call it in replica context. No number may be NaN.
    """
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    return tf.scatter_nd([[number]], [value], [count(), *value.shape])


def greatest(value: Tensor) -> Tensor:
    """Returns the greatest of all replicas' numbers, none of them negative or NaN."""
    if count() == 1:
        return local_result(value)
    return tf.reduce_max(all_reduce_sum(call_for_each_replica(in_own_slot, value)), 0)


def merge_call(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function` once for all replicas if they are threads, else once on each.

    If replicas are threads, two things fail in replica context. A branch of a `tf.cond`
    cannot communicate with the other replicas, and each thread in turn would change a
    variable that is not mirrored. So `function` is then called in cross-replica
    context, with `PerReplica` arguments.
    """
    if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
        return function(*args)
    if count() == 1 and train_apart():
        # Nobody to meet. This context can be left in a branch, as Keras 3 does.
        with tf.distribute.ReplicaContext(tf.distribute.get_strategy(), 0):
            return function(*args)
    # Keras calls the same private function. TensorFlow 2.4 does not have it, and has no
    # strategy that can do without merge_call.
    internal, name = tf.__internal__.distribute, "strategy_supports_no_merge_call"
    if getattr(internal, name, lambda: False)():
        return function(*args)
    context = tf.distribute.get_replica_context()
    return context.merge_call(lambda _, *merged: function(*merged), args=args)


def local_result(value: Any) -> Any:
    """Returns this worker's first part of a value that is equal on all replicas."""
    if not tf.distribute.in_cross_replica_context():
        return value
    return tf.distribute.get_strategy().experimental_local_results(value)[0]


def new_variable(name: str, initial_value: Any, dtype: Any) -> Variable:
    """Returns a new variable that has the same value on all replicas."""
    with tf.init_scope():  # it may be created while a function is traced
        settings = {
            "name": name,
            "dtype": dtype,
            "trainable": False,
            # Every replica computes the same value, so any of them will do.
            "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA,
        }
        if mode.current().knows_values:
            return tf.Variable(initial_value, **settings)
        # With tf.Variable a graph's collections would hold each replica's copy.
        return tf.compat.v1.Variable(initial_value, use_resource=True, **settings)
