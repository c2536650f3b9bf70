"""LossScaleOptimizer for Keras 2: for its legacy optimizers and for its new ones.

Keras 2 is `tf.keras` up to TensorFlow 2.15, and the package `tf_keras`. `compile` looks
for its own wrapper, one for each generation of optimizers. So ours derive from these,
once for each Keras 2 that is imported.
"""

from __future__ import annotations

import abc
import functools
import inspect
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple, Type

import tensorflow as tf

from lossscale.gradients.bundle import Bundle, unscale_and_check
from lossscale.optimizer import files, wrappers
from lossscale.optimizer.base import LossScaleOptimizer
from lossscale.optimizer.dialect import Dialect, delegated, forwarded
from lossscale.runtime import float16_weights, keras_versions, mode, registry, replicas
from lossscale.runtime.aliases import Grads, Results, Variable
from lossscale.runtime.graphs import do_not_convert

#: Where an inner optimizer keeps the names under which its wrapper tracks objects.
_TRACKED = "_lossscale_tracked"


class Keras2Dialect(Dialect):
    """One of the two generations of optimizers of one Keras 2."""

    unscales_in_apply = False
    is_legacy: bool
    listed_last = ("consecutive_skipped_steps", *files.LAST)

    def __init__(self, keras: Any, optimizer_class: type) -> None:
        self.keras, self.optimizer_class = keras, optimizer_class
        #: The module in which this Keras defines its loss scale wrappers.
        self.module = sys.modules[keras.mixed_precision.LossScaleOptimizer.__module__]

    def constructor_arguments(self, name: str) -> Dict[str, Any]:
        del name  # Keras's constructor takes none
        # With a fixed scale it creates no state.
        return {"dynamic": False, "initial_scale": 1.0}

    def recognizes(self, inner_config: Dict[str, Any]) -> bool:
        is_new = inner_config.get("is_legacy_optimizer") is False
        return is_new != self.is_legacy

    def deserialize(self, config: Any, custom_objects: Optional[Any]) -> Any:
        read = self.keras.optimizers.deserialize
        try:
            return read(config, custom_objects, use_legacy_optimizer=self.is_legacy)
        except TypeError:  # before TensorFlow 2.10 there is no such argument
            return read(config, custom_objects)

    def release(self, inner: Any) -> None:
        super().release(inner)
        # Keras's own wrapper tracks objects under the first two names. What a
        # checkpoint holds for a guard that was not there is not for the next one. There
        # is no public way to untrack an object (names seen on TensorFlow 2.4 to 2.21).
        names = vars(inner).pop(_TRACKED, {"base_optimizer", "loss_scale"})
        held, private = vars(inner), "_self_unconditional_"
        for name in {*names, "guard"}:
            held.get(f"{private}deferred_dependencies", {}).pop(name, None)
        for name in names:
            held.get(f"{private}dependency_names", {}).pop(name, None)
        tracked = held.get(f"{private}checkpoint_dependencies", [])
        tracked[:] = [each for each in tracked if each.name not in names]

    @abc.abstractmethod
    def variables_of(self, inner: Any) -> List[Variable]:
        """Returns an optimizer's variables."""

    @abc.abstractmethod
    def build(self, inner: Any, variables: List[Variable]) -> None:
        """Creates an optimizer's slots."""

    def aggregate(
        self, inner: Any, bundle: Bundle, variables: List[Variable]
    ) -> Tuple[Bundle, List[Variable]]:
        """Returns gradients as the optimizer itself sums them, and their variables.

        It may wait for the other replicas, so it is called at every step.
        """
        grads, now = unscale_and_check(bundle)
        pairs = [(g, v) for g, v in zip(grads, variables) if g is not None]
        for method in self.summing_methods:
            pairs = list(getattr(inner, method)(pairs))
        grads, trained = [g for g, _ in pairs], [v for _, v in pairs]
        check = bundle.check & now
        of_all = check.worst
        if of_all is not None:
            positions = {id(variable): i for i, variable in enumerate(variables)}
            # A variable that only it returned had no gradient, and so no fault.
            kept = [positions.get(id(v), len(variables)) for v in trained]
            check = check._replace(
                worst=lambda: tf.gather(tf.pad(of_all(), [[0, 1]]), kept)
            )
        nothing = [None] * len(grads)
        summed = Bundle(bundle.loss_scale, grads, nothing, bundle.losses, check=check)
        return summed, trained

    def options(self, inner: Any, second: Any, aggregates: bool) -> Dict[str, Any]:
        """Returns the arguments of an optimizer's `apply_gradients` beside the pairs.

        `second` is the second one that the wrapper was given. That is not `name` for
        all: TensorFlowTTS's optimizers take a norm to clip to.
        """
        named = {}
        if second is not None and not isinstance(second, str):
            name = list(inspect.signature(inner.apply_gradients).parameters)[1]
            named = {} if name == "name" else {name: second}
        elif self.is_legacy:
            named = {"name": second}
        if self.is_legacy:
            return {**named, "experimental_aggregate_gradients": aggregates}
        return {**named, "skip_gradients_aggregation": not aggregates}


