"""LossScaleOptimizer for Keras 2: its legacy optimizers and its new ones.

Keras 2 is `tf.keras` up to TensorFlow 2.15, and the package `tf_keras`. Its optimizers
were `OptimizerV2` first; TensorFlow 2.11 made a new `Optimizer` the default. Keras has
a wrapper class for each, which `compile` looks for. Ours are mixed into these classes
when this module is imported, once for each Keras 2 that is installed.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import tensorflow as tf

from lossscale.optimizer import wrappers
from lossscale.optimizer.base import LossScaleOptimizer
from lossscale.optimizer.forwarding import CallableList, forwarded
from lossscale.runtime import kerases
from lossscale.runtime.autograph import do_not_convert
from lossscale.scales.fixed import FixedLossScale

#: What files of lossscale 0.1.0 do not hold. It comes last where files know no names.
_SINCE_0_1_0 = {"consecutive_skipped_steps"}


class _Keras2(LossScaleOptimizer):
    """What the wrappers of both generations have in common."""

    _unscales_in_apply = False
    #: The module that defines Keras's own wrappers.
    _keras_module: Any
    _keras: Any
    _is_legacy: bool
    _own_name: str
    _track_trackable: Any
    _create_all_weights: Any

    def __init__(
        self, inner_optimizer: Any, loss_scale: Any = "dynamic", name: Any = None
    ) -> None:
        scale = self._checked(inner_optimizer, loss_scale, name)
        # Fixed, Keras's constructor checks its arguments and creates no state.
        super().__init__(inner_optimizer, dynamic=False, initial_scale=1.0)  # type: ignore[call-arg]
        self._attach(scale)
        wrappers.mark(inner_optimizer)
        object.__setattr__(self, "_own_name", name or "loss_scale_optimizer")
        # Delegated: in a checkpoint the wrapper looks like the inner optimizer, with
        # the scale where Keras's own wrapper has it.
        self._track_trackable(scale, "loss_scale")
        self._track_trackable(self._faults, "faults")
        if not tf.executing_eagerly():
            for variable in scale.variables:  # v1's `fit` initializes those it knows
                self._keras_module.backend.track_variable(variable)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The optimizer's name."""
        return self._own_name

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale can change."""
        return not isinstance(self._loss_scale, FixedLossScale)

    @property
    def initial_scale(self) -> Any:
        """The loss scale's initial value, None if it does not tell."""
        fixed = getattr(self._loss_scale, "loss_scale_value", None)
        return getattr(self._loss_scale, "initial_loss_scale", fixed)

    @property
    def dynamic_counter(self) -> Any:
        """The variable that counts finite steps in a row, None if there is none."""
        return getattr(self._loss_scale, "good_steps", None)

    @property
    def dynamic_growth_steps(self) -> Any:
        """After how many of them the scale grows, None if it does not tell."""
        return getattr(self._loss_scale, "increment_period", None)

    # Stands above Keras's own in the order of bases.
    loss_scale = LossScaleOptimizer.loss_scale

    def _check_context(self) -> None:
        super()._check_context()
        # Keras 2 refuses some strategies: a function, on TensorFlow 2.4 a method.
        name = "_raise_if_strategy_unsupported"
        check = getattr(self._keras_module, name, None) or getattr(self, name)
        check()

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
        return sorted(variables, key=lambda v: v.name.split(":")[0] in _SINCE_0_1_0)

    def _serialize_inner(self) -> Dict[str, Any]:
        return dict(self._keras.optimizers.serialize(self.inner_optimizer))

    @classmethod
    def _deserialize_inner(cls, config: Any, custom_objects: Optional[Any]) -> Any:
        if not isinstance(config, dict):
            return config
        return kerases.deserialize_optimizer(
            cls._keras, config, custom_objects, cls._is_legacy
        )


