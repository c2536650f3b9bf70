"""What the wrappers of both generations of Keras 2's optimizers have in common."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Callable, Dict, List, Optional

from lossscale.optimizer import wrappers
from lossscale.optimizer.base import LossScaleOptimizer
from lossscale.optimizer.inner_sum import restore as restore_sum
from lossscale.optimizer.step import communication
from lossscale.runtime import kerases, mode
from lossscale.runtime.aliases import Grads, Results, Variable
from lossscale.scales.base import LossScale

#: Variables that files of lossscale 0.1.0 do not hold. Files without names hold them
#: last.
SINCE_0_1_0 = {"consecutive_skipped_steps"}


#: The names under which our wrapper and Keras's own track objects.
_TRACKED = ("base_optimizer", "loss_scale", "faults")


class Keras2Base(LossScaleOptimizer):
    """The part of the wrappers that is equal for both generations of Keras 2."""

    _unscales_in_apply = False
    #: The module that defines Keras's own wrappers.
    _keras_module: Any
    _keras: Any
    _is_legacy: bool
    _own_name: str
    _track_trackable: Any
    _create_all_weights: Any

    def _wrap(self, inner_optimizer: Any, loss_scale: LossScale, name: Any) -> None:
        # With a fixed scale, Keras's constructor checks the inner optimizer, and
        # creates no state.
        construct: Any = super(LossScaleOptimizer, self).__init__
        construct(inner_optimizer, dynamic=False, initial_scale=1.0)
        self._attach(loss_scale)
        wrappers.mark(inner_optimizer)
        object.__setattr__(self, "_own_name", name or "loss_scale_optimizer")
        # In a checkpoint the wrapper looks like the inner optimizer, and its loss scale
        # stands where Keras's own wrapper has one.
        self._track_trackable(loss_scale, "loss_scale")
        self._track_trackable(self._fault_record, "faults")
        if not mode.current().knows_values:
            for variable in loss_scale.variables:
                # In a v1 graph, `fit` initializes only the variables that Keras knows.
                self._keras_module.backend.track_variable(variable)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The optimizer's name."""
        return self._own_name

    # It comes before the `loss_scale` of Keras's own wrapper in the order of bases.
    loss_scale = LossScaleOptimizer.loss_scale

    def _check_context(self) -> None:
        super()._check_context()
        # Keras 2 refuses some strategies, by a function or, on TensorFlow 2.4, by a
        # method.
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
          options: The other arguments of the inner optimizer's `apply_gradients`.
          aggregates: Whether the inner optimizer or this wrapper sums the gradients
            across replicas.
          aggregate: The user's function that sums them, if it replaces Keras's.

        Returns:
          In a graph an op, in eager mode `iterations`. If all gradients are None, what
          the inner optimizer returns.
        """
        self._check_context()
        inner = self.inner_optimizer

        def apply(grads: Grads, variables: List[Variable]) -> Results:
            with self._inner_sum.left_out(grads):
                return inner.apply_gradients(list(zip(grads, variables)), **options)

        pairs = list(grads_and_vars)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if all(grad is None for grad in grads):
            return apply(grads, variables)
        self._build_before_apply(variables)
        done = self._apply_or_skip(grads, variables, apply, aggregates, aggregate)
        return self.iterations if done is None else done

    def _is_aggregated_here(self, aggregates: bool) -> bool:
        """Tells whether the inner optimizer or this wrapper sums the gradients.

        Raises:
          ValueError: The caller wants to sum them, and `communication_dtype` is set.
        """
        if self._communication_dtype is not None and not aggregates:
            communication.refuse_unsummed(self._communication_dtype)
        return aggregates

    def _second_argument(self, value: Any) -> Dict[str, Any]:
        """Returns the second argument of `apply_gradients` by its name.

        Some inner optimizers take no name there, but for example a norm to clip to
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
        restore_sum(inner_optimizer, cls._summing_method)
        # The inner optimizer keeps the objects that its wrapper tracks. They are
        # removed, so that the next wrapper can track its own. The names of the
        # attributes are private to TensorFlow (seen on 2.4 to 2.21).
        inner_optimizer._maybe_initialize_trackable()
        tracked = inner_optimizer._self_unconditional_checkpoint_dependencies
        kept = [each for each in tracked if each.name not in _TRACKED]
        inner_optimizer._self_unconditional_checkpoint_dependencies = kept
        for name in _TRACKED:
            inner_optimizer._self_unconditional_dependency_names.pop(name, None)

    @classmethod
    def _own_way_to_sum(cls, inner_optimizer: Any) -> Optional[str]:
        if not cls._has_own_aggregation(inner_optimizer):
            return super()._own_way_to_sum(inner_optimizer)
        return (
            "sums them by a method or an argument of its own. Leave out "
            "`communication_dtype`"
        )

    @classmethod
    def _has_own_aggregation(cls, inner_optimizer: Any) -> bool:
        """Tells whether an optimizer sums gradients in its own way."""
        raise NotImplementedError

    @classmethod
    def _overrides(cls, inner_optimizer: Any, *names: str) -> bool:
        """Tells whether the inner optimizer's class overrides one of these methods."""
        inner, base = type(inner_optimizer), cls._optimizer_class
        return any(getattr(inner, n, None) is not getattr(base, n, None) for n in names)

    def _build_before_apply(self, variables: List[Variable]) -> None:
        """Creates the variables that the inner optimizer would create in a branch."""

    def get_weights(self) -> List[Any]:
        """Returns the values of the inner optimizer's variables.

        The values of the loss scale's variables follow.
        """
        get_values = self._keras.backend.batch_get_value
        inner = [get_values([v])[0] for v in self._inner_variables()]
        return inner + list(get_values(self._scale_variables()))

    def set_weights(self, weights: Any) -> None:
        """Sets the values that `get_weights` returned.

        The values of the loss scale may be missing.
        """
        variables = [*self._inner_variables(), *self._scale_variables()]
        self._keras.backend.batch_set_value(list(zip(variables, weights)))

    def _inner_variables(self) -> List[Variable]:
        raise NotImplementedError

    def _scale_variables(self) -> List[Variable]:
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