class LegacyDialect(Keras2Dialect):
    """`OptimizerV2`, `legacy` since TensorFlow 2.11."""

    is_legacy = True
    # The two methods are not public. A legacy optimizer's `apply_gradients` begins with
    # them, and Keras's own wrapper calls them before it decides (seen on 2.4 to 2.21).
    summing_methods = ("_transform_unaggregated_gradients", "_aggregate_gradients")

    @functools.cached_property
    def _default_aggregator(self) -> Any:
        optimizers = self.keras.optimizers
        return getattr(optimizers, "legacy", optimizers).SGD().gradient_aggregator

    def has_own_sum(self, inner: Any) -> bool:
        is_own = inner.gradient_aggregator is not self._default_aggregator
        return is_own or super().has_own_sum(inner)

    def variables_of(self, inner: Any) -> List[Variable]:
        return list(inner.weights)

    def build(self, inner: Any, variables: List[Variable]) -> None:
        inner._create_all_weights(variables)


class NewDialect(Keras2Dialect):
    """`Optimizer`, Keras's default since TensorFlow 2.11."""

    is_legacy = False
    summing_methods = ("aggregate_gradients",)

    def variables_of(self, inner: Any) -> List[Variable]:
        variables = inner.variables
        variables = list(variables() if callable(variables) else variables)
        # TensorFlow 2.10 does not list `iterations`.
        counted = any(variable is inner.iterations for variable in variables)
        return variables if counted else [inner.iterations, *variables]

    def build(self, inner: Any, variables: List[Variable]) -> None:
        inner.build(variables)


