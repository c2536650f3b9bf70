"""LossScale: the contract of every loss scale, and how one is adjusted to a step."""

from __future__ import annotations

import abc
import functools
import inspect
import numbers
from types import SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    FrozenSet,
    Mapping,
    NamedTuple,
    Optional,
    Protocol,
    Tuple,
)

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.arguments import shown
from lossscale.gradients import arithmetic
from lossscale.gradients.check import all_finite, floating_values
from lossscale.runtime import mode, replicas
from lossscale.runtime.aliases import Flag, Grads, Op, Scalar, Tensor, Variable
from lossscale.runtime.control import group_ops
from lossscale.runtime.graphs import do_not_convert
from lossscale.runtime.number_like import NumberLike
from lossscale.scales.adjustment import (
    State,
    Verdict,
    adjust_to_step,
    assign,
    chain,
    new_values,
)
from lossscale.scales.checks import one_element


class Product(NamedTuple):
    """A loss that was multiplied by a loss scale.

    Attributes:
      loss: The loss as the program gave it.
      loss_scale: A `float32` tensor of the loss scale.
      factor: That tensor in the dtype in which it multiplied the loss. None: a subclass
        multiplied in its own way.
      product: The scaled loss.
    """

    loss: Tensor
    loss_scale: Scalar
    factor: Optional[Scalar]
    product: Tensor


class Observer(Protocol):
    """What a loss scale ("it") reports of its uses to the optimizers that share it.

    `optimizer.state.StepObserver` is one.
    """

    def note_read(self, tensor: Scalar) -> None:
        """A program read it as a tensor, perhaps to multiply a loss or to unscale."""

    def note_float(self) -> None:
        """A program read it as a Python number. No graph shows where that goes."""

    def note_loss(self, product: Product, owner: Any) -> None:
        """A loss was multiplied by it, for an optimizer. None: by `scale` itself."""

    def note_unscaled_by(self, grads: Grads, divisor: Scalar) -> None:
        """Gradients were divided by a tensor of it, without a check."""

    def note_restored(self) -> None:
        """A checkpoint is about to set its variables, in eager mode."""


#: The methods that adjust a loss scale, and that a subclass may have of its own.
_ADJUSTING = ("update", "adjust", "_adjust", "judge", "next_state")


