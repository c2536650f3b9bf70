"""The names that programs of TensorFlow 1 use: import them from here.

`LossScaleOptimizer` is that of `tf.contrib.mixed_precision`, the other two are those of
`tf.train.experimental` and `tf.compat.v1.mixed_precision`.
"""

from __future__ import annotations

import sys
from typing import Any, Iterable, List, Optional, Tuple

import tensorflow as tf

from lossscale import arguments
from lossscale.gradients.arithmetic import widened
from lossscale.optimizer.engine import EngineOfWrapper
from lossscale.optimizer.pending import Host
from lossscale.optimizer.wrappers import refuse_own_accumulation
from lossscale.runtime import mode, replicas
from lossscale.runtime.aliases import Grads, Op
from lossscale.runtime.graphs import do_not_convert
from lossscale.scales.base import LossScale

__all__ = [
    "LossScaleOptimizer",
    "MixedPrecisionLossScaleOptimizer",
    "enable_mixed_precision_graph_rewrite",
]

#: The name scope of our own operations. A branch of the program's own keeps its name,
#: and so do the variables that are created in it.
_SCOPE = "loss_scale"


class LossScaleOptimizer(tf.compat.v1.train.Optimizer):
    """A `tf.compat.v1.train.Optimizer` that scales the loss and skips bad steps.

    It has the names, arguments and behaviour of
    `tf.contrib.mixed_precision.LossScaleOptimizer`. For Keras's optimizers use
    `lossscale.LossScaleOptimizer`.

    ```
    manager = lossscale.ExponentialUpdateLossScaleManager(2**15, 1000)
    optimizer = tf.compat.v1.train.AdamOptimizer(1e-3)
    optimizer = lossscale.compat.v1.LossScaleOptimizer(optimizer, manager)
    train_op = optimizer.minimize(loss, global_step=global_step)
    ```

    `compute_gradients` returns unscaled gradients, which you can clip before you call
    `apply_gradients`. A step is applied only if all gradients that `compute_gradients`
    returned were finite on every replica, also those that you do not apply, and if the
    applied ones still are. Otherwise nothing changes but the loss scale; `global_step`
    does not advance either.

    In eager mode and in a `tf.function` the optimizer remembers whether they were. A
    session runs any part of a graph. There the applied gradients are traced back to
    the computed ones, but not through NumPy, a placeholder or a variable: an overflow
    that was clipped before is missed.

    If optimizers share a loss scale, each `apply_gradients` adjusts it, unlike those of
    `lossscale.LossScaleOptimizer`.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`.
      loss_scale_manager: A `LossScaleManager`, a `LossScale`, a number, or a name such
        as `"dynamic"`: whatever `lossscale.get` accepts, except None.
      guard: A `Guard`, which may leave finite steps out, or None.

    Raises:
      TypeError: An argument has the wrong type.
      ValueError: `loss_scale_manager` is out of range, or the strategy is for TPUs.

    Source: https://github.com/lossscale/lossscale/blob/main/docs/origins.md.
    """

    _argument = "loss_scale_manager"

    def __init__(self, opt: Any, loss_scale_manager: Any, *, guard: Any = None) -> None:
        if not isinstance(opt, tf.compat.v1.train.Optimizer):
            raise TypeError(
                "`opt` must be a tf.compat.v1.train.Optimizer, got "
                f"{arguments.typed(opt)}. For a Keras optimizer use "
                "lossscale.LossScaleOptimizer."
            )
        theirs = tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer
        if isinstance(opt, (LossScaleOptimizer, theirs)):
            raise TypeError(
                "`opt` must not be a LossScaleOptimizer itself, got "
                f"{arguments.shown(opt)}. Wrap the optimizer that it wraps."
            )
        if isinstance(opt, tf.compat.v1.train.SyncReplicasOptimizer):
            # Its queue would be in our branch, where no session can run it.
            raise TypeError(
                f"`opt` must not be a SyncReplicasOptimizer, got {arguments.shown(opt)}"
                ". Put it outside: SyncReplicasOptimizer(LossScaleOptimizer(opt, "
                f"{self._argument}), replicas_to_aggregate, ...)."
            )
        if loss_scale_manager is None:
            raise TypeError(
                f"`{self._argument}` must not be None, got None. Use the optimizer "
                "without this wrapper, or pass the number 1."
            )
        refuse_own_accumulation(opt)
        super().__init__(False, opt.get_name())  # the inner optimizer may lock
        self._optimizer = opt
        host = Host(unscales_in_apply=False, unscales_itself=True)
        self._engine = EngineOfWrapper(host, loss_scale_manager, guard=guard)
        # These are TensorFlow's names, so that its checkpoints can be restored.
        self._track_trackable(opt, "base_optimizer")
        self._track_trackable(self.loss_scale, "loss_scale")
        if guard is not None:
            self._track_trackable(self._engine.guard, "guard")
        # A SavedModel of a training step needs the state of the step.
        self._track_trackable(self._engine.record, "faults")

    @property
    def loss_scale(self) -> LossScale:
        """The `LossScale`. `tf.convert_to_tensor` of it gives the current scale."""
        return self._engine.loss_scale

    @do_not_convert
    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        gate_gradients: int = tf.compat.v1.train.Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> List[Tuple[Any, Any]]:
        """Returns the unscaled gradients of `loss`, computed from the scaled loss.

        Args:
          loss: A tensor, or a function that returns one. In eager mode a function.
          var_list: A list of variables, or None: all trainable ones.
          gate_gradients: An integer, for the inner optimizer, as are the next ones.
          aggregation_method: An integer, how to add up the terms of a gradient.
          colocate_gradients_with_ops: A boolean, whether on the loss's devices.
          grad_loss: A tensor of `loss`'s shape, its own gradient, or None.

        Returns:
          A list of pairs of a gradient, which may be None, and its variable.
        """
        scale, scaled = self.loss_scale.scale, loss
        if callable(loss):

            def scaled() -> Any:  # as TensorFlow calls it
                return scale(loss())

        elif not mode.current().knows_values:  # or the inner optimizer raises an error
            scaled = scale(loss)
        pairs = self._optimizer.compute_gradients(
            scaled,
            var_list=var_list,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            # TensorFlow wants it in the dtype of the scaled loss, which is widened.
            grad_loss=None if grad_loss is None else widened(grad_loss),
        )
        with tf.name_scope(_SCOPE):
            grads = self._engine.unscale([grad for grad, _ in pairs])
        return [(grad, variable) for grad, (_, variable) in zip(grads, pairs)]

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[Tuple[Any, Any]],
        global_step: Any = None,
        name: Optional[str] = None,
    ) -> Any:
        """Applies gradients, or skips them on all replicas, and moves the loss scale.

        Call it in replica context, on each replica.

        Args:
          grads_and_vars: Pairs of a gradient, which may be None, and its variable. A
            gradient known to be still scaled is unscaled first.
          global_step: A variable that counts the applied steps. None: no variable.
          name: The name of the operation. None: the inner optimizer's name.

        Returns:
          In a graph, an operation that runs the step. In eager mode, where the step has
          run, None.

        Raises:
          ValueError: The context is the cross-replica one, there is no gradient, or one
            has another shape than its variable.
        """
        pairs = list(grads_and_vars)
        grads, variables = [grad for grad, _ in pairs], [v for _, v in pairs]
        name = self.get_name() if name is None else name
        # Every replica must pass the same object, or TensorFlow would merge them.
        inner_name = sys.intern(f"{name}-wrapped")
        # The inner optimizer's variables get the names that they have outside a branch.
        scope = tf.compat.v1.get_default_graph().get_name_scope()

        def apply(grads: Grads, variables: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            with graph.name_scope(f"{scope}/" if scope else None):
                pairs = list(zip(grads, variables))
                return self._optimizer.apply_gradients(pairs, global_step, inner_name)

        train_op = tf.compat.v1.GraphKeys.TRAIN_OP
        listed = tf.compat.v1.get_collection(train_op)
        with tf.name_scope(_SCOPE):
            done = self._engine.apply(grads, variables, apply)
        if done is None:
            return None

        def as_train_op(op: Any) -> Op:
            op = tf.distribute.get_strategy().group(op, name=name)
            # The one that the inner optimizer has added is dropped: it is in a branch,
            # and cannot run from outside.
            tf.compat.v1.get_collection_ref(train_op)[:] = [*listed, op]
            return op

        return replicas.merge_call(as_train_op, done)

    def get_slot(self, var: Any, name: str) -> Any:
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> Any:
        # A checkpoint asks each optimizer that it tracks, so the inner one, too, and
        # refuses slots that it sees twice (seen on TensorFlow 2.4 to 2.21).
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        is_checkpoint = asks.split(".")[:2] == ["tensorflow", "python"]
        return [] if is_checkpoint else self._optimizer.get_slot_names()

    def variables(self) -> List[Any]:
        """Returns the variables of the inner optimizer, loss scale and guard."""
        return [*self._optimizer.variables(), *self._engine._state_variables()]


class MixedPrecisionLossScaleOptimizer(LossScaleOptimizer):
    """`LossScaleOptimizer` under its name in `tf.compat.v1.train.experimental`.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`.
      loss_scale: As `loss_scale_manager` of `LossScaleOptimizer`.
      guard: As in `LossScaleOptimizer`.
    """

    _argument = "loss_scale"

    def __init__(self, opt: Any, loss_scale: Any, *, guard: Any = None) -> None:
        super().__init__(opt, loss_scale, guard=guard)


def enable_mixed_precision_graph_rewrite(
    opt: Any, loss_scale: Any = "dynamic"
) -> LossScaleOptimizer:
    """Turns on TensorFlow's rewrite of graphs to float16, and wraps an optimizer.

    TensorFlow then rewrites graphs of new sessions and `tf.function` traces on a GPU,
    until `tf.compat.v1.mixed_precision.disable_mixed_precision_graph_rewrite`.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`.
      loss_scale: As `loss_scale_manager` of `LossScaleOptimizer`.

    Returns:
      A `MixedPrecisionLossScaleOptimizer` around `opt`.

    Raises:
      TypeError: An argument has the wrong type.
      ValueError: `loss_scale` is out of range, or Keras's mixed precision is on, too.

    Source: https://github.com/lossscale/lossscale/blob/main/docs/origins.md.
    """
    wrapper = MixedPrecisionLossScaleOptimizer(opt, loss_scale)
    # This also creates a wrapper, without variables, which is dropped.
    tf.compat.v1.mixed_precision.enable_mixed_precision_graph_rewrite(opt, 1.0)
    return wrapper