class Keras2Base(LossScaleOptimizer):
    """The part of the wrappers that is equal for both generations of Keras 2."""

    _dialect: Keras2Dialect

    def _show_variables(self) -> None:
        if not mode.current().knows_values:
            for variable in self._own_variables().values():
                # In a v1 graph, `fit` initializes only the variables that Keras knows.
                self._dialect.module.backend.track_variable(variable)

    def _track_trackable(
        self, trackable: Any, name: str, overwrite: bool = False
    ) -> Any:
        # In a checkpoint the wrapper looks like the inner optimizer, with its loss
        # scale where Keras's wrapper has one.
        inner = self.inner_optimizer
        tracked = vars(inner).setdefault(_TRACKED, set())
        track: Any = super()._track_trackable  # type: ignore[misc]
        try:
            track(trackable, name, overwrite)
        except ValueError:
            tracked_before = inner._lookup_dependency(name)
            if tracked_before is None or tracked_before is trackable:
                raise  # what a checkpoint holds for it cannot be restored
            # The inner optimizer tracks an object of its own under this name. Keras's
            # constructor would track a reader of TensorFlow 2.2's files.
            if name != "base_optimizer":
                self._track_trackable(trackable, f"wrapper_{name}", overwrite)
            return trackable
        tracked.add(name)
        # Keras's new optimizers keep what the first checkpoint was written of.
        vars(inner).pop("_coalesced_children", None)
        return trackable

    @property
    def name(self) -> str:  # type: ignore[override]
        return self._given_name

    def build(self, var_list: Sequence[Variable]) -> None:
        """Creates the inner optimizer's slots for `var_list`."""
        self._engine.build(list(var_list))  # refuses some, before anything exists
        self._dialect.build(self.inner_optimizer, list(var_list))

    def _apply_pairs(self, grads_and_vars: Any, second: Any, aggregates: bool) -> Any:
        """Applies pairs, or skips them. `aggregates` tells whether to sum them.

        `second` is the second argument of `apply_gradients`.
        """
        dtype, dialect = self.communication_dtype, self._dialect
        if dtype is not None and not aggregates:
            raise ValueError(
                "`skip_gradients_aggregation` must be False, and "
                "`experimental_aggregate_gradients` True, with communication_dtype="
                f"{dtype!r}: LossScaleOptimizer sums the gradients then. Leave out one "
                "of the two."
            )
        replicas.check_can_apply()
        name = "_raise_if_strategy_unsupported"  # a method in TensorFlow 2.4
        refuse = getattr(self, name, None) or getattr(dialect.module, name)
        refuse()
        inner = self.inner_optimizer
        # The inner optimizer may have been changed since the wrapper was made.
        dialect.refuse_own_sum(dtype, inner)
        has_own = aggregates and dialect.has_own_sum(inner)
        aggregates = aggregates and not has_own
        options = dialect.options(inner, second, aggregates)

        def apply_inner(grads: Grads, variables: List[Variable]) -> Results:
            with self._inner_sum.left_out(grads):
                return inner.apply_gradients(list(zip(grads, variables)), **options)

        pairs = list(grads_and_vars)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if all(grad is None for grad in grads):
            return apply_inner(grads, variables)
        if not dialect.is_legacy:
            with tf.init_scope():  # a branch cannot create variables
                self.build(variables)
        op = self._engine._step(
            grads,
            variables,
            apply_inner,
            are_added=aggregates,
            aggregate=functools.partial(dialect.aggregate, inner) if has_own else None,
        )
        float16_weights.warn_of_float16(self, grads, variables)
        return self.iterations if op is None else op

    def get_weights(self) -> List[Any]:
        """Returns the values of `weights`: the inner optimizer's, the loss scale's."""
        return list(self._dialect.keras.backend.batch_get_value(self._all_variables()))

    def set_weights(self, weights: Any) -> None:
        """Sets the values of `get_weights`, or those of the inner optimizer alone.

        Raises:
          ValueError: `weights` is neither list. Nothing has changed then.
        """
        values, inner = list(weights), self._dialect.variables_of(self.inner_optimizer)
        own = self._own_variables()
        for ours in (own, {}):
            if files.fit([*files.unnamed(inner), *ours.items()], values):
                pairs = zip([*inner, *ours.values()], values)
                self._dialect.keras.backend.batch_set_value(list(pairs))
                return
        files.refuse(values, own, len(inner))

    def _all_variables(self) -> List[Variable]:
        inner = self._dialect.variables_of(self.inner_optimizer)
        return [*inner, *self._own_variables().values()]


class _Name(str):
    """A class's name, whose `lower()` Keras does not take for its own wrapper's."""

    __slots__ = ()

    def lower(self) -> str:
        return "keras2lossscaleoptimizer"


