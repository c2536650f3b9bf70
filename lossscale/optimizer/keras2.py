"""LossScaleOptimizer for Keras 2: for its legacy optimizers and for its new ones.

Keras 2 is `tf.keras` up to TensorFlow 2.15, and the package `tf_keras`. At first all
its optimizers derived from `OptimizerV2`. TensorFlow 2.11 made a new `Optimizer` the
default. Keras has a loss scale wrapper for each of the two, and `compile` looks for
these classes. So our wrappers derive from them, once for each Keras 2. They are made
when this module is imported, or when a Keras 2 is imported later.
"""

from __future__ import annotations

import sys
from typing import Any, Dict, List, Optional, Sequence

import tensorflow as tf

from lossscale.optimizer import wrappers
from lossscale.optimizer.base import LossScaleOptimizer
from lossscale.optimizer.forwarding import CallableList, delegated, forwarded
from lossscale.optimizer.keras2_base import SINCE_0_1_0, Keras2Base
from lossscale.runtime import kerases, registry
from lossscale.runtime.aliases import Variable
from lossscale.runtime.autograph import do_not_convert


class _Name(str):
    """The name of a wrapper's class, of which `lower()` returns another name.

    Keras calls `convert_to_legacy_optimizer` if TensorFlow 2's behaviour is off. That
    function looks for a class by its name in small letters (seen on 2.13 to 2.21). If
    `lower()` only changed the letters, it would find Keras's own wrapper.
    """

    __slots__ = ()

    def lower(self) -> str:
        return "keras2lossscaleoptimizer"