class _Legacy(_Keras2):
    """For `OptimizerV2`: the default before TensorFlow 2.11, `legacy` since."""

    _is_legacy = True

    def build(self, var_list: Any) -> None:
        """Creates the inner optimizer's slots for `var_list`."""
        self._create_all_weights(var_list)
        self._place(list(var_list))

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Any,
        name: Optional[str] = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Applies `(gradient, variable)` pairs, or skips them on all replicas.

        Args:
          grads_and_vars: The pairs.
          name: The name of the returned operation.
          experimental_aggregate_gradients: Whether gradients are summed over replicas.

        Returns:
          In a graph an op, in eager mode `iterations`.
        """
        self._check_context()
        pairs = list(grads_and_vars)
        inner = self.inner_optimizer
        aggregate = experimental_aggregate_gradients

        def apply(grads: List[Any], variables: Any) -> Any:
            return inner.apply_gradients(
                list(zip(grads, variables)),
                name=name,
                experimental_aggregate_gradients=aggregate,
            )

        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if all(grad is None for grad in grads):
            return apply(grads, variables)  # Keras's own answer
        done = self._apply_or_skip(grads, variables, apply, aggregate)
        return self.iterations if done is None else done

    def variables(self) -> List[Any]:
        """Returns the inner optimizer's variables, then the loss scale's."""
        return self.weights

    @property
    def weights(self) -> List[Any]:
        """The inner optimizer's variables, then the loss scale's."""
        return [*self._inner_variables(), *self._scale_variables()]

    def _inner_variables(self) -> List[Any]:
        return list(self.inner_optimizer.weights)

    @classmethod
    def _recognizes(cls, inner_config: Dict[str, Any]) -> bool:
        return inner_config.get("is_legacy_optimizer") is not False


class _New(_Keras2):
    """For `Optimizer`: `experimental` in TensorFlow 2.10, the default since 2.11."""

    _is_legacy = False

    weight_decay = forwarded("weight_decay")
    clipnorm = forwarded("clipnorm")
    global_clipnorm = forwarded("global_clipnorm")
    clipvalue = forwarded("clipvalue")
    ema_overwrite_frequency = forwarded("ema_overwrite_frequency")
    jit_compile = forwarded("jit_compile")

    def build(self, var_list: Any) -> None:
        """Creates the inner optimizer's slots for `var_list`."""
        self.inner_optimizer.build(var_list)
        self._place(list(var_list))

    def exclude_from_weight_decay(
        self, var_list: Any = None, var_names: Any = None
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Any,
        name: Optional[str] = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Applies `(gradient, variable)` pairs, or skips them on all replicas.

        Args:
          grads_and_vars: The pairs.
          name: Accepted and ignored, as Keras does.
          skip_gradients_aggregation: Whether gradients are not summed over replicas.
          experimental_aggregate_gradients: The reverse, under its older name.

        Returns:
          `iterations`, the number of steps that were applied.
        """
        del name
        self._check_context()
        pairs = list(grads_and_vars)
        inner = self.inner_optimizer
        skip = skip_gradients_aggregation or not experimental_aggregate_gradients

        def apply(grads: List[Any], variables: Any) -> Any:
            inner.apply_gradients(
                list(zip(grads, variables)), skip_gradients_aggregation=skip
            )

        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if all(grad is None for grad in grads):
            inner.apply_gradients(pairs)  # Keras's own answer
            return self.iterations
        with tf.init_scope():  # a branch cannot create variables
            self.build(variables)
        self._apply_or_skip(grads, variables, apply, not (skip or self._is_dtensor()))
        return self.iterations

    def _is_dtensor(self) -> bool:
        inner = self.inner_optimizer
        return bool(getattr(inner, "_mesh", None)) or bool(
            getattr(inner, "_run_with_dtensor", False)
        )

    @property
    def variables(self) -> Any:
        """The inner optimizer's variables, then the loss scale's."""
        return CallableList([*self._inner_variables(), *self._scale_variables()])

    def _inner_variables(self) -> List[Any]:
        inner = self.inner_optimizer
        found = inner.variables
        found = list(found() if callable(found) else found)
        # TensorFlow 2.10 leaves the counter out.
        counted = any(variable is inner.iterations for variable in found)
        return found if counted else [inner.iterations, *found]

    @property
    def _variables(self) -> List[Any]:
        return list(self.variables)

    def load_own_variables(self, store: Any) -> None:
        """Reads `variables` from a file. Those of the loss scale may be missing."""
        count, inner = len(store.keys()), len(self._inner_variables())
        if count in (inner, len(self.variables) - len(_SINCE_0_1_0)):
            self.set_weights([store[str(place)][()] for place in range(count)])
        else:  # Keras's own answer
            super().load_own_variables(store)  # type: ignore[misc]

    @classmethod
    def _recognizes(cls, inner_config: Dict[str, Any]) -> bool:
        return inner_config.get("is_legacy_optimizer") is False


def _mix_into(keras: Any) -> None:
    """Makes and registers the wrappers for one Keras 2."""
    for is_legacy, base, optimizer_class in kerases.generations(keras):
        mixin = _Legacy if is_legacy else _New
        name = f"Keras2{'Legacy' if is_legacy else ''}LossScaleOptimizer"
        attributes = {
            "__doc__": LossScaleOptimizer.__doc__,
            "__module__": __name__,
            "_keras": keras,
            "_keras_module": kerases.wrapper_module(keras),
        }
        wrapper = type(base)(name, (mixin, base), attributes)
        wrappers.wraps(optimizer_class)(wrapper)
        kerases.register(keras, wrapper, name.replace("Keras2", ""))


for _installed in kerases.keras2():
    _mix_into(_installed)