class _Legacy(Keras2Base):
    """The wrapper for `OptimizerV2`, `legacy` since TensorFlow 2.11."""

    # TensorFlow 2.4 forwards these only where they are hyperparameters.
    learning_rate = forwarded("learning_rate")
    lr = forwarded("lr")
    gradient_aggregator = forwarded("gradient_aggregator")
    gradient_transformers = forwarded("gradient_transformers")
    # Not public, but programs log the learning rate with it.
    _decayed_lr = delegated("_decayed_lr")

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Any,
        name: Optional[str] = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Applies `(gradient, variable)` pairs, or skips them on all replicas.

        `experimental_aggregate_gradients` tells whether to sum them over replicas. In a
        graph this returns an op of that `name`, in eager mode `iterations`.
        """
        return self._apply_pairs(grads_and_vars, name, experimental_aggregate_gradients)

    def variables(self) -> List[Variable]:
        return self._all_variables()

    @property
    def weights(self) -> List[Variable]:
        return self._all_variables()


class _New(Keras2Base):
    """The wrapper for `Optimizer`, Keras's default since TensorFlow 2.11."""

    weight_decay = forwarded("weight_decay")
    clipnorm = forwarded("clipnorm")
    global_clipnorm = forwarded("global_clipnorm")
    clipvalue = forwarded("clipvalue")
    ema_overwrite_frequency = forwarded("ema_overwrite_frequency")
    jit_compile = forwarded("jit_compile")

    # The inner optimizer owns the variables that these create, and saves them.
    add_variable = delegated("add_variable")
    add_variable_from_reference = delegated("add_variable_from_reference")
    aggregate_gradients = delegated("aggregate_gradients")
    exclude_from_weight_decay = delegated("exclude_from_weight_decay")

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Any,
        name: Optional[str] = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Applies `(gradient, variable)` pairs, or skips them on all replicas.

        They are summed over replicas unless `skip_gradients_aggregation` is True, or
        the older argument is False. This ignores `name` and returns `iterations`.
        """
        aggregates = experimental_aggregate_gradients and not skip_gradients_aggregation
        self._apply_pairs(grads_and_vars, name, aggregates)
        return self.iterations

    @property
    def variables(self) -> Any:
        return CallableList(self._all_variables())

    @property
    def _variables(self) -> List[Variable]:
        return self._all_variables()

    @property
    def _has_slots(self) -> bool:
        return getattr(self.inner_optimizer, "_built", False)  # no public name

    def set_weights(self, weights: Any) -> None:
        inner = self.inner_optimizer
        if not self._has_slots and hasattr(inner, "set_weights"):  # 2.10's has none
            inner.set_weights(weights)  # Keras's own error
        super().set_weights(weights)

    def save_own_variables(self, store: Any) -> None:
        """Writes the inner optimizer's variables as it does, ours by their names."""
        inner = self._dialect.variables_of(self.inner_optimizer)
        for name, variable in [*enumerate(inner), *self._own_variables().items()]:
            store[str(name)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote, or a list, as 3.1.0 writes it."""
        own, read = self._own_variables(), {n: store[n] for n in set(store.keys())}
        files.refuse_holder(read, own)
        values = [read[str(n)][()] for n in range(sum(map(str.isdigit, read)))]
        named = {n: read[n][()] for n in own if n in read}
        inner = self._dialect.variables_of(self.inner_optimizer)
        found = {n: own[n] for n in named}
        listed = [*files.unnamed(inner), *found.items()]
        if named and files.fit(listed, [*values, *named.values()]):
            for (_, variable), value in zip(listed, [*values, *named.values()]):
                variable.assign(value)
        elif not self._has_slots or len(values) < len(inner):
            # One of the two optimizers is not built. Keras logs that it reads nothing,
            # unless both numbers of variables happen to be equal.
            is_equal = len(read) == len(self._all_variables())
            super().load_own_variables({} if is_equal else read)  # type: ignore[misc]
        else:
            super().set_weights([*values, *named.values()])


class CallableList(List[Any]):
    """A list that can be called, since `variables` was a method in older versions."""

    def __call__(self) -> List[Any]:
        return self


def _mix_into(keras: Any) -> None:
    for is_legacy, base, optimizer_class in keras_versions.generations(keras):
        mixin: Type[Keras2Base] = _Legacy if is_legacy else _New
        dialect = (LegacyDialect if is_legacy else NewDialect)(keras, optimizer_class)
        name = f"Keras2{'Legacy' if is_legacy else ''}LossScaleOptimizer"
        attributes = {
            "__qualname__": name,
            "__doc__": LossScaleOptimizer.__doc__,
            "__module__": __name__,
            "_dialect": dialect,
        }
        # Other code tells an optimizer's kind by this name. Files find the class by
        # the registered one.
        wrapper = type(base)(_Name("LossScaleOptimizer"), (mixin, base), attributes)
        wrappers.wraps(optimizer_class)(wrapper)
        registry.register(keras, wrapper, name.replace("Keras2", ""))
        if is_legacy:
            keras.utils.get_custom_objects()["keras2lossscaleoptimizer"] = wrapper


keras_versions.for_each_keras2(_mix_into)
