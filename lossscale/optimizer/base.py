"""LossScaleOptimizer: what the wrappers of all Kerases have in common."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from lossscale import arguments
from lossscale.optimizer import keras_arguments, overwriting, wrappers
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
from lossscale.runtime.aliases import Grad, Grads, Tensor, Variable
from lossscale.runtime.autograph import do_not_convert
from lossscale.scales.base import LossScale


class LossScaleOptimizer(Configurable, KerasNames, RefusesInnerSettings, Reports):
    """An optimizer that scales the loss and skips the steps that overflowed.

    Wraps an optimizer of Keras 2 or Keras 3. Pass it to `model.compile`; under
    `mixed_float16` Keras does not wrap it again:

    ```
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
    model.compile(optimizer, loss="mse")
    ```

    In a custom loop scale the loss, and apply. To see or clip the true gradients,
    unscale them first. Either loop runs on either Keras:

    ```
    with tf.GradientTape() as tape:
        loss = ...
        scaled_loss = optimizer.scale_loss(loss)
    grads = tape.gradient(scaled_loss, variables)
    grads = optimizer.get_unscaled_gradients(grads)       # optional
    grads, _ = tf.clip_by_global_norm(grads, 1.0)         # only after the line above
    optimizer.apply_gradients(zip(grads, variables))
    ```

    A step is applied only if its gradients were finite on every replica before they
    could be clipped, and still are when they have been added up. Else nothing changes
    on any replica, `iterations` neither, but the state of the loss scale.

    Whether gradients are still scaled is known by a unit: gradients of a scaled loss
    have it, what is divided by the loss scale has not, and each operation hands it on.
    Of what went through NumPy, or came in as an argument of a `tf.function`, nothing is
    known: the convention of the Keras at hand holds, Keras 3 unscales in `apply`,
    Keras 2 does not, and a `LossScaleWarning` says so unless the program kept to it
    before.

    Args:
      inner_optimizer: A Keras optimizer, not wrapped by another loss scale optimizer.
      loss_scale: Anything that `lossscale.get` takes but None: `"dynamic"`, a number,
        a `LossScale`, a `LossScaleManager` or a config. Optimizers may share one.
      name: The optimizer's name, a string.
      dynamic: As in Keras 2, in place of `loss_scale`: True for a `DynamicLossScale`,
        False for `FixedLossScale(initial_scale)`.
      initial_scale: As in both Kerases: what the loss scale begins with, `2.0**15` by
        default. With `dynamic=False` it must be given.
      dynamic_growth_steps: As in both Kerases: after how many finite steps in a row the
        loss scale is doubled, 2000 by default.
      communication_dtype: What gradients cross in between replicas, while they are
        still scaled: `"float16"` or `"bfloat16"`, half the bytes. They are added up in
        it, then unscaled in float32. None: in their own dtype. On one replica it
        changes nothing.
      **kwargs: What else Keras 3's wrapper takes, as `clipnorm`, at its default only.

    By position the arguments may also be in Keras 2's order, as in `(optimizer, True)`
    or `(optimizer, False, 1024)`, or two numbers in Keras 3's:
    `(optimizer, 1024.0, 2000)`. A number alone is a fixed `loss_scale`.

    Raises:
      TypeError: An argument has the wrong type, both `loss_scale` and one of the three
        that stand in its place are given, or `inner_optimizer` belongs to Keras 3 on
        another backend than TensorFlow.
      ValueError: `inner_optimizer` is wrapped already, an argument is out of range, the
        strategy is a TPUStrategy, or `communication_dtype` is given where the inner
        optimizer adds gradients up in a way of its own, accumulates them (Keras 3), or
        the strategy is a ParameterServerStrategy.

    Source: names and meaning of Keras 2's and Keras 3's `LossScaleOptimizer` (tf_keras
    2.21 `src/mixed_precision/loss_scale_optimizer.py`, Keras 3.15
    `src/optimizers/loss_scale_optimizer.py`).
    """

    #: Whether this Keras's own wrapper unscales in `apply_gradients`.
    _unscales_in_apply: bool
    #: What this Keras wants in no name.
    _not_in_names: str = ""
    #: The optimizer that is wrapped. Not a property here: Keras 3 tracks it.
    inner_optimizer: Any
    iterations: Any

    _loss_scale: LossScale
    _provenance: Provenance
    _fault_record: FaultRecord

    __signature__ = wrappers.Signature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Picks the wrapper for the Keras that the inner optimizer belongs to."""
        if not wrappers.is_open(cls):  # one of a Keras: copying gives no arguments
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
        dtype = self._checked_communication(inner_optimizer, communication_dtype)
        # Past Keras's __setattr__, which works only once Keras's constructor has run.
        object.__setattr__(self, "_communication_dtype", dtype)
        self._wrap(inner_optimizer, *self._checked(given))

    def _wrap(
        self, inner_optimizer: Any, loss_scale: LossScale, name: Optional[str]
    ) -> None:
        """Constructs Keras's part of the wrapper. All arguments are valid."""
        raise NotImplementedError

    @classmethod
    def _checked(cls, given: Dict[str, Any]) -> Tuple[LossScale, Optional[str]]:
        """Returns the `LossScale` and the name that valid arguments mean."""
        ours = keras_arguments.as_ours(given)
        name = ours["name"]
        arguments.optional(arguments.text, "name", name, without=cls._not_in_names)
        replicas.refuse_tpu()
        return keras_arguments.loss_scale_in(ours), name

    @classmethod
    def _checked_communication(cls, inner_optimizer: Any, dtype: Any) -> Optional[str]:
        """Returns a valid `communication_dtype` that the inner optimizer allows."""
        found = communication.checked_dtype(dtype)
        if found is not None:
            way = cls._own_way_to_sum(inner_optimizer)
            communication.refuse_impossible(found, inner_optimizer, way)
        return found

    @classmethod
    def _own_way_to_sum(cls, inner_optimizer: Any) -> Optional[str]:
        """Says how an optimizer adds gradients up, if that cannot be done for it."""
        raise NotImplementedError

    def _attach(self, loss_scale: LossScale) -> None:
        # Past Keras's __setattr__, which would track these under names of its own.
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
        """The `LossScale`. Where a number is expected it is its current value."""
        return self._loss_scale

    @property
    def communication_dtype(self) -> Optional[str]:
        """What gradients cross in between replicas. None: in their own dtype."""
        return self._communication_dtype

    @property
    def applied_steps(self) -> Any:
        """How many steps were applied, of those that the loss scale counts.

        That is `iterations`, but under Keras 3's `gradient_accumulation_steps`: there
        each batch is a step of the loss scale, and `iterations` counts the updates that
        several make together. A variable or a tensor: read it with `.numpy()`.
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
    def get_unscaled_gradients(self, grads: Any) -> List[Any]:
        """Returns the true gradients, and remembers whether they were finite.

        They may be looked at and clipped. Several lists of gradients of one loss may be
        unscaled before they are applied.

        Args:
          grads: A list of gradients of the scaled loss. `None`s stay.

        Returns:
          A list of gradients, of the dtypes that came.

        Raises:
          ValueError: A gradient is one that this function returned already.
        """
        grads = list(grads)
        return self._provenance.unscale(grads)

    def _apply_or_skip(
        self,
        grads: Grads,
        variables: Any,
        apply: Callable[..., Any],
        aggregates: bool = True,
        aggregate: Optional[Callable[[List[Any]], Any]] = None,
        *,
        values: Sequence[Grad] = (),
    ) -> Any:
        """Applies `grads` to `variables`, or skips them on all replicas.

        Args:
          grads: This replica's gradients, scaled or not; some may be None.
          variables: What they are applied to.
          apply: Called as `apply(grads, variables)` with unscaled gradients.
          aggregates: Whether it adds them up across replicas, or this wrapper does.
          aggregate: What the user aggregates `(gradient, variable)` pairs with, in its
            place. It may communicate: it is called at every step, outside the branch.
          values: What float8 layers hand over in the place of some gradients, which are
            None then. If it is not finite, the step is skipped.

        Returns:
          In a graph, an op that does it all. None in eager mode.
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

    def _dtype_to_sum_in(self) -> Optional[str]:
        """Returns what the wrapper adds gradients up in. None: it does not add them."""
        dtype = self._communication_dtype
        # The inner optimizer may have been changed since.
        self._checked_communication(self.inner_optimizer, dtype)
        return dtype if replicas.count() > 1 else None

    def _trains(self, variables: List[Variable]) -> None:
        """Notes what is trained, when that is built: weights may be read before a step.

        What keeps their faults is made here, too, outside of any graph.
        """
        self._note_trained(variables)
        self._fault_entry(variables)

    def _note_trained(self, variables: List[Variable]) -> None:
        """Notes the variables that hold weights: those that are overwritten do not."""
        weights = [v for v in variables if not overwriting.is_overwritten(v)]
        self._provenance.note_trained(weights)

    def _check_context(self) -> None:
        """Raises where gradients cannot be applied."""
        replicas.check_can_apply()
