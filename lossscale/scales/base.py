"""LossScale: the contract of every loss scale."""

from __future__ import annotations

import abc
import inspect
from types import SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    FrozenSet,
    Mapping,
    Optional,
    Tuple,
)

import tensorflow as tf

from lossscale import arguments
from lossscale.gradients import arithmetic
from lossscale.gradients.check import all_finite, floating_values
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Flag, Op, Scalar, Tensor
from lossscale.runtime.control import group_ops
from lossscale.runtime.graphs import do_not_convert
from lossscale.runtime.number_like import NumberLike
from lossscale.scales import subclasses
from lossscale.scales.adjustment import (
    State,
    Verdict,
    adjust_to_step,
    assign,
    new_values,
)
from lossscale.scales.checks import checked_step
from lossscale.scales.uses import scale_for, takes_the_flag
from lossscale.scales.variables import Stateful


class LossScale(NumberLike, Stateful, metaclass=abc.ABCMeta):
    """A number that multiplies the loss, so that small gradients survive in float16.

    float16 holds no positive number below 2**-24, and many gradients of a network are
    smaller. Multiplying the loss multiplies every gradient; dividing the gradients
    afterwards, in float32, gives back their true size. If the scale is too large,
    gradients overflow, and the step is skipped.

    To train, use a subclass such as `DynamicLossScale`. Your own implements
    `get_config` and the rule, `next_state`: docs/own-loss-scale.md. The rest is here:

    ```
    update(grads):
      is_finite = every gradient is finite        # on each replica
      is_finite = is_finite on every replica      # an all-reduce of one scalar
      verdict = judge(state, is_finite)           # should_apply = is_finite
      if verdict.is_told: state = next_state(state, is_finite)
      should_apply_gradients = is_finite and verdict.should_apply
    ```

    A loss scale acts as its number: `loss * loss_scale` is a tensor, and in eager mode
    `float(loss_scale)` reads it.

    Args:
      initial_loss_scale: A positive number within float32's normal range, or None: the
        class holds another loss scale, or implements `__call__`.

    Attributes:
      needs_largest: A boolean that a subclass sets: `next_state` gets `largest`, too.
      left_out_as: A string that a subclass sets if it overrides `judge`: what reports
        call the steps that it leaves out, such as `"all zero"`.
      checks_gradients: A boolean. If it is False, every step is applied.
      current_loss_scale: `float32` variable of shape `[]`.
      skipped_steps: `int64` variable of shape `[]`: steps whose gradients were not
        finite. Read it with `.numpy()`.
      consecutive_skipped_steps: `int64` variable of shape `[]`: those in a row.
      last_step_finite: `bool` variable of shape `[]`, True before the first step.
      ignored_loss_steps: `int64` variable of shape `[]`: the skipped steps that
        `nonfinite_loss="skip"` ignored, or None.
      last_largest: `float32` variable of shape `[]`: the last step's greatest
        magnitude, or None.
    """

    needs_largest: bool = False
    checks_gradients: bool = True
    skips_spikes: bool = False
    left_out_as: str = ""
    initial_loss_scale: float
    has_scaled: bool = False
    has_been_read: bool = False
    _can_change: bool = True
    #: Which of the methods in `subclasses` a subclass has of its own.
    _overridden: FrozenSet[str] = frozenset()
    #: Whether it has `needs_largest` only since the one that it holds needs it.
    _largest_is_for_held: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        subclasses.adapt(cls, LossScale)

    def __init__(self, initial_loss_scale: Optional[float] = None) -> None:
        if initial_loss_scale is not None:
            self.initial_loss_scale = arguments.loss_scale(
                "initial_loss_scale", initial_loss_scale
            )
        super().__init__()
        # tf.Module does not search this object, so that no file holds what is in it.
        self._unsaved = SimpleNamespace(largest=None)
        if initial_loss_scale is None:
            self._hold()
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
        super().__setattr__(name, value)
        if name == "loss_scale" and "_unsaved" in vars(self):
            self._hold()

    def _hold(self) -> None:
        """Adopts what a loss scale that it holds needs, or raises. It may hold none."""
        held = self._held()
        if held is None:
            return
        has_own = self._overridden & {"update", "adjust", "_adjust"}
        if not (has_own or takes_the_flag(held)):
            raise TypeError(
                f"`loss_scale` must work with `adjust`, got {type(held).__name__}, "
                "which overrides `update`. Write its rule in `next_state`."
            )
        words = dict.fromkeys([type(self).left_out_as, held.left_out_as])
        self.left_out_as = " or ".join(filter(None, words))
        if held.needs_largest and not self.needs_largest:
            self.needs_largest = self._largest_is_for_held = True
            self.keep_largest()

    def __call__(self) -> Any:
        """Returns the current loss scale, a `float32` tensor of shape `[]`."""
        return self._note_read(LossScale._value(self))

    def _value(self) -> Tensor:
        """Returns what `__call__` returns, without reporting the read."""
        if hasattr(self, "current_loss_scale"):
            return tf.convert_to_tensor(self.current_loss_scale)
        held = self._held()
        if held is None and "_unsaved" not in vars(self):
            raise self._missing("current_loss_scale")
        if held is None:
            raise NotImplementedError(
                f"{type(self).__name__} must implement `__call__`, or pass "
                "`initial_loss_scale` to `super().__init__`."
            )
        return held._value()

    def _note_read(self, value: Tensor) -> Tensor:
        # The caller may multiply a loss by it.
        self.has_been_read = True
        if self._observer is not None:
            self._observer.note_read(value)
        return value

    def _held(self) -> Optional[LossScale]:
        """Returns the loss scale whose value and steps this one has, or None."""
        if hasattr(self, "current_loss_scale"):
            return None
        held = getattr(self, "loss_scale", None)
        return held if isinstance(held, LossScale) else None

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

    def _adjust(self, is_finite: Flag, largest: Optional[Scalar] = None) -> Any:
        """Is the `super()._adjust` of a class that was written for 2.x.

        Such a class overrides it, not `next_state`: it assigns, and returns an op.
        """
        held = self._held()
        results = [] if held is None else [adjust_to_step(held, is_finite, largest)[0]]
        values = new_values(self, is_finite, largest)
        return [*results, assign(self, values)]

    @abc.abstractmethod
    def get_config(self) -> Dict[str, Any]:
        """Returns the constructor's arguments, not the state, as a dict for JSON."""

    @classmethod
    def from_config(cls, config: Dict[str, Any]) -> LossScale:
        """Returns a new loss scale in its initial state, given a `get_config()`."""
        return cls(**config)

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
        return self._unsaved.largest

    def keep_largest(self) -> None:
        """Keeps the greatest magnitude of each step's gradients in `last_largest`.

        The rule does not get it. Call this before tracing, in the strategy's scope.

        Raises:
          TypeError: A subclass overrides `adjust` without the argument `largest`.
        """
        if self.last_largest is not None:
            return
        signature = inspect.signature(self.adjust)
        try:
            signature.bind(True, 1.0)
        except TypeError:
            raise TypeError(
                f"`adjust` of {type(self).__name__} must take `largest` as second "
                f"argument, got adjust{signature}. Write `def adjust(self, is_finite, "
                "largest=None)`, and pass both to `super().adjust(is_finite, largest)`."
            ) from None
        self._unsaved.largest = replicas.new_variable("last_largest", 0.0, tf.float32)

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
        is_used = self.last_largest is not None
        is_finite, largest = checked_step(is_finite, largest, is_used)
        return adjust_to_step(self, is_finite, largest, calls_adjust=False)

    def judge(self, state: Any, is_finite: Flag, largest: Optional[Scalar]) -> Verdict:
        """Decides about a step, and changes nothing.

        A subclass that leaves out finite steps overrides it, and sets `left_out_as`. It
        can only leave a step out: one that is not finite is never applied.

        Args:
          state: As in `next_state`.
          is_finite: As in `next_state`.
          largest: As in `next_state`. None if `last_largest` is.

        Returns:
          A `Verdict`: whether the step is applied, whether the rule learns of it, and
          new values of variables that are assigned in any case.
        """
        del state, largest
        return Verdict(is_finite)

    def _judge(self, is_finite: Flag, largest: Optional[Scalar]) -> Any:
        """Is the `super()._judge` of a class that was written for 2.x."""
        classes: Any = [cls for cls in type(self).__mro__ if "_judge" in vars(cls)][:-1]
        judge = super(classes[-1], self).judge if classes else self.judge
        return judge(State(self), is_finite, largest)

    @do_not_convert
    def scale(self, loss: Tensor) -> Any:
        """Returns `loss` times the loss scale.

        Args:
          loss: A tensor of any shape. float16, which ends at 65504, and bfloat16 are
            cast to float32 first.

        Returns:
          A tensor of `loss`'s shape, `float32`, or of `loss`'s dtype if that is wider.
        """
        return scale_for(self, loss, owner=None)

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

        Args:
          grads: A nest of gradients. They are divided in float32 (wider ones in their
            own dtype): exactly if the loss scale is a power of two and the quotient is
            not below 2**-126.

        Returns:
          A nest of the same structure, sparsity and dtypes. So small float16 gradients
          become zero. What holds no floating-point numbers is unchanged.
        """
        divisor = self._value()
        unscaled = self.unscale_by(grads, divisor)
        if self._observer is not None:
            self._observer.note_unscaled_by(tf.nest.flatten(unscaled), divisor)
        return unscaled

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