class LossScale(NumberLike, tf.Module, metaclass=abc.ABCMeta):
    """A number that multiplies the loss, so that small gradients survive in float16.

    float16 holds no positive number below 2**-24, and many gradients of a network are
    smaller. Multiplying the loss by a loss scale multiplies every gradient by it;
    dividing the gradients afterwards, in float32, gives back their true size. A scale
    that is too large makes gradients overflow, and that step is skipped.

    To train, use a subclass such as `DynamicLossScale`. To write one of your own, pass
    `initial_loss_scale` to this constructor, and implement `get_config` and the rule,
    `next_state`. A class that passes none implements `__call__`, or holds another loss
    scale in its attribute `loss_scale`. Then it has that one's value, and passes each
    step on to it. This class does the rest, in replica and in cross-replica context:

    ```
    update(grads):
      is_finite = every gradient is finite        # check, on each replica
      is_finite = is_finite on every replica      # agree, one scalar
      verdict = judge(state, is_finite)           # should_apply = is_finite
      if verdict.is_told: state = next_state(state, is_finite)
      should_apply_gradients = is_finite and verdict.should_apply
    ```

    A loss scale acts as its number: `loss * loss_scale` is a tensor, and in eager mode
    `float(loss_scale)` and `f"{loss_scale:.0f}"` read it.

    Args:
      initial_loss_scale: A positive number within float32's normal range, the scale to
        start with, or None: there is no variable `current_loss_scale`.

    Attributes:
      needs_largest: A boolean that a subclass sets in its class: whether `next_state`
        also gets the greatest magnitude of a step's gradients.
      left_out_as: A string that a subclass sets in its class if it overrides `judge`:
        what the finite steps are that it leaves out, as in `"all zero"`.
      checks_gradients: A boolean, whether steps are checked. If not, `update` returns
        the Python value True, and every step is applied.
      current_loss_scale: `float32` variable of shape `[]`. If a file or a rule made it
        0, negative, infinite or NaN, the next step begins with `initial_loss_scale`.
        One below the attribute `min_loss_scale`, if there is one, is raised to that.
      skipped_steps: `int64` variable of shape `[]`, the number of steps whose gradients
        were not finite. Read it with `.numpy()`: a mirrored variable has no `int()`.
      consecutive_skipped_steps: `int64` variable of shape `[]`, the number of such
        steps in a row up to the last step.
      last_step_finite: `bool` variable of shape `[]`, whether the last step's gradients
        were finite. True before the first step.
      ignored_loss_steps: `int64` variable of shape `[]`, how many of `skipped_steps`
        the rule ignored because the loss was not finite before it was scaled. None
        unless an optimizer with `nonfinite_loss="skip"` uses this loss scale.
      last_largest: `float32` variable of shape `[]`, the greatest magnitude of the last
        step's gradients, which no file holds. None unless `needs_largest` is set or
        `keep_largest` was called.

    Source: Micikevicius et al., "Mixed Precision Training", section 3.2; see the page
    *Origins*.
    """

    needs_largest: bool = False
    checks_gradients: bool = True
    skips_spikes: bool = False
    left_out_as: str = ""
    ignored_loss_steps: Optional[Variable] = None
    initial_loss_scale: float
    has_scaled: bool = False
    has_been_read: bool = False
    #: Whether a step can change the value.
    _can_change: bool = True
    #: To whom each use is reported: see `observer_of`.
    _observer: Optional[Observer] = None
    #: Which of `_ADJUSTING`, `scale` and `scale_by` a subclass has of its own.
    _overridden: FrozenSet[str] = frozenset()
    #: Whether it has `needs_largest` only since the one that it holds needs it.
    _largest_is_for_held: bool = False
    #: What the names of its variables begin with. Their keys in checkpoints do not.
    _prefix: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Classes that were written for 2.x have these two under other names.
        own = vars(cls)
        named = own.get("left_out_as") or own.get("_left_out_as") or cls.left_out_as
        cls.left_out_as = named or getattr(cls, "_left_out_as", "")
        judges: Any = {"judge", "_judge"}
        first = next(each for each in cls.__mro__ if judges & {*vars(each)})
        if first is not LossScale and "_judge" in vars(first):
            cls.judge = lambda self, _, *known: self._judge(*known)  # type: ignore
        if cls.judge is not LossScale.judge and not cls.left_out_as:
            raise TypeError(
                "`left_out_as` must say what the steps are that `judge` leaves out, "
                f'as in "all zero", got {cls.left_out_as!r} for {cls.__name__}. Set '
                "it in the class, next to `judge`."
            )
        cls._overridden = frozenset(
            name
            for name in (*_ADJUSTING, "scale", "scale_by")
            if getattr(cls, name) is not getattr(LossScale, name)
        )
        compute = cls.__dict__.get("__call__")
        if compute is None:
            return

        def _value(self: LossScale) -> Tensor:
            # A user's may return a variable or a number.
            return tf.convert_to_tensor(compute(self))

        @functools.wraps(compute)
        def __call__(self: LossScale) -> Any:  # noqa: N807 - it is the class's
            return self._note_read(_value(self))

        cls._value = _value  # type: ignore[method-assign]
        cls.__call__ = __call__  # type: ignore[method-assign]

    def __init__(self, initial_loss_scale: Optional[float] = None) -> None:
        if initial_loss_scale is not None:
            self.initial_loss_scale = arguments.loss_scale(
                "initial_loss_scale", initial_loss_scale
            )
        super().__init__()
        # tf.Module does not search this object, so that no file holds what is in it.
        self._unsaved = SimpleNamespace(largest=None)
        held = self._held() if initial_loss_scale is None else None
        if held is not None:
            self._hold(held)
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

    if not TYPE_CHECKING:  # or a type checker would allow every name

        def __getattr__(self, name: str) -> Any:
            """Is called for what is missing."""
            raise self._missing(name)

    def _missing(self, name: str) -> AttributeError:
        """Returns the error for an attribute that is missing."""
        cls = type(self).__name__
        problem = f"{cls!r} object has no attribute {name!r}"
        if "_unsaved" not in vars(self):
            problem = (
                f"`__init__` of {cls} must call `super().__init__(initial_loss_scale)`"
                ", which makes the variables of every loss scale, got no such call: "
                f"{problem}. Without an initial loss scale, call `super().__init__()`."
            )
        return AttributeError(problem)

    def __setattr__(self, name: str, value: Any) -> None:
        # Steps would go on with the variable that was here, also those of functions
        # that are traced already. A subclass may put another variable in its place.
        held = vars(self).get(name, getattr(type(self), name, None))
        if isinstance(held, property) and held.fset is None:
            held = getattr(self, name, None)
        kinds = (numbers.Number, np.ndarray, np.generic, list, tuple)
        is_value = isinstance(value, kinds) or tf.is_tensor(value)
        if isinstance(held, tf.Variable) and is_value and not hasattr(value, "assign"):
            raise AttributeError(
                f"`{name}` must be set by its method `assign`, got {shown(value)} for "
                f"the attribute. Write loss_scale.{name}.assign({shown(value)})."
            )
        super().__setattr__(name, value)
        if name == "loss_scale" and "_unsaved" in vars(self):
            held = self._held()
            if held is not None:
                self._hold(held)

    def _hold(self, held: LossScale) -> None:
        """Has what the loss scale needs that it holds, or raises."""
        if not self._overridden & {
            "update",
            "adjust",
            "_adjust",
        } and not takes_the_flag(held):
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
          A dictionary of new values by the names of the variables. Variables that are
          not in it keep their values.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement `next_state(state, is_finite)`, or "
            "override the whole `update(grads)`."
        )

    def _adjust(self, is_finite: Flag, largest: Optional[Scalar] = None) -> Any:
        """Is the `super()._adjust` of a class that was written for 2.x.

        Such a class overrides it in the place of `next_state`: it assigns, and returns
        what a graph must run, or None.
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
        """Returns a new loss scale, given what `get_config` of another one returned.

        It begins in its initial state: a config does not hold the state.
        """
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
        is_finite = one_element("is_finite", is_finite, "a bool")
        if self.last_largest is not None and largest is not None:
            given, largest = largest, one_element("largest", largest, "a number")
            is_float32 = largest.dtype == tf.float32
            wide = largest if is_float32 else tf.cast(largest, tf.float64)
            # Infinity as a constant would stop a run that looks for infinities.
            is_magnitude = tf.logical_and(wide >= 0.0, wide <= wide.dtype.max)
            if mode.current().knows_values and is_finite and not is_magnitude:
                raise ValueError(
                    "`largest` must be a finite number from 0 on if the gradients were "
                    f"finite, got {shown(given)}. If not, pass is_finite=False."
                )
            is_finite = tf.logical_and(is_finite, is_magnitude)
            largest = tf.cast(tf.minimum(wide, tf.float32.max), tf.float32)
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
        own: Any = [cls for cls in type(self).__mro__ if "_judge" in vars(cls)][:-1]
        judge = super(own[-1], self).judge if own else self.judge
        return judge(State(self), is_finite, largest)

    @do_not_convert
    def scale(self, loss: Tensor) -> Any:
        """Returns `loss` times the loss scale.

        Args:
          loss: A tensor of any shape. float16 and bfloat16 are cast to float32 first,
            since float16 ends at 65504.

        Returns:
          A tensor of `loss`'s shape, `float32`, or of `loss`'s dtype if that is wider.
        """
        return scale_for(self, loss, owner=None)

    @do_not_convert
    def scale_by(self, loss: Tensor, loss_scale: Any) -> Any:
        """Like `scale`, but multiplies by `loss_scale`, a value taken from this before.

        That is what `loss_scale()` returned: the loss and a metric can have the same.
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

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        # Private to TensorFlow, which calls it with each name that a checkpoint holds
        # for this object, before it sets any variable. What older checkpoints do not
        # hold begins at 0 then. Without this method it would keep its value, if such a
        # checkpoint is read into a loss scale that was used before.
        if name in ("skipped_steps", "current_loss_scale"):
            self._forget_ignored()
        return super()._lookup_dependency(name, *args)

    def _forget_ignored(self) -> None:
        """Sets to 0 what files of 3.0.0 and older do not hold."""
        if not mode.current().knows_values:
            return
        if self.ignored_loss_steps is not None:
            self.ignored_loss_steps.assign(0)
        if self._observer is not None:
            self._observer.note_restored()

    def __float__(self) -> float:
        number = self._to_show()
        if self._observer is not None:
            self._observer.note_float()
        return number

    def _add_weight(self, name: str, initial_value: Any, dtype: Any = None) -> Any:
        """Returns a new variable, checkpointed as `name`. Assign it to an attribute.

        It has TensorFlow's name, so that subclasses of its LossScale work here, too.
        """
        variable = replicas.new_variable(self._prefix + name, initial_value, dtype)
        self._track_trackable(variable, name)
        return variable

    def __repr__(self) -> str:
        state, config = {}, dict(self.get_config())
        for name, value in vars(self).items():
            is_scalar = isinstance(value, tf.Variable) and not value.shape.rank
            if is_scalar and mode.current().knows_values:
                state[name] = value.numpy()
            elif name in config and isinstance(value, tf.Module):
                config[name] = value  # a loss scale within shows its own state
        listed = ", ".join(f"{k}={value}" for k, value in {**state, **config}.items())
        return f"{type(self).__name__}({listed})"