class _Legacy(Keras2Base):
    """The wrapper for `OptimizerV2`: Keras's default before TensorFlow 2.11.

    Since then Keras calls these optimizers `legacy`.
    """

    _is_legacy = True
    _summing_method = "_aggregate_gradients"

    gradient_aggregator = forwarded("gradient_aggregator")
    gradient_transformers = forwarded("gradient_transformers")

    def build(self, var_list: Sequence[Variable]) -> None:
        """Creates the inner optimizer's slots for `var_list`."""
        self._create_all_weights(var_list)
        self._trains(list(var_list))

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
          experimental_aggregate_gradients: Whether the gradients are summed over
            replicas.

        Returns:
          In a graph an op, in eager mode `iterations`.
        """
        aggregates = self._is_aggregated_here(experimental_aggregate_gradients)
        has_own = aggregates and self._has_own_aggregation(self.inner_optimizer)
        aggregates = aggregates and not has_own
        options = {"name": None, "experimental_aggregate_gradients": aggregates}
        options.update(self._second_argument(name))
        aggregate = self._aggregate if has_own else None
        return self._apply_pairs(grads_and_vars, options, aggregates, aggregate)

    # The two methods are not public. A legacy optimizer's `apply_gradients` begins with
    # them, and Keras's own wrapper calls them before it decides (seen on 2.4 to 2.21).
    @classmethod
    def _has_own_aggregation(cls, inner_optimizer: Any) -> bool:
        # The base class's module has the default function under this name. Without the
        # name, every aggregation is called before the decision, which is right too.
        module = sys.modules[cls._optimizer_class.__module__]
        default = getattr(module, "optimizer_utils", None)
        default = getattr(default, "all_reduce_sum_gradients", None)
        if inner_optimizer.gradient_aggregator is not default:
            return True
        names = ("_transform_unaggregated_gradients", "_aggregate_gradients")
        return cls._overrides(inner_optimizer, *names)

    def _aggregate(self, pairs: List[Any]) -> Any:
        inner = self.inner_optimizer
        pairs = inner._transform_unaggregated_gradients(pairs)
        return inner._aggregate_gradients(pairs)

    def variables(self) -> List[Variable]:
        """Returns the inner optimizer's variables, then the loss scale's."""
        return self.weights

    @property
    def weights(self) -> List[Variable]:
        """The inner optimizer's variables, then the loss scale's."""
        return [*self._inner_variables(), *self._scale_variables()]

    def _inner_variables(self) -> List[Variable]:
        return list(self.inner_optimizer.weights)

    @classmethod
    def _recognizes(cls, inner_config: Dict[str, Any]) -> bool:
        return inner_config.get("is_legacy_optimizer") is not False


class _New(Keras2Base):
    """The wrapper for `Optimizer`: Keras's default since TensorFlow 2.11.

    TensorFlow 2.10 calls these optimizers `experimental`.
    """

    _is_legacy = False
    _summing_method = "aggregate_gradients"

    weight_decay = forwarded("weight_decay")
    clipnorm = forwarded("clipnorm")
    global_clipnorm = forwarded("global_clipnorm")
    clipvalue = forwarded("clipvalue")
    ema_overwrite_frequency = forwarded("ema_overwrite_frequency")
    jit_compile = forwarded("jit_compile")

    # The inner optimizer owns the variables that these create, and saves them.
    add_variable = delegated("add_variable")
    add_variable_from_reference = delegated("add_variable_from_reference")
    # The inner optimizer may override this one.
    aggregate_gradients = delegated("aggregate_gradients")
    exclude_from_weight_decay = delegated("exclude_from_weight_decay")

    def build(self, var_list: Sequence[Variable]) -> None:
        """Creates the inner optimizer's slots for `var_list`."""
        self.inner_optimizer.build(var_list)
        self._trains(list(var_list))

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
          skip_gradients_aggregation: True if the gradients are not to be summed over
            replicas.
          experimental_aggregate_gradients: The opposite, an older name: False if they
            are not to be summed.

        Returns:
          `iterations`, the number of applied steps.
        """
        skip = skip_gradients_aggregation or not experimental_aggregate_gradients
        aggregates = self._is_aggregated_here(not skip)
        aggregates = aggregates and not _is_of_dtensor(self.inner_optimizer)
        has_own = aggregates and self._has_own_aggregation(self.inner_optimizer)
        options: Dict[str, Any] = {"skip_gradients_aggregation": skip or has_own}
        options.update(self._second_argument(name))
        options.pop("name", None)  # accepted and ignored, as Keras does
        aggregate = self.inner_optimizer.aggregate_gradients if has_own else None
        aggregates = aggregates and not has_own
        self._apply_pairs(grads_and_vars, options, aggregates, aggregate)
        return self.iterations

    def _build_before_apply(self, variables: List[Variable]) -> None:
        with tf.init_scope():  # a branch cannot create variables
            self.build(variables)

    @classmethod
    def _has_own_aggregation(cls, inner_optimizer: Any) -> bool:
        return cls._overrides(inner_optimizer, "aggregate_gradients")

    @classmethod
    def _own_way_to_sum(cls, inner_optimizer: Any) -> Optional[str]:
        if _is_of_dtensor(inner_optimizer):
            return "sums them by DTensor. Leave out `communication_dtype`"
        return super()._own_way_to_sum(inner_optimizer)

    @property
    def variables(self) -> Any:
        """The inner optimizer's variables, then the loss scale's."""
        return CallableList([*self._inner_variables(), *self._scale_variables()])

    def _inner_variables(self) -> List[Variable]:
        inner = self.inner_optimizer
        found = inner.variables
        found = list(found() if callable(found) else found)
        # On TensorFlow 2.10 the list does not hold `iterations`.
        counted = any(variable is inner.iterations for variable in found)
        return found if counted else [inner.iterations, *found]

    @property
    def _variables(self) -> List[Variable]:
        return list(self.variables)

    def load_own_variables(self, store: Any) -> None:
        """Reads `variables` from a file. The loss scale's variables may be missing."""
        count, inner = len(store.keys()), len(self._inner_variables())
        if count in (inner, len(self.variables) - len(SINCE_0_1_0)):
            self.set_weights([store[str(number)][()] for number in range(count)])
        else:  # Keras reads them, or raises its own error
            super().load_own_variables(store)  # type: ignore[misc]

    @classmethod
    def _recognizes(cls, inner_config: Dict[str, Any]) -> bool:
        return inner_config.get("is_legacy_optimizer") is False


def _is_of_dtensor(optimizer: Any) -> bool:
    has_mesh = bool(getattr(optimizer, "_mesh", None))
    return has_mesh or bool(getattr(optimizer, "_run_with_dtensor", False))


def _mix_into(keras: Any) -> None:
    """Makes and registers the wrappers for one Keras 2."""
    for is_legacy, base, optimizer_class in kerases.generations(keras):
        mixin = _Legacy if is_legacy else _New
        name = f"Keras2{'Legacy' if is_legacy else ''}LossScaleOptimizer"
        attributes = {
            "__qualname__": name,
            "__doc__": LossScaleOptimizer.__doc__,
            "__module__": __name__,
            "_keras": keras,
            "_keras_module": kerases.wrapper_module(keras),
            "_optimizer_class": optimizer_class,
        }
        # Other code tells an optimizer's kind by this name. Files find the class by
        # the registered one.
        asked = _Name("LossScaleOptimizer")
        wrapper = type(base)(asked, (mixin, base), attributes)
        wrappers.wraps(optimizer_class)(wrapper)
        registry.register(keras, wrapper, name.replace("Keras2", ""))
        if is_legacy:
            keras.utils.get_custom_objects()["keras2lossscaleoptimizer"] = wrapper


kerases.for_each_keras2(_mix_into)
