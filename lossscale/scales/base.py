"""LossScale: the contract of every loss scale."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable, FrozenSet, Mapping, Optional, Tuple

import tensorflow as tf

from lossscale import arguments
from lossscale.gradients import arithmetic
from lossscale.gradients.check import all_finite, floating_values
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Flag, Op, Scalar, Tensor, Variable
from lossscale.runtime.control import group_ops
from lossscale.runtime.graphs import do_not_convert
from lossscale.runtime.number_like import NumberLike
from lossscale.scales.adjustment import adjust_to_step, checked_step
from lossscale.scales.variables import HasVariables


@dataclass(frozen=True)
class Product:
    """A loss that was multiplied by a loss scale, and the scaled loss, `product`."""

    loss: Tensor
    loss_scale: Scalar
    #: The loss scale as it multiplied the loss. None: a subclass did it in its own way.
    factor: Optional[Scalar]
    product: Tensor


_A_GUARD = """\
What leaves finite steps out is a guard: derive a class from lossscale.Guard, write \
`judge(state, largest)` there, and pass it as LossScaleOptimizer(inner_optimizer, \
loss_scale, guard=...)."""
_A_RULE = """\
Write the rule in `next_state(state, is_finite)`, which returns the new values of the \
variables by name."""
#: What no subclass may have, and what to write instead.
_OF_OTHERS = {"judge": _A_GUARD, "_judge": _A_GUARD, "adjust": _A_RULE}
_OF_OTHERS["_adjust"] = _A_RULE
#: The methods of which `_overridden` tells whether a subclass has its own.
_OVERRIDABLE = ("update", "next_state", "scale", "scale_by", "_value")


class LossScale(NumberLike, HasVariables):
    """A number that multiplies the loss, so that small gradients survive in float16.

    float16 holds no positive number below 2**-24, and many gradients of a network are
    smaller. Multiplying the loss multiplies every gradient; dividing the gradients
    afterwards, in float32, gives back their true size. If the scale is too large,
    gradients overflow, and the step is skipped.

    To train, use a subclass such as `DynamicLossScale`. Your own implements
    `get_config` and the rule, `next_state`:
    https://github.com/lossscale/lossscale/blob/main/docs/own-loss-scale.md. The rest is
    here:

    ```
    update(grads):
      is_finite = every gradient is finite        # on each replica
      is_finite = is_finite on every replica      # an all-reduce of one scalar
      state = next_state(state, is_finite)
      should_apply_gradients = is_finite
    ```

    A loss scale acts as its number: `loss * loss_scale` is a tensor, and in eager mode
    `float(loss_scale)` reads it. Read its variables with `.numpy()`: on several
    replicas `bool(loss_scale.last_step_finite)` is always True.

    Args:
      initial_loss_scale: A positive number within float32's normal range, or None: the
        class implements `__call__`.

    Attributes:
      needs_largest: A boolean that a subclass sets: `next_state` gets `largest`, too.
      checks_gradients: A boolean. If it is False, every step is applied.
      current_loss_scale: `float32` variable of shape `[]`.
      skipped_steps: `int64` variable of shape `[]`: steps with inf or NaN gradients.
      consecutive_skipped_steps: `int64` variable of shape `[]`: those in a row.
      last_step_finite: `bool` variable of shape `[]`, True before the first step.
      ignored_loss_steps: `int64` variable of shape `[]`: the skipped steps that
        `nonfinite_loss="skip"` ignored, or None.
      last_largest: `float32` variable of shape `[]`, or None: the greatest magnitude of
        the last step, also of one that a guard has left out; infinite if the step was
        not finite. If optimizers share the loss scale, the greatest of what they have
        applied so far in this step, or that of the last apply if a guard left it out.
    """

    needs_largest: bool = False
    checks_gradients: bool = True
    initial_loss_scale: float
    ignored_loss_steps: Optional[Variable] = None
    has_scaled: bool = False
    has_been_read: bool = False
    _can_change: bool = True
    #: The `Uses` of the optimizers that share it, to which each use is reported.
    _observer: Any = None
    #: Which of `_OVERRIDABLE` a subclass has of its own.
    _overridden: FrozenSet[str] = frozenset()
    _base_call = "super().__init__(initial_loss_scale)"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, write in _OF_OTHERS.items():
            if getattr(cls, name, None) is not getattr(LossScale, name, None):
                raise TypeError(
                    f"A loss scale must not have its own `{name}`, got one in "
                    f"{cls.__name__}. {write}"
                )
        if "__call__" in vars(cls):
            cls._report_reads(vars(cls)["__call__"])
        cls._overridden = frozenset(
            n for n in _OVERRIDABLE if getattr(cls, n) is not getattr(LossScale, n)
        )

    @classmethod
    def _report_reads(cls, compute: Callable[[Any], Any]) -> None:
        """Makes a class's own `__call__`, `compute`, report that a program reads it."""

        def _value(self: LossScale) -> Tensor:
            # A user's may return a variable or a number.
            return tf.convert_to_tensor(compute(self))

        @functools.wraps(compute)
        def __call__(self: LossScale) -> Any:  # noqa: N807 - it is the class's
            return self._note_read(_value(self))

        of_class: Any = cls
        of_class._value, of_class.__call__ = _value, __call__

    def __init__(self, initial_loss_scale: Optional[float] = None) -> None:
        if initial_loss_scale is not None:
            self.initial_loss_scale = arguments.loss_scale(
                "initial_loss_scale", initial_loss_scale
            )
        super().__init__()
        # tf.Module does not search this object, so that no file holds what is in it.
        self._unsaved = SimpleNamespace(last_largest=None, greatest_so_far=None)
        # These names, and those of subclasses' variables, are checkpoint format.
        self.skipped_steps = self._add_weight("skipped_steps", 0, tf.int64)
        self.consecutive_skipped_steps = self._add_weight(
            "consecutive_skipped_steps", 0, tf.int64
        )
        self.last_step_finite = self._add_weight("last_step_finite", True, tf.bool)
        if self.needs_largest:
            self.keep_largest()
        if initial_loss_scale is not None:
            self.current_loss_scale = self._add_weight(
                "current_loss_scale", self.initial_loss_scale, tf.float32
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale" and isinstance(value, LossScale):
            raise TypeError(
                "A loss scale must not hold another one, got "
                f"{type(value).__name__} for the attribute `loss_scale` of "
                f"{type(self).__name__}. {_A_GUARD}"
            )
        super().__setattr__(name, value)

    def __call__(self) -> Any:
        """Returns the current loss scale, a `float32` tensor of shape `[]`."""
        return self._note_read(LossScale._value(self))

    def _value(self) -> Tensor:
        """Returns what `__call__` returns, without reporting the read."""
        if hasattr(self, "current_loss_scale"):
            return tf.convert_to_tensor(self.current_loss_scale)
        if "_unsaved" not in vars(self):
            raise self._missing("current_loss_scale")
        raise NotImplementedError(
            f"{type(self).__name__} must implement `__call__`, or pass "
            "`initial_loss_scale` to `super().__init__`."
        )

    def _note_read(self, value: Tensor) -> Tensor:
        # The caller may multiply a loss by it.
        self.has_been_read = True
        if self._observer is not None:
            self._observer.note_read(value)
        return value

    def _scaled(self, loss: Tensor, owner: Any) -> Any:
        """Returns the scaled loss, and reports it. `owner` is an optimizer, or None."""
        value = self._value()
        if owner is not None and "scale" in self._overridden:
            product = Product(loss, value, None, self.scale(loss))
        elif "scale_by" in self._overridden:
            product = Product(loss, value, None, self.scale_by(loss, value))
        else:
            wide = arithmetic.widened(loss)
            factor = tf.cast(value, wide.dtype)
            product = Product(loss, value, factor, arithmetic.multiply(wide, factor))
        self.__dict__.update(has_scaled=True)
        if self._observer is not None:
            self._observer.note_loss(product, owner)
        return product.product

    @property
    def _was_used(self) -> bool:
        """Whether anybody has scaled a loss by it, or read it as a tensor."""
        return self.has_scaled or self.has_been_read

    @property
    def _takes_flag(self) -> bool:
        """Whether it is adjusted by the flag, not in an `update` of its own."""
        return "update" not in self._overridden

    if TYPE_CHECKING:
        # A rule that looks at the gradients takes a third argument.
        next_state: Callable[..., Mapping[str, Tensor]]

    def next_state(  # type: ignore[no-redef]
        self, state: Any, is_finite: Flag
    ) -> Mapping[str, Tensor]:
        """Returns the values of the variables after one step: the rule, nothing else.

        Called once for all replicas. AutoGraph does not convert it: choose with
        `tf.where`.

        Args:
          state: The values before the step: a tensor of each variable, as an attribute
            of its name.
          is_finite: A `bool` tensor of shape `[]`, equal on all replicas.
          largest: Only if `needs_largest` is set. A `float32` tensor of shape `[]`,
            equal on all replicas: the greatest magnitude of the unscaled gradients,
            before you clipped them. Infinite on a bad step, 0 without gradients.

        Returns:
          A dictionary of new values by the names of the variables. Others stay.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement `next_state(state, is_finite)`, or "
            "override the whole `update(grads)`."
        )

    @do_not_convert
    def update(self, grads: Any) -> Tuple[Op, Any]:
        """Adjusts the loss scale to one step's gradients.

        Works eagerly, in `tf.function`, under XLA and in a `tf.compat.v1` graph. Under
        a strategy, call it on every replica, or once in cross-replica context with
        per-replica gradients.

        Args:
          grads: A nest of *unscaled* gradients, of any float or complex dtype and any
            shape. `None`s and integer tensors in it are ignored. Of `tf.IndexedSlices`
            only the values count.

        Returns:
          update_op: None in eager mode. In a graph, an op that updates the state when
            it runs; `tf.function` runs that op by itself.
          should_apply_gradients: The Python value True, or a `bool` tensor of shape
            `[]`, equal on all replicas. If False, skip this step.

        Raises:
          TypeError: `grads` is None, or holds what is no gradient.
        """
        if grads is None:
            raise TypeError("`grads` must be a nest of gradients, got None.")
        if not self.checks_gradients:
            # It raises for what is no gradient.
            replicas.call_for_each_replica(floating_values, grads)
            return group_ops([]), True
        if self.last_largest is None:
            is_finite = replicas.call_for_each_replica(all_finite, grads)
            return tuple(self.adjust(replicas.agree(is_finite)))
        largest = replicas.call_for_each_replica(arithmetic.largest_if_finite, grads)
        largest = replicas.greatest(largest)
        return tuple(self.adjust(tf.math.is_finite(largest), largest))

    @property
    def last_largest(self) -> Any:
        """The greatest magnitude of the last step, or None: see the class."""
        return self._unsaved.last_largest

    @property
    def greatest_so_far(self) -> Any:
        """That of a shared step's applies of which the rule has learned, or None."""
        return self._unsaved.greatest_so_far

    def _scope(self) -> Any:
        """Returns the scope in which its variables were made: others go there, too."""
        strategy: Any = getattr(self.skipped_steps, "distribute_strategy", None)
        is_here = strategy in {None, tf.distribute.get_strategy()}
        return nullcontext() if is_here else strategy.scope()

    def keep_largest(self) -> None:
        """Keeps the greatest magnitude of each step in `last_largest`, from now on.

        The rule does not get it. Call this before tracing.
        """
        if self.last_largest is None:
            with self._scope():
                for name in vars(self._unsaved):
                    new = replicas.new_variable(name, 0.0, tf.float32)
                    setattr(self._unsaved, name, new)

    @do_not_convert
    def adjust(
        self, is_finite: Flag, largest: Optional[Scalar] = None
    ) -> Tuple[Op, Any]:
        """Adjusts the loss scale to one step, given whether its gradients were finite.

        If it raises an error, nothing has changed.

        Args:
          is_finite: A `bool`, or a `bool` tensor with one element, which must be equal
            on all replicas: whether every gradient of the step was finite.
          largest: The greatest magnitude of the step's unscaled gradients, a number or
            a tensor with one element, equal on all replicas. On a bad step any value
            will do. It is ignored if `last_largest` is None.

        Returns:
          `update_op` and `should_apply_gradients`, as `update` does. In a graph, a step
          is bad, too, if its `largest` is negative or not finite.

        Raises:
          TypeError: `is_finite` is no bool, or `largest` is needed and is no number.
          ValueError: `is_finite` or `largest` has more than one element; in eager mode,
            `largest` is negative or not finite, though `is_finite` is True.
        """
        if self.needs_largest and largest is None and self.checks_gradients:
            raise TypeError(
                "`largest` must be the greatest magnitude of the step's unscaled "
                f"gradients, since {type(self).__name__} needs it, got None. "
                "`update(grads)` computes it."
            )
        is_used = self.last_largest is not None
        is_finite, largest = checked_step(is_finite, largest, is_used)
        return tuple(adjust_to_step(self, is_finite, largest)[:2])

    @do_not_convert
    def scale(self, loss: Tensor) -> Any:
        """Returns `loss` times the loss scale.

        Args:
          loss: A tensor of any shape. float16, which ends at 65504, and bfloat16 are
            cast to float32 first.

        Returns:
          A tensor of `loss`'s shape, `float32`, or of `loss`'s dtype if that is wider.
        """
        return self._scaled(loss, owner=None)

    @do_not_convert
    def scale_by(self, loss: Tensor, loss_scale: Any) -> Any:
        """Like `scale`, but multiplies by a scale read earlier with `loss_scale()`.

        So the loss and a metric can have the same.
        """
        self.__dict__.update(has_scaled=True)
        if self._observer is not None:
            self._observer.note_read(loss_scale)
        return arithmetic.multiply(loss, loss_scale)

    @do_not_convert
    def unscale(self, grads: Any) -> Any:
        """Returns `grads` divided by the loss scale.

        If optimizers use the loss scale, and it has moved since it multiplied the loss,
        `grads` are divided by the value that it had then.

        Args:
          grads: A nest of gradients. They are divided in float32 (wider ones in their
            own dtype): exactly if the loss scale is a power of two and the quotient is
            not below 2**-126.

        Returns:
          A nest of the same structure, sparsity and dtypes. So small float16 gradients
          become zero. What holds no floating-point numbers is unchanged.
        """
        if self._observer is None:
            return self.unscale_by(grads, self._value())
        unscaled = self._observer.unscale(self, tf.nest.flatten(grads))
        return tf.nest.pack_sequence_as(grads, unscaled)

    @do_not_convert
    def unscale_by(self, grads: Any, loss_scale: Any) -> Any:
        """Like `unscale`, but divides by the value that `scale_by` was given.

        Use it if `update` may have moved the loss scale since.
        """
        divisor = arithmetic.opaque_divisor(loss_scale, self.skipped_steps)
        return arithmetic.divide(grads, divisor)

    def __float__(self) -> float:
        number = self._to_show()
        if self._observer is not None:
            self._observer.note_float()
        return number