# What optimizers and monitors ask of a loss scale, and programs do not.


def observer_of(loss_scale: LossScale, make: Callable[[LossScale], Any]) -> Any:
    """Returns the observer of a loss scale, one for all optimizers that share it."""
    if loss_scale._observer is None:
        loss_scale._observer = make(loss_scale)
    return loss_scale._observer


def scale_for(loss_scale: LossScale, loss: Tensor, owner: Any) -> Any:
    """Returns what `scale` does, for an optimizer, the `owner` of the loss.

    None: for a program that calls `scale` itself.
    """
    value, observer = loss_scale._value(), loss_scale._observer
    if owner is not None and "scale" in loss_scale._overridden:
        product = Product(loss, value, None, loss_scale.scale(loss))
    elif "scale_by" in loss_scale._overridden:
        product = Product(loss, value, None, loss_scale.scale_by(loss, value))
    else:
        wide = arithmetic.widened(loss)
        factor = tf.cast(value, wide.dtype)
        product = Product(loss, value, factor, arithmetic.multiply(wide, factor))
    loss_scale.__dict__.update(has_scaled=True)
    if observer is not None:
        observer.note_loss(product, owner)
    return product.product


def value_of(loss_scale: LossScale) -> Scalar:
    """Returns the current loss scale, a `float32` tensor, and reports no read."""
    return loss_scale._value()


def shown_value(loss_scale: LossScale) -> float:
    """Returns the current loss scale for display. Compute nothing with it."""
    return loss_scale._to_show()


def can_change(loss_scale: LossScale) -> bool:
    """Tells whether a step can change the value."""
    is_its_own = type(loss_scale)._value is not LossScale._value
    return (loss_scale if is_its_own else unguarded(loss_scale))._can_change


def was_used(loss_scale: LossScale) -> bool:
    """Tells whether anybody has scaled a loss by it, or read it as a tensor."""
    return loss_scale.has_scaled or loss_scale.has_been_read


def takes_the_flag(loss_scale: LossScale) -> bool:
    """Tells whether it is adjusted by the flag, not in an `update` of its own."""
    return "update" not in loss_scale._overridden


def unguarded(loss_scale: LossScale) -> LossScale:
    """Returns the innermost loss scale of the chain: itself if it holds none."""
    innermost: LossScale = chain(loss_scale)[-1]
    return innermost


def guard_of(loss_scale: LossScale) -> Any:
    """Returns the loss scale itself or the one that it holds that is a `SpikeGuard`.

    None if there is none.
    """
    return next((each for each in chain(loss_scale) if each.skips_spikes), None)
