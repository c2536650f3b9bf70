"""What the wrappers of both generations of Keras 2's optimizers have in common."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Callable, Dict, List, Optional

from lossscale.optimizer import wrappers
from lossscale.optimizer.base import LossScaleOptimizer
from lossscale.optimizer.step import communication
from lossscale.runtime import kerases, mode
from lossscale.runtime.aliases import Grads, Variable
from lossscale.scales.base import LossScale

#: What files of lossscale 0.1.0 do not hold. It comes last where files know no names.
SINCE_0_1_0 = {"consecutive_skipped_steps"}


#: What our wrapper and Keras's own track.
_TRACKED = ("base_optimizer", "loss_scale", "faults")


class Keras2Base(LossScaleOptimizer):
    """Knows Keras 2, and neither of the two generations."""

    _unscales_in_apply = False
    #: The module that defines Keras's own wrappers.
    _keras_module: Any
    _keras: Any
    _is_legacy: bool
    #: The base class of the optimizers that it wraps.
    _optimizer_class: type
    _own_name: str
    _track_trackable: Any
    _create_all_weights: Any

    def _wrap(self, inner_optimizer: Any, loss_scale: LossScale, name: Any) -> None:
        # Fixed, Keras's constructor checks its arguments and creates no state.
        construct: Any = super(LossScaleOptimizer, self).__init__
        construct(inner_optimizer, dynamic=False, initial_scale=1.0)
        self._attach(loss_scale)
        wrappers.mark(inner_optimizer)
        object.__setattr__(self, "_own_name", name or "loss_scale_optimizer")
        # Delegated: in a checkpoint the wrapper looks like the inner optimizer, with
        # the scale where Keras's own wrapper has it.
        self._track_trackable(loss_scale, "loss_scale")
        self._track_trackable(self._fault_record, "faults")
        if not mode.current().knows_values:
            for variable in loss_scale.variables:
                # A v1 graph's `fit` initializes the variables that Keras knows.
                self._keras_module.backend.track_variable(variable)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The optimizer's name."""
        return self._own_name

    # Stands above Keras's own in the order of bases.
    loss_scale = LossScaleOptimizer.loss_scale

    def _check_context(self) -> None:
        super()._check_context()
        # Keras 2 refuses some strategies: a function, on TensorFlow 2.4 a method.
        name = "_raise_if_strategy_unsupported"
        check = getattr(self._keras_module, name, None) or getattr(self, name)
        check()

    def _apply_pairs(
        self,
        grads_and_vars: Any,
        options: Dict[str, Any],
        aggregates: bool,
        aggregate: Optional[Callable[[List[Any]], Any]] = None,
    ) -> Any:
        """Applies `(gradient, variable)` pairs, or skips them on all replicas.

        Args:
          grads_and_vars: The pairs.
          options: What else the inner optimizer's `apply_gradients` is called with.
          aggregates: Whether it adds the gradients up across replicas.
          aggregate: How the user adds them up, where Keras's own way is replaced.

        Returns:
          In a graph an op, in eager mode `iterations`. Keras's own answer if there is
          no gradient.
        """
        self._check_context()
        inner = self.inner_optimizer

        def apply(grads: Grads, variables: Any) -> Any:
            return inner.apply_gradients(list(zip(grads, variables)), **options)

        pairs = list(grads_and_vars)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if all(grad is None for grad in grads):
            return apply(grads, variables)
        self._build_before_apply(variables)
        done = self._apply_or_skip(grads, variables, apply, aggregates, aggregate)
        return self.iterations if done is None else done

    def _is_aggregated_here(self, aggregates: bool) -> bool:
        """Tells whether the inner optimizer, or this wrapper, adds gradients up.

        Raises:
          ValueError: The caller leaves it to neither, and `communication_dtype` is set.
        """
        if self._communication_dtype is not None and not aggregates:
            communication.refuse_unsummed(self._communication_dtype)
        return aggregates

    def _second_argument(self, value: Any) -> Dict[str, Any]:
        """Returns what `apply_gradients`' second argument is to the inner optimizer.

        Some optimizers take something else than a name there, as a norm to clip to
        (TensorFlowTTS).
        """
        if value is None or isinstance(value, str):
            return {"name": value}
        parameters = inspect.signature(self.inner_optimizer.apply_gradients).parameters
        second = list(parameters)[1]
        return {} if second == "name" else {second: value}

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        inner = copy.deepcopy(self.inner_optimizer, memo)
        self._release(inner)
        loss_scale = copy.deepcopy(self._loss_scale, memo)
        return type(self)(inner, loss_scale, name=self.name, **self._own_options())

    @classmethod
    def _release(cls, inner_optimizer: Any) -> None:
        super()._release(inner_optimizer)
        # What a wrapper tracks, its inner optimizer keeps: another one tracks it anew.
        # These names are private to TensorFlow (seen on 2.4 to 2.21).
        inner_optimizer._maybe_initialize_trackable()
        tracked = inner_optimizer._self_unconditional_checkpoint_dependencies
        kept = [each for each in tracked if each.name not in _TRACKED]
        inner_optimizer._self_unconditional_checkpoint_dependencies = kept
        for name in _TRACKED:
            inner_optimizer._self_unconditional_dependency_names.pop(name, None)

    @classmethod
    def _own_way_to_sum(cls, inner_optimizer: Any) -> Optional[str]:
        if not cls._has_own_aggregation(inner_optimizer):
            return None
        return "aggregates them by a method or an argument. Leave it out"

    @classmethod
    def _has_own_aggregation(cls, inner_optimizer: Any) -> bool:
        """Tells whether an optimizer adds gradients up in a way of its own."""
        raise NotImplementedError

    @classmethod
    def _overrides(cls, inner_optimizer: Any, *names: str) -> bool:
        """Tells whether the inner optimizer's class has methods of its own."""
        inner, base = type(inner_optimizer), cls._optimizer_class
        return any(getattr(inner, n, None) is not getattr(base, n, None) for n in names)

    def _build_before_apply(self, variables: List[Variable]) -> None:
        """Creates what the inner optimizer would create within a branch."""

    def get_weights(self) -> List[Any]:
        """Returns the values of the inner optimizer's variables, then the scale's."""
        get_values = self._keras.backend.batch_get_value
        inner = [get_values([v])[0] for v in self._inner_variables()]
        return inner + list(get_values(self._scale_variables()))

    def set_weights(self, weights: Any) -> None:
        """Sets what `get_weights` returned. The scale's may be missing."""
        variables = [*self._inner_variables(), *self._scale_variables()]
        self._keras.backend.batch_set_value(list(zip(variables, weights)))

    def _inner_variables(self) -> List[Any]:
        raise NotImplementedError

    def _scale_variables(self) -> List[Any]:
        variables = self._loss_scale.variables
        return sorted(variables, key=lambda v: v.name.split(":")[0] in SINCE_0_1_0)

    def _serialize_inner(self) -> Dict[str, Any]:
        return dict(self._keras.optimizers.serialize(self.inner_optimizer))

    @classmethod
    def _deserialize_inner(cls, config: Any, custom_objects: Optional[Any]) -> Any:
        if not isinstance(config, dict):
            return config
        return kerases.deserialize_optimizer(
            cls._keras, config, custom_objects, cls._is_legacy
        )
