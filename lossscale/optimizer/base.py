"""LossScaleOptimizer: what the wrappers of all Kerases have in common."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from lossscale import arguments as checks
from lossscale.optimizer import overwriting, wrappers
from lossscale.optimizer.arguments import (
    DYNAMIC,
    Configurable,
    as_ours,
    loss_scale_in,
)
from lossscale.optimizer.kinds import SCALED, Kind
from lossscale.optimizer.pending import Pending
from lossscale.optimizer.record import Entry, NonfiniteGradient, Record, Spike
from lossscale.optimizer.reduction import (
    InnerSum,
    checked_dtype,
    own_way_to_sum,
    reduction_for,
    refuse_impossible,
    refuse_unchecked,
    summed,
)
from lossscale.optimizer.step import Step, aggregated
from lossscale.runtime import callbacks, kerases, replicas
from lossscale.runtime.aliases import Grad, Grads, Op, Results, Tensor, Variable
from lossscale.runtime.autograph import do_not_convert
from lossscale.scales.base import LossScale


def forwarded(name: str) -> Any:
    """Returns a property that reads and sets the inner optimizer's attribute `name`."""

    def get_value(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def set_value(self: Any, value: Any) -> None:
        # Keras 3's constructor sets its defaults before `inner_optimizer` exists.
        if hasattr(self, "inner_optimizer"):
            setattr(self.inner_optimizer, name, value)

    return property(get_value, set_value, doc=f"The inner optimizer's `{name}`.")


def delegated(name: str) -> Callable[..., Any]:
    """Returns a method that calls the inner optimizer's method `name`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner_optimizer, name)(*args, **kwargs)

    call.__name__, call.__doc__ = name, f"Calls the inner optimizer's `{name}`."
    return call


def _answered(answer: Callable[[LossScale], Any], doc: str) -> Any:
    """Returns a property whose value `answer` reads from the loss scale."""

    def get_value(self: Any) -> Any:
        return answer(self._loss_scale)

    def refuse(self: Any, value: Any) -> None:
        # Keras 3's constructor sets its defaults before the loss scale exists.
        if hasattr(self, "_loss_scale"):
            raise AttributeError(
                "The loss scale's settings must be arguments of LossScaleOptimizer, "
                f"got {value!r} for an attribute. Write LossScaleOptimizer("
                "inner_optimizer, DynamicLossScale(...)). To set the value of an "
                "existing loss scale, write "
                "optimizer.loss_scale.current_loss_scale.assign(...)."
            )

    return property(get_value, refuse, doc=doc)


def _attribute(*names: str) -> Callable[[LossScale], Any]:
    """Returns a function that reads the first of these attributes that exists."""
    return lambda scale: next(
        (getattr(scale, n) for n in names if hasattr(scale, n)), None
    )


class LossScaleOptimizer(Configurable):
    """An optimizer that scales the loss and skips the steps that overflowed.

    It wraps an optimizer of Keras 2 or Keras 3. Pass the wrapper to `model.compile`.
    Under `mixed_float16`, Keras does not wrap it again:

    ```
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
    model.compile(optimizer, loss="mse")
    ```

    In a custom loop, scale the loss, then apply its gradients. To see or clip the true
    gradients, unscale them first. With or without that, the loop runs on both Kerases:

    ```
    with tf.GradientTape() as tape:
        loss = ...
        scaled_loss = optimizer.scale_loss(loss)
    grads = tape.gradient(scaled_loss, variables)
    grads = optimizer.get_unscaled_gradients(grads)       # optional
    grads, _ = tf.clip_by_global_norm(grads, 1.0)         # only after the line above
    optimizer.apply_gradients(zip(grads, variables))
    ```

    The wrapper applies a step only if the gradients were finite on every replica before
    you changed them, and are finite after the replicas' gradients were added up.
    Otherwise nothing changes on any replica, not even `iterations`; only the loss
    scale's own state moves.

    One sentence says when gradients are divided: `scale_loss` makes a division pending,
    `get_unscaled_gradients` does it, and `apply_gradients` does it if it is still
    pending. Unscale all gradients of a loss, or none, and let one of these functions
    divide them: a division by hand is seen only where no function, loop, branch or
    variable stands between it and `apply_gradients`.

    Args:
      inner_optimizer: A Keras optimizer that no other loss scale optimizer wraps.
      loss_scale: Anything but None that `lossscale.get` takes: `"dynamic"`, a number,
        a `LossScale`, a `LossScaleManager` or a config. Optimizers may share one.
      name: The optimizer's name, a string.
      dynamic: Keras 2's argument, in the place of `loss_scale`: True means a
        `DynamicLossScale`, False means `FixedLossScale(initial_scale)`.
      initial_scale: An argument of both Kerases: the first value of the loss scale,
        `2.0**15` by default. With `dynamic=False` you must give it.
      dynamic_growth_steps: An argument of both Kerases: the loss scale doubles after
        this many finite steps in a row, 2000 by default.
      communication_dtype: The dtype in which replicas exchange their gradients:
        `"float16"` or `"bfloat16"`, half the bytes of float32. The wrapper sums them in
        this dtype while they are still scaled, and unscales the sum in float32. None:
        each gradient keeps its own dtype. On one replica the dtype changes nothing.
      **kwargs: Keras 3's other arguments, such as `clipnorm`, at their defaults only.

    By position you may also give the arguments in Keras 2's order, as in
    `(optimizer, True)` or `(optimizer, False, 1024)`, or two numbers in Keras 3's
    order: `(optimizer, 1024.0, 2000)`. One number alone is a fixed `loss_scale`.

    Raises:
      TypeError: An argument has the wrong type; `loss_scale` came together with one of
        the three arguments that take its place; or `inner_optimizer` belongs to Keras 3
        on another backend than TensorFlow.
      ValueError: A loss scale optimizer wraps `inner_optimizer` already; an argument is
        out of range; the strategy is a TPUStrategy; or `communication_dtype` is given
        and the inner optimizer sums gradients in its own way or accumulates them
        (Keras 3), or the strategy is a ParameterServerStrategy.

    Source: names and meaning of Keras 2's and Keras 3's `LossScaleOptimizer` (tf_keras
    2.21 `src/mixed_precision/loss_scale_optimizer.py`, Keras 3.15
    `src/optimizers/loss_scale_optimizer.py`).
    """

    #: Whether this Keras's own wrapper unscales in `apply_gradients`.
    _unscales_in_apply: bool
    #: The characters that this Keras allows in no name.
    _not_in_names: str = ""
    #: The wrapped optimizer. An attribute and no property, so that Keras 3 tracks it.
    inner_optimizer: Any
    iterations: Any

    _loss_scale: LossScale
    _pending: Pending
    _record: Record
    _communication_dtype: Optional[str]
    _inner_sum: InnerSum
    #: The base class of the optimizers of this Keras.
    _optimizer_class: type
    #: The method in which these sum gradients over the replicas.
    _summing_method: str

    __signature__ = wrappers.Signature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Picks the wrapper for the Keras that the inner optimizer belongs to."""
        if not wrappers.is_open(cls):  # a Keras's wrapper; `copy` passes no arguments
            return super().__new__(cls)
        return super().__new__(wrappers.for_call(cls, LossScaleOptimizer, args, kwargs))

    def __init__(
        self,
        inner_optimizer: Any,
        loss_scale: Any = DYNAMIC,
        name: Optional[str] = None,
        dynamic_growth_steps: Optional[int] = None,
        *,
        dynamic: Optional[bool] = None,
        initial_scale: Optional[float] = None,
        communication_dtype: Optional[str] = None,
        **kwargs: Any,
    ) -> None:
        given = {
            "loss_scale": loss_scale,
            "name": name,
            "dynamic_growth_steps": dynamic_growth_steps,
            "dynamic": dynamic,
            "initial_scale": initial_scale,
            **kwargs,
        }
        wrappers.check_inner(inner_optimizer, type(self))
        self._communicate_in(communication_dtype, inner_optimizer)
        self._wrap(inner_optimizer, *self._checked(given))
        self._leave_out_inner_sum(self._loss_scale)

    def _wrap(
        self, inner_optimizer: Any, loss_scale: LossScale, name: Optional[str]
    ) -> None:
        """Constructs Keras's part of the wrapper. The arguments have been checked."""
        raise NotImplementedError

    @classmethod
    def _checked(cls, given: Dict[str, Any]) -> Tuple[LossScale, Optional[str]]:
        """Checks arguments, and returns the `LossScale` and the name that they mean."""
        ours = as_ours(given)
        name = ours["name"]
        checks.optional(checks.text, "name", name, without=cls._not_in_names)
        replicas.refuse_tpu()
        return loss_scale_in(ours), name

    def _attach(self, loss_scale: LossScale) -> None:
        # Keras's own __setattr__ would track these, under names that Keras makes up.
        object.__setattr__(self, "_loss_scale", loss_scale)
        pending = Pending(loss_scale, self._unscales_in_apply)
        object.__setattr__(self, "_pending", pending)
        object.__setattr__(self, "_record", Record(pending.kept()))

    def __repr__(self) -> str:
        inner = getattr(self, "inner_optimizer", None)
        loss_scale = getattr(self, "_loss_scale", None)
        dtype = getattr(self, "_communication_dtype", None)
        more = f", communication_dtype={dtype!r}" if dtype is not None else ""
        return f"LossScaleOptimizer({type(inner).__name__}, {loss_scale!r}{more})"

    @property
    def loss_scale(self) -> LossScale:
        """The `LossScale`. Where a number is expected, it acts as its current value."""
        return self._loss_scale

    @property
    def applied_steps(self) -> Any:
        """How many of the steps that the loss scale counts were applied.

        This is `iterations`, except under Keras 3's `gradient_accumulation_steps`. Then
        each batch is a step of the loss scale, several batches make one update, and
        `iterations` counts updates. A variable or a tensor: read it with `.numpy()`.
        """
        return self.iterations

    @do_not_convert
    def scale_loss(self, loss: Tensor) -> Any:
        """Returns `loss` times the loss scale, and begins a step.

        Args:
          loss: A tensor of any shape, or a function that returns one.

        Returns:
          A tensor, `float32` or wider, or a function that returns one.
        """
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self._loss_scale.scale(loss)

    @do_not_convert
    def get_unscaled_gradients(self, grads: Iterable[Grad]) -> Grads:
        """Returns the true gradients, and remembers whether they were finite.

        You may look at them and clip them. You may unscale several lists of gradients
        of one loss before you apply them.

        Args:
          grads: A list of gradients of the scaled loss. `None`s stay.

        Returns:
          A list of gradients. Each has the dtype of its scaled gradient.

        Raises:
          ValueError: This function returned one of these gradients earlier.
        """
        grads = list(grads)
        return self._pending.unscale(grads)

    def get_scaled_loss(self, loss: Tensor) -> Any:
        """Like `scale_loss`. Keras 2's name."""
        return self.scale_loss(loss)

    def nonfinite_gradients(self) -> List[NonfiniteGradient]:
        """Returns the gradients that were not finite at the last skipped step.

        It covers all replicas of this process, and the gradients as they were before
        you clipped them. With `communication_dtype` it covers their sum as well. It
        reads the device, so call it on the host, between steps.

        Returns:
          A list of `NonfiniteGradient`. The list is empty if no step was skipped, or if
          nothing is known: the loss scale decides by itself, the graph is a
          `tf.compat.v1` graph, or the overflow was clipped away.
        """
        return self._record.gradients()

    def nonfinite_loss(self) -> Optional[str]:
        """Returns whether the unscaled loss of the last skipped step was inf or NaN.

        If it was, no loss scale helps. Call this where you would call
        `nonfinite_gradients`.

        Returns:
          `"inf"` or `"nan"`. None if the loss was finite, or if it is not known, since
          one `tf.function` scaled the loss and another one applied the gradients.
        """
        return self._record.loss()

    def last_spike(self) -> Optional[Spike]:
        """Returns the last spike: a step that a `SpikeGuard` skipped for its size.

        It covers this process. Call this where you would call `nonfinite_gradients`.

        Returns:
          A `Spike` with `name`, `largest`, `limit` and `variable`. None if no step was
          skipped for its size.
        """
        return self._record.spike()

    def _fault_entry(self, variables: List[Variable]) -> Optional[Entry]:
        """Returns the record for the faults of these variables. None: not checked."""
        checks = self._loss_scale.checks_gradients
        spikes = self._loss_scale.skips_spikes
        return self._record.entry_of(variables, spikes) if checks else None

    dynamic = _answered(
        lambda scale: scale._can_change,
        "Whether the loss scale can change.",
    )
    initial_scale = _answered(
        _attribute("initial_loss_scale", "loss_scale_value"),
        "The loss scale's initial value, None if the loss scale has no such attribute.",
    )
    dynamic_growth_steps = _answered(
        _attribute("increment_period"),
        "After how many finite steps the loss scale grows, None without such a rule.",
    )
    dynamic_counter = _answered(
        _attribute("good_steps"),
        "The variable that counts finite steps in a row, None if there is none.",
    )
    step_counter = _answered(
        _attribute("good_steps"), "Keras 3's name of `dynamic_counter`."
    )
    dynamic_scale = _answered(
        _attribute("current_loss_scale"),
        "The variable that holds the loss scale, None if there is none.",
    )

    def __setattr__(self, name: str, value: Any) -> None:
        inner = getattr(self, "inner_optimizer", None)
        # Ask the class first: reading a legacy optimizer's `iterations` creates it.
        is_ours = name.startswith("_") or hasattr(type(self), name)
        is_ours = is_ours or hasattr(self, name)
        if not is_ours and hasattr(inner, name):
            raise AttributeError(
                f"`{name}` must be set on the inner optimizer, got {value!r} for the "
                f"wrapper. Write optimizer.inner_optimizer.{name} = ..."
            )
        super().__setattr__(name, value)

    @property
    def communication_dtype(self) -> Optional[str]:
        """The dtype in which replicas exchange gradients. None: the gradients' own."""
        return self._communication_dtype

    def _communicate_in(self, dtype: Any, inner_optimizer: Any) -> None:
        """Sets `communication_dtype`. Raises if the inner optimizer rules it out."""
        found = checked_dtype(dtype)
        self._refuse_to_sum(found, inner_optimizer)
        # Keras's own __setattr__ works only after Keras's constructor has run.
        object.__setattr__(self, "_communication_dtype", found)

    def _leave_out_inner_sum(self, loss_scale: LossScale) -> None:
        """Keeps the inner optimizer from summing gradients that the wrapper sums.

        Raises:
          ValueError: The loss scale checks no gradients, and their sum may overflow.
        """
        dtype, inner = self._communication_dtype, self.inner_optimizer
        refuse_unchecked(dtype, loss_scale)
        inner_sum = InnerSum(inner, self._summing_method, dtype is not None)
        object.__setattr__(self, "_inner_sum", inner_sum)

    def _dtype_to_sum_in(self) -> Optional[str]:
        """Returns the dtype in which the wrapper sums. None: it does not sum."""
        # The inner optimizer may have been changed since the wrapper was made.
        self._refuse_to_sum(self._communication_dtype, self.inner_optimizer)
        return self._communication_dtype if replicas.count() > 1 else None

    def _refuse_to_sum(self, dtype: Optional[str], inner_optimizer: Any) -> None:
        if dtype is not None:
            way = self._own_way_to_sum(inner_optimizer)
            refuse_impossible(dtype, inner_optimizer, way)

    @classmethod
    def _own_way_to_sum(cls, inner_optimizer: Any) -> Optional[str]:
        """Says how an optimizer sums gradients itself. None: the wrapper can do it."""
        return own_way_to_sum(
            inner_optimizer, cls._optimizer_class, cls._summing_method
        )

    def _apply_or_skip(
        self,
        grads: Grads,
        variables: List[Variable],
        apply: Callable[[Grads, List[Variable]], Results],
        aggregates: bool = True,
        aggregate: Optional[Callable[[List[Any]], Any]] = None,
        *,
        values: Sequence[Grad] = (),
    ) -> Op:
        """Applies `grads` to `variables`, or skips them on all replicas.

        Args:
          grads: This replica's gradients, scaled or not; some may be None.
          variables: The variables that `grads` belong to.
          apply: Called as `apply(grads, variables)` with unscaled gradients.
          aggregates: Whether `apply` or this wrapper sums `grads` across replicas.
          aggregate: The user's function that sums `(gradient, variable)` pairs instead.
            It may communicate, so it is called at every step, outside of the branch.
          values: New values that float8 layers pass instead of some gradients, which
            are None in `grads`. If a value is not finite, the step is skipped.

        Returns:
          In a graph, an op that does the whole step. None in eager mode.
        """
        self._note_trained(variables)
        bundle = self._pending.resolve(grads)
        if any(value is not None for value in values):
            check = overwriting.check_of(values, grads)
            bundle = bundle.but(check=check & bundle.check)
        if aggregate is not None:
            bundle, variables = aggregated(bundle, variables, aggregate)
        dtype = self._dtype_to_sum_in()
        if dtype is not None:
            with callbacks.paused():
                bundle = summed(bundle, dtype)
        reduction = reduction_for(aggregates, dtype is not None)
        step = Step(self._pending, reduction, self._fault_entry(variables))
        return step.run(bundle, lambda grads: apply(grads, variables))

    def _trains(self, variables: List[Variable]) -> None:
        """Notes the trained variables at build: weights may be read before a step.

        The record of their faults is made here, too, outside of any graph.
        """
        self._note_trained(variables)
        self._fault_entry(variables)

    def _note_trained(self, variables: List[Variable]) -> None:
        """Notes what trained variables hold."""
        kinds = self._pending.observer.kinds
        scaled = [v for v in variables if overwriting.holds_scaled(v)]
        weights = [v for v in variables if not overwriting.is_overwritten(v)]
        kinds.note_variables(map(kerases.tensor_of, scaled), Kind(SCALED))
        kinds.note_variables(map(kerases.tensor_of, weights))

    def _check_context(self) -> None:
        """Raises if gradients cannot be applied here."""
        replicas.check_can_apply()


class CallableList(List[Any]):
    """A list that can be called, since `variables` was a method in older versions."""

    def __call__(self) -> List[Any]:
        return self
