"""LossScaleOptimizer: what the wrappers of all Kerases have in common."""

from __future__ import annotations

import warnings
from typing import Any, Callable, List, Optional

import tensorflow as tf

from lossscale import arguments
from lossscale.optimizer import sharing, wrappers
from lossscale.optimizer.advice import NEVER_SCALED, LossScaleWarning
from lossscale.optimizer.config import Configurable
from lossscale.optimizer.fault_record import Entry, FaultRecord, NonfiniteGradient
from lossscale.optimizer.forwarding import RefusesInnerSettings
from lossscale.optimizer.progress import Progress, Step
from lossscale.optimizer.step import apply_or_skip
from lossscale.optimizer.unscaling import unscale_and_check
from lossscale.runtime import replicas
from lossscale.runtime.autograph import do_not_convert
from lossscale.runtime.mode import in_xla
from lossscale.scales import serialization
from lossscale.scales.base import LossScale


class LossScaleOptimizer(Configurable, RefusesInnerSettings):
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

    Where scaling and applying are traced by different `tf.function`s, the convention of
    the Keras at hand holds: Keras 3 unscales in `apply`, Keras 2 does not. An overflow
    that you clipped away is then not seen.

    Args:
      inner_optimizer: A Keras optimizer, not wrapped by another loss scale optimizer.
      loss_scale: Anything that `lossscale.get` takes but None: `"dynamic"`, a number,
        a `LossScale`, a `LossScaleManager` or a config. Optimizers may share one.
      name: The optimizer's name, a string.

    Raises:
      TypeError: An argument has the wrong type, or `inner_optimizer` belongs to Keras 3
        on another backend than TensorFlow.
      ValueError: `inner_optimizer` is wrapped already, `loss_scale` is out of range, or
        the strategy is a TPUStrategy.

    Source: names and meaning of Keras 2's and Keras 3's `LossScaleOptimizer` (tf_keras
    2.21 `src/mixed_precision/loss_scale_optimizer.py`, Keras 3.15
    `src/optimizers/loss_scale_optimizer.py`); how far a step has come,
    PyTorch `torch/amp/grad_scaler.py`.
    """

    #: Whether this Keras's own wrapper unscales in `apply_gradients`.
    _unscales_in_apply: bool
    #: What this Keras wants in no name.
    _not_in_names: str = ""
    #: The optimizer that is wrapped. Not a property here: Keras 3 tracks it.
    inner_optimizer: Any
    iterations: Any

    _loss_scale: LossScale
    _progress: Progress
    _fault_record: FaultRecord

    def __new__(cls, inner_optimizer: Any = None, *_: Any, **__: Any) -> Any:
        """Picks the wrapper for the Keras that `inner_optimizer` belongs to."""
        # Copying calls it without arguments, on a wrapper of one Keras.
        is_front = cls._is_front()
        return super().__new__(
            wrappers.for_optimizer(inner_optimizer) if is_front else cls
        )

    @classmethod
    def _is_front(cls) -> bool:
        return cls is LossScaleOptimizer

    @classmethod
    def _checked(cls, inner_optimizer: Any, loss_scale: Any, name: Any) -> LossScale:
        """Returns the `LossScale` that `loss_scale` means. All arguments are valid."""
        wrappers.check_inner(inner_optimizer, cls)
        arguments.optional(arguments.text, "name", name, without=cls._not_in_names)
        _refuse_tpu()
        found = serialization.get(loss_scale)
        if found is None:
            raise TypeError(
                "`loss_scale` must not be None. Use the inner optimizer as it is, or "
                "pass loss_scale=1."
            )
        return found

    def _attach(self, loss_scale: LossScale) -> None:
        # Past Keras's __setattr__, which would track these under names of its own.
        object.__setattr__(self, "_loss_scale", loss_scale)
        object.__setattr__(self, "_progress", Progress())
        object.__setattr__(self, "_fault_record", FaultRecord())
        sharing.share(loss_scale, self)

    @property
    def loss_scale(self) -> LossScale:
        """The `LossScale`. It converts to its current value as a tensor."""
        return self._loss_scale

    @do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Returns `loss` times the loss scale, and begins a step.

        Args:
          loss: A tensor of any shape, or a function that returns one.

        Returns:
          A tensor, `float32` or wider, or a function that returns one.
        """
        if callable(loss):
            return lambda: self.scale_loss(loss())
        loss_scale = self._loss_scale()
        self._progress.note_scaled(loss, loss_scale)
        return self._loss_scale.scale_by(loss, loss_scale)

    def get_scaled_loss(self, loss: Any) -> Any:
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
        step = self._step_of_gradients() or self._progress.follow(
            None, self._loss_scale()
        )
        if any(grad is not None and step.has_handed_out([grad]) for grad in grads):
            raise ValueError(
                "`grads` must be gradients of the scaled loss, got one that "
                "get_unscaled_gradients returned already. Unscale each gradient once."
            )
        unscaled, check = unscale_and_check(self._loss_scale, grads, step.loss_scale)
        # Kept only where dividing them once more is faster: they take memory.
        kept = grads if in_xla() else [None] * len(grads)
        step.note_unscaled(unscaled, check, kept)
        return unscaled

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

    def _apply_or_skip(
        self,
        grads: List[Any],
        variables: Any,
        apply: Callable[..., Any],
        aggregates: bool = True,
    ) -> Any:
        """Unscales `grads` if that is still to be done, and applies or skips them."""
        self._warn_if_never_scaled()
        step = self._step_of_gradients()
        divisor, earlier, is_checked = None, None, False
        if self._must_unscale(step):
            divisor = self._loss_scale() if step is None else step.loss_scale
        if step is not None:
            earlier, is_checked = step.check_of(grads), step.has_handed_out(grads)
            if is_checked:
                grads, divisor = step.before_unscaling(grads) or (grads, divisor)
            step.note_applied()
        return apply_or_skip(
            self,
            self._loss_scale,
            grads,
            variables,
            apply,
            divisor=divisor,
            earlier=earlier,
            is_checked=is_checked,
            aggregates=aggregates,
            entry=self._fault_entry(self._trained(variables)),
            losses=[] if step is None else step.losses,
        )

    def _fault_entry(self, variables: List[Any]) -> Optional[Entry]:
        """Returns where the faults of variables go. Called when it is built, too."""
        checks = self._loss_scale.checks_gradients
        return self._fault_record.entry_of(variables) if checks else None

    def _trained(self, variables: Any) -> List[Any]:
        """Returns the variables that the gradients handed in belong to."""
        return list(variables)

    def _check_context(self) -> None:
        """Raises where gradients cannot be applied."""
        _refuse_tpu()
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                "apply_gradients must be called in replica context, got a call in "
                "cross-replica context. Call it within strategy.run."
            )

    def _step_of_gradients(self) -> Optional[Step]:
        """Returns the step that gradients belong to which are handed in now.

        If the loss scale is shared, another optimizer may have scaled their loss.
        """
        own = self._progress.current()
        if own is not None and not own.applied:
            return own
        latest = sharing.latest_step(self._loss_scale)
        if latest is None or (own is not None and own.number >= latest.number):
            return own
        return self._progress.follow(latest, None)

    def _current_step(self) -> Optional[Step]:
        """Returns this optimizer's own step on this replica, None without one here."""
        return self._progress.current()

    def _must_unscale(self, step: Optional[Step]) -> bool:
        if step is not None:
            return not step.unscaled
        # Scaled in another trace, if at all.
        return self._unscales_in_apply and self._loss_scale.has_scaled

    def _warn_if_never_scaled(self) -> None:
        if not self._loss_scale.has_scaled and not self._progress.has_warned:
            self._progress.has_warned = True
            warnings.warn(NEVER_SCALED, LossScaleWarning, stacklevel=4)


def _refuse_tpu() -> None:
    # Keras 2 refuses too, Keras 3 does not. Nobody has seen it work there.
    if replicas.on_tpu():
        raise ValueError(
            "`LossScaleOptimizer` must not be used with TPUStrategy: TPUs compute in "
            "bfloat16, which needs no loss scale. Use the inner optimizer as it is."
        )
