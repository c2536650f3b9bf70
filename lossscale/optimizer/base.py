"""LossScaleOptimizer: what the wrappers of all Kerases have in common."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from lossscale import arguments
from lossscale.optimizer import keras_arguments, overwriting, wrappers
from lossscale.optimizer.config import Configurable
from lossscale.optimizer.fault_record import Entry, FaultRecord, NonfiniteGradient
from lossscale.optimizer.forwarding import KerasNames, RefusesInnerSettings
from lossscale.optimizer.provenance.resolve import Provenance
from lossscale.optimizer.spike_record import Spike
from lossscale.optimizer.step.aggregation import aggregated
from lossscale.optimizer.step.step import Step
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Grad, Grads, Tensor, Variable
from lossscale.runtime.autograph import do_not_convert
from lossscale.scales.base import LossScale


class LossScaleOptimizer(Configurable, KerasNames, RefusesInnerSettings):
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
      **kwargs: What else Keras 3's wrapper takes, as `clipnorm`, at its default only.

    By position the arguments may also be in Keras 2's order, as in `(optimizer, True)`
    or `(optimizer, False, 1024)`, or two numbers in Keras 3's:
    `(optimizer, 1024.0, 2000)`. A number alone is a fixed `loss_scale`.

    Raises:
      TypeError: An argument has the wrong type, both `loss_scale` and one of the three
        that stand in its place are given, or `inner_optimizer` belongs to Keras 3 on
        another backend than TensorFlow.
      ValueError: `inner_optimizer` is wrapped already, an argument is out of range, or
        the strategy is a TPUStrategy.

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
        self._wrap(inner_optimizer, *self._checked(inner_optimizer, given))

    def _wrap(
        self, inner_optimizer: Any, loss_scale: LossScale, name: Optional[str]
    ) -> None:
        """Constructs Keras's part of the wrapper. All arguments are valid."""
        raise NotImplementedError

    @classmethod
    def _checked(
        cls, inner_optimizer: Any, given: Dict[str, Any]
    ) -> Tuple[LossScale, Optional[str]]:
        """Returns the `LossScale` and the name that valid arguments mean."""
        wrappers.check_inner(inner_optimizer, cls)
        ours = keras_arguments.as_ours(given)
        name = ours["name"]
        arguments.optional(arguments.text, "name", name, without=cls._not_in_names)
        replicas.refuse_tpu()
        return keras_arguments.loss_scale_in(ours), name

    def _attach(self, loss_scale: LossScale) -> None:
        # Past Keras's __setattr__, which would track these under names of its own.
        object.__setattr__(self, "_loss_scale", loss_scale)
        provenance = Provenance(loss_scale, self._unscales_in_apply)
        object.__setattr__(self, "_provenance", provenance)
        object.__setattr__(self, "_fault_record", FaultRecord())

    def __repr__(self) -> str:
        inner = getattr(self, "inner_optimizer", None)
        loss_scale = getattr(self, "_loss_scale", None)
        return f"LossScaleOptimizer({type(inner).__name__}, {loss_scale!r})"

    @property
    def loss_scale(self) -> LossScale:
        """The `LossScale`. Where a number is expected it is its current value."""
        return self._loss_scale

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

    def get_scaled_loss(self, loss: Tensor) -> Any:
        """Like `scale_loss`. Keras 2's name."""
        return self.scale_loss(loss)

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

    def nonfinite_gradients(self) -> List[NonfiniteGradient]:
        """Returns the gradients that were not finite at the last skipped step.

        On any replica, in this process, as they were before anybody clipped them. Reads
        the device: call it on the host, between steps.

        Returns:
          A list of `NonfiniteGradient`. Empty if no step was skipped, or if it is not
          known: a loss scale that decides by itself, a `tf.compat.v1` graph, an
          overflow that was clipped away.
        """
        return self._fault_record.gradients()

    def nonfinite_loss(self) -> Optional[str]:
        """Returns how the unscaled loss of the last skipped step was not finite.

        If it was not, no loss scale helps. Read it as `nonfinite_gradients`.

        Returns:
          `"inf"` or `"nan"`. None if it was finite, or is not known: the loss was
          scaled in another `tf.function` than the gradients were applied in.
        """
        return self._fault_record.loss()

    def last_spike(self) -> Optional[Spike]:
        """Returns the last step that a `SpikeGuard` skipped for its size.

        In this process. Read it as `nonfinite_gradients`.

        Returns:
          A `Spike`: `name`, `largest`, `limit` and `variable`. None if there was none.
        """
        return self._fault_record.spike()

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
          aggregates: Whether it adds them up across replicas.
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
        entry = self._fault_entry(variables)
        step = Step(self._provenance, aggregates, entry)
        return step.run(bundle, lambda grads: apply(grads, variables))

    def _trains(self, variables: List[Variable]) -> None:
        """Notes what is trained, when that is built: weights may be read before a step.

        What keeps their faults is made here, too, outside of any graph.
        """
        self._note_trained(variables)
        self._fault_entry(variables)

    def _fault_entry(self, variables: List[Variable]) -> Optional[Entry]:
        """Returns where the faults of variables go."""
        checks = self._loss_scale.checks_gradients
        spikes = self._loss_scale.skips_spikes
        return self._fault_record.entry_of(variables, spikes) if checks else None

    def _note_trained(self, variables: List[Variable]) -> None:
        """Notes the variables that hold weights: those that are overwritten do not."""
        weights = [v for v in variables if not overwriting.is_overwritten(v)]
        self._provenance.note_trained(weights)

    def _check_context(self) -> None:
        """Raises where gradients cannot be applied."""
        replicas.check_can_apply()
