"""LossScaleOptimizer: what the wrappers of all Kerases have in common."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from lossscale import arguments
from lossscale.optimizer import keras_arguments, overwriting, wrappers
from lossscale.optimizer.communicating import Communicating
from lossscale.optimizer.config import Configurable
from lossscale.optimizer.fault_record import FaultRecord
from lossscale.optimizer.forwarding import KerasNames, RefusesInnerSettings
from lossscale.optimizer.provenance.resolve import Provenance
from lossscale.optimizer.reports import Reports
from lossscale.optimizer.step import communication
from lossscale.optimizer.step.aggregation import aggregated
from lossscale.optimizer.step.reduction import reduction_for
from lossscale.optimizer.step.step import Step
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Grad, Grads, Op, Results, Tensor, Variable
from lossscale.runtime.autograph import do_not_convert
from lossscale.scales.base import LossScale


class LossScaleOptimizer(
    Configurable, KerasNames, RefusesInnerSettings, Reports, Communicating
):
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

    The wrapper knows by a unit whether gradients are still scaled. Gradients of a
    scaled loss have this unit, gradients that were divided by the loss scale do not,
    and each operation passes the unit of its inputs on to its outputs. The wrapper
    cannot trace gradients that went through NumPy or came in as an argument of a
    `tf.function`. For these it follows the convention of your Keras: Keras 3 unscales
    in `apply_gradients`, Keras 2 does not. A `LossScaleWarning` says which of the two
    happened, unless your program kept to that convention before.

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
    _provenance: Provenance
    _fault_record: FaultRecord

    __signature__ = wrappers.Signature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Picks the wrapper for the Keras that the inner optimizer belongs to."""
        if not wrappers.is_open(cls):  # a Keras's wrapper; `copy` passes no arguments
            return super().__new__(cls)
        return super().__new__(wrappers.for_call(cls, LossScaleOptimizer, args, kwargs))

    def __init__(
        self,
        inner_optimizer: Any,
        loss_scale: Any = keras_arguments.DYNAMIC,
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
        ours = keras_arguments.as_ours(given)
        name = ours["name"]
        arguments.optional(arguments.text, "name", name, without=cls._not_in_names)
        replicas.refuse_tpu()
        return keras_arguments.loss_scale_in(ours), name

    def _attach(self, loss_scale: LossScale) -> None:
        # Keras's own __setattr__ would track these, under names that Keras makes up.
        object.__setattr__(self, "_loss_scale", loss_scale)
        provenance = Provenance(loss_scale, self._unscales_in_apply)
        object.__setattr__(self, "_provenance", provenance)
        object.__setattr__(self, "_fault_record", FaultRecord())

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
        return self._provenance.unscale(grads)

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
        bundle = self._provenance.resolve(grads)
        if any(value is not None for value in values):
            check = overwriting.check_of(values, grads)
            bundle = bundle.but(check=check & bundle.check)
        if aggregate is not None:
            bundle, variables = aggregated(bundle, variables, aggregate)
        dtype = self._dtype_to_sum_in()
        if dtype is not None:
            with self._provenance.history.values.ignoring():
                bundle = communication.summed(bundle, dtype)
        reduction = reduction_for(aggregates, dtype is not None)
        step = Step(self._provenance, reduction, self._fault_entry(variables))
        return step.run(bundle, lambda grads: apply(grads, variables))

    def _trains(self, variables: List[Variable]) -> None:
        """Notes the trained variables at build: weights may be read before a step.

        The record of their faults is made here, too, outside of any graph.
        """
        self._note_trained(variables)
        self._fault_entry(variables)

    def _note_trained(self, variables: List[Variable]) -> None:
        """Notes the weights: the variables that no float8 layer overwrites."""
        weights = [v for v in variables if not overwriting.is_overwritten(v)]
        self._provenance.note_trained(weights)

    def _check_context(self) -> None:
        """Raises if gradients cannot be applied here."""
        replicas.check_can_apply()
