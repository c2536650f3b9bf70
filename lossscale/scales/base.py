"""LossScale: the contract of every loss scale."""

from __future__ import annotations

import abc
from functools import partial
from typing import Any, Dict, Optional, Tuple

import tensorflow as tf

from lossscale.gradients import scaling
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Flag, Scalar, Tensor
from lossscale.runtime.autograph import do_not_convert
from lossscale.runtime.control import group_ops
from lossscale.scales import adjusting, listening
from lossscale.scales.listening import Listener
from lossscale.scales.number import ReadsAsNumber
from lossscale.scales.variables import Unsaved, described, scalar


class LossScale(ReadsAsNumber, tf.Module, metaclass=abc.ABCMeta):
    """A number that multiplies the loss, so that small gradients survive in float16.

    float16 holds nothing smaller than 2**-24, and most gradients of a network are
    smaller. Multiplying the loss by a loss scale multiplies every gradient by it;
    dividing the gradients afterwards gives back what float32 would have computed. A
    scale that is too large makes gradients overflow, and that step is skipped.

    A subclass implements `__call__`, `_adjust` (only the rule) and `get_config`. It
    calls `super().__init__()` and keeps its state in variables that `_add_weight`
    creates. This class does the rest, across replicas too:

    ```
    update(grads):
      is_finite = every gradient is finite        # check, on each replica
      is_finite = is_finite on every replica      # agree, one scalar
      adjust(is_finite)                           # the rule
      should_apply_gradients = is_finite
    ```

    The interface is that of TensorFlow's `LossScale`. `adjust`, `scale`, `unscale` and
    the counters are new, and every replica context is allowed.

    Use a loss scale like its number: `loss * loss_scale`, `loss_scale > 1e9`,
    `f"{loss_scale:.0f}"`, `np.log2(loss_scale)`. Operators and TensorFlow get a tensor.
    Python's and NumPy's functions get a number, which only eager mode has. Two loss
    scales are equal only if they are the same object.

    If a class sets `needs_largest = True`, `_adjust` also gets the greatest magnitude
    of the gradients. Finding it reads the gradients once more.

    Attributes:
      needs_largest: Whether the rule asks for the greatest magnitude of a step's
        gradients. A subclass sets it in its class.
      checks_gradients: Whether `update` looks at the gradients. If a subclass sets it
        to False, `update` returns the Python value True, and every step is applied.
      skips_spikes: Whether finite steps may be skipped, too, as by `SpikeGuard`.
      has_scaled: Whether this object has multiplied a loss in this process. If not, an
        optimizer that applies gradients warns.
      has_been_read: Whether this object was read as a tensor in this process, as
        `loss * optimizer.loss_scale` does.
      skipped_steps: `int64` variable of shape `[]`, the number of steps with gradients
        not finite. Read it with `.numpy()`: a mirrored variable has no `int()`.
      consecutive_skipped_steps: `int64` variable of shape `[]`, how many of those steps
        came last in a row: 0 after a step whose gradients were finite.
      last_step_finite: `bool` variable of shape `[]`, whether the last step's
        gradients were finite. True before the first step.
      last_largest: `float32` variable of shape `[]`, the greatest magnitude of the last
        step's gradients, infinite after an overflow, 0 before the first step. No file
        holds it. None unless `needs_largest` is set or `keep_largest` was called.

    Source: Micikevicius et al., "Mixed Precision Training", section 3.2; TensorFlow
    2.21 `python/training/experimental/loss_scale.py`.
    """

    needs_largest: bool = False
    checks_gradients: bool = True
    skips_spikes: bool = False
    has_scaled: bool = False
    has_been_read: bool = False
    _decide: Any = None  # a method if more than the flag decides: see `decision_of`
    #: Whether a step can change the value.
    _can_change: bool = True
    #: Learns of each use. Optimizers that share this loss scale set it.
    _noted_by: Optional[Listener] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        compute = cls.__dict__.get("__call__")
        if compute is not None:  # a caller may multiply a loss with it: note the read
            cls._value = compute  # type: ignore[method-assign]
            cls.__call__ = listening.telling(compute)  # type: ignore

    def __init__(self) -> None:
        super().__init__()
        # These names, and those of subclasses' variables, are checkpoint format.
        self.skipped_steps = self._add_weight("skipped_steps", 0, tf.int64)
        self.consecutive_skipped_steps = self._add_weight(
            "consecutive_skipped_steps", 0, tf.int64
        )
        self.last_step_finite = self._add_weight("last_step_finite", True, tf.bool)
        self._kept = Unsaved()
        if self.needs_largest:
            self.keep_largest()

    @abc.abstractmethod
    def __call__(self) -> Any:
        """Returns the current loss scale, a `float32` tensor of shape `[]`."""

    def _adjust(self, is_finite: Flag) -> Any:
        """Moves the subclass's state by one step: the rule, and nothing else.

        Called once for all replicas. AutoGraph does not convert it: branch with
        `tf.where`. If `needs_largest` is set: `_adjust(is_finite, largest)`.

        Args:
          is_finite: A `bool` tensor of shape `[]`, equal on all replicas.
          largest: A `float32` tensor of shape `[]`, equal on all replicas: the greatest
            magnitude of the unscaled gradients, before you clipped them. Infinite on a
            bad step, 0 without gradients.

        Returns:
          What a graph must run: the results of the variables' `assign`, or None.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement `_adjust(is_finite)`, or override "
            "the whole `update(grads)`."
        )

    @abc.abstractmethod
    def get_config(self) -> Dict[str, Any]:
        """Returns the constructor's arguments, never the state. JSON can hold it."""

    @classmethod
    def from_config(cls, config: Dict[str, Any]) -> LossScale:
        """Returns a new loss scale from a config. Scale and counters start afresh."""
        return cls(**config)

    @do_not_convert
    def update(self, grads: Any) -> Tuple[Any, Any]:
        """Adjusts the loss scale to one step's gradients.

        Works eagerly, in `tf.function`, under XLA and in a `tf.compat.v1` graph; with
        no strategy, in replica context (call it on every replica) and in cross-replica
        context (with per-replica gradients).

        Args:
          grads: A nest of *unscaled* gradients, of any float dtype and shape. `None`s
            and tensors that are not floating are ignored. Of `tf.IndexedSlices` only
            the values count.

        Returns:
          update_op: None in eager mode. In a graph, an op that updates the state when
            it runs; `tf.function` runs that op by itself.
          should_apply_gradients: The Python value True, or a `bool` tensor of shape
            `[]`, equal on all replicas. If False, skip this step.
        """
        if not self.checks_gradients:
            return group_ops([]), True
        return adjusting.update(self, grads)

    @property
    def last_largest(self) -> Any:
        """The greatest magnitude of the last step, or None: see the class."""
        return self._kept.largest

    def keep_largest(self) -> None:
        """Keeps the greatest magnitude of each step's gradients in `last_largest`.

        The rule does not get it. Call this before tracing, in the strategy's scope.

        Raises:
          TypeError: A subclass overrides `adjust` without the argument `largest`.
        """
        if self.last_largest is None:
            adjusting.check_takes_largest(self)
            self._kept.largest = scalar("last_largest", 0.0, tf.float32)

    @do_not_convert
    def adjust(
        self, is_finite: Flag, largest: Optional[Scalar] = None
    ) -> Tuple[Any, Any]:
        """Adjusts the loss scale to one step, given whether its gradients were finite.

        Args:
          is_finite: A `bool`, or a `bool` tensor of shape `[]`, which must be equal on
            all replicas: whether every gradient of the step was finite.
          largest: The greatest magnitude of the step's unscaled gradients, a number or
            a `float32` tensor of shape `[]`, equal on all replicas. On a bad step any
            value will do. None if the loss scale does not need it.

        Returns:
          `update_op` and `should_apply_gradients`, as `update` does.

        Raises:
          TypeError: The loss scale needs `largest`, and it is None.
        """
        if not self.checks_gradients:
            return group_ops([]), True
        is_finite = tf.convert_to_tensor(is_finite, tf.bool)
        arguments = adjusting.arguments_of(self, is_finite, largest)
        decision = adjusting.decision_of(self, arguments)
        adjust = partial(adjusting.adjust_state, self)
        update_op = replicas.merge_call(adjust, *arguments, *decision)
        return update_op, decision[0] if decision else is_finite

    # The next two methods save time; a subclass overrides both or none. In a graph the
    # rule is then in a branch, and a good step that only counts does not take it.

    def _stays(self) -> Any:
        """Returns whether the rule would only count a good step, and move nothing else.

        Returns:
          A `bool` tensor of shape `[]`. None if that is not known before the step.
        """
        return None

    def _count_good(self) -> Any:
        """Counts a good step, as `_adjust` does where `_stays` holds."""
        raise NotImplementedError

    @do_not_convert
    def scale(self, loss: Tensor) -> Any:
        """Returns `loss` times the loss scale.

        Args:
          loss: A tensor of any shape. float16 and bfloat16 are cast to float32 first,
            since float16 ends at 65504.

        Returns:
          A tensor of `loss`'s shape, `float32`, or of `loss`'s dtype if that is wider.
        """
        loss_scale = self._value()
        if self._noted_by is not None:
            self._noted_by.note_loss(loss, loss_scale)
        return self.scale_by(loss, loss_scale)

    @do_not_convert
    def scale_by(self, loss: Tensor, loss_scale: Any) -> Any:
        """Like `scale`, but multiplies by a value that this loss scale returned before.

        Args:
          loss: A tensor of any shape.
          loss_scale: What this object returned when it was called.
        """
        self.has_scaled = True
        if self._noted_by is not None:
            self._noted_by.note_read(loss_scale)
        return scaling.multiply(loss, loss_scale)

    @do_not_convert
    def unscale(self, grads: Any) -> Any:
        """Returns `grads` divided by the loss scale, exactly at every power of two.

        Args:
          grads: A nest of gradients. They are divided in float32 (wider ones in their
            own dtype) and keep their dtype, their `None`s and their sparsity. Tensors
            that are not floating are returned unchanged.

        Returns:
          The same nest.
        """
        divisor = self._value()
        unscaled = self.unscale_by(grads, divisor)
        if self._noted_by is None:
            return unscaled
        lists = tf.nest.flatten(unscaled), tf.nest.flatten(grads)
        self._noted_by.note_unscaled_by(*lists, divisor)
        return unscaled

    @do_not_convert
    def unscale_by(self, grads: Any, loss_scale: Any) -> Any:
        """Returns `grads` divided by a value of this loss scale that you read before.

        Use it in place of `unscale` if `update` may have moved the loss scale since.

        Args:
          grads: A nest of gradients.
          loss_scale: The value that `scale_by` was given.
        """
        divisor = scaling.opaque_divisor(loss_scale, self.skipped_steps)
        return scaling.divide(grads, divisor)

    def _add_weight(self, name: str, initial_value: Any, dtype: Any = None) -> Any:
        """Returns a new scalar variable, checkpointed as `name`.

        Assign it to an attribute. This method has the name that it has in TensorFlow's
        LossScale, so that subclasses of that class work here, too.
        """
        variable = scalar(name, initial_value, dtype)
        self._track_trackable(variable, name)
        return variable

    def __repr__(self) -> str:
        return described(self)


# Code written for Keras 2 reads `optimizer.loss_scale` as a tensor.
tf.register_tensor_conversion_function(LossScale, listening.to_tensor)
