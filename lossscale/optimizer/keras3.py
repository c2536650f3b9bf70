"""LossScaleOptimizer for Keras 3 on the TensorFlow backend."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import keras
import numpy as np
import tensorflow as tf

from lossscale.gradients.check import NO_CHECK, Check, checked, worst_of_each
from lossscale.optimizer import files, wrappers
from lossscale.optimizer.base import LossScaleOptimizer
from lossscale.optimizer.dialect import Dialect, answered, delegated, forwarded
from lossscale.provenance.kinds import SCALED, UNKNOWN, Kind
from lossscale.provenance.origins import before
from lossscale.runtime import float16_weights, registry, replicas
from lossscale.runtime.aliases import Grad, Grads, Variable
from lossscale.runtime.graphs import do_not_convert
from lossscale.runtime.loss_scale_warning import warn

#: Names in the checkpoint of a wrapped optimizer, ours or Keras's. Without a wrapper
#: an optimizer's checkpoint holds none of them.
_ONLY_IN_WRAPPED = {"inner_optimizer", "loss_scale", "dynamic_scale", "step_counter"}
#: Variables of float8 layers that hold magnitudes of scaled gradients.
_OF_SCALED_GRADIENTS = {"outputs_grad_scale", "outputs_grad_amax_history"}
#: Keras's mark of a variable of which a tape returns the new value, as of these.
_OVERWRITTEN = "overwrite_with_gradient"

_BARE_CHECKPOINT = """\
LossScaleOptimizer restored nothing from your checkpoint, which an optimizer without \
loss scaling has written. Restore the checkpoint into `optimizer.inner_optimizer`:

    tf.train.Checkpoint(optimizer=optimizer.inner_optimizer).read(path)
"""


class _AsKerasVariable(keras.Variable):
    """A variable of the loss scale as Keras lists it: it has no state of its own."""

    def __init__(self, variable: Variable, path: str) -> None:
        self._shown, self._shown_path, dtype = variable, path, variable.dtype
        zeros = np.zeros(variable.shape, dtype.as_numpy_dtype)
        super().__init__(zeros, dtype=dtype.name, trainable=False, autocast=False)

    def _initialize(self, value: Any) -> None:
        # Private, but Keras has no public way to wrap a variable that exists.
        del value
        self._value = self._shown

    def numpy(self) -> Any:
        # An array: Orbax saves no NumPy scalar that is a bool.
        return np.asarray(self._shown.numpy())

    # Keras 3.3 sets both names in its constructor: they are those of the variable.
    name = property(lambda self: str(self._shown.name), lambda *_: None)
    path = property(lambda self: self._shown_path, lambda *_: None)


class Keras3Dialect(Dialect):
    """The optimizers of Keras 3."""

    keras, optimizer_class = keras, keras.optimizers.Optimizer
    #: Private, but no public method turns the sum off (seen on Keras 3.3 to 3.15).
    summing_methods = ("_all_reduce_sum_gradients",)
    unscales_in_apply = True
    not_in_names = "/"

    def constructor_arguments(self, name: str) -> Dict[str, Any]:
        return {"name": name}

    def recognizes(self, inner_config: Dict[str, Any]) -> bool:
        return "loss_scale_factor" in inner_config

    def deserialize(self, config: Any, custom_objects: Optional[Any]) -> Any:
        return keras.saving.deserialize_keras_object(config, custom_objects)

    def applied_steps(self, inner: Any) -> Any:
        # From Keras 3.4 on, `iterations` is this variable divided by
        # `gradient_accumulation_steps`.
        for variable in inner.variables:
            if variable.name == "iteration":
                return variable
        return inner.iterations


@wrappers.wraps(keras.optimizers.Optimizer)
class Keras3LossScaleOptimizer(  # noqa: D101 - it has the public class's
    LossScaleOptimizer, keras.optimizers.LossScaleOptimizer
):
    # Under mixed_float16 `compile` wraps an optimizer unless Keras's own class is among
    # its bases. Nothing of that class's own loss scaling is used.
    __doc__ = LossScaleOptimizer.__doc__

    _dialect = Keras3Dialect()
    _looked_up: Set[str]
    #: The loss scale's variables, as `variables` lists them.
    _listed: List[Variable]
    #: The variables that it was built with, and whether some are float16.
    _built_for: List[Variable]
    _has_float16: bool
    #: Whether `build` was called before the variables were known: see `build`.
    _is_asked_to_build: bool

    def _show_variables(self) -> None:
        loss_scale, inner = self.loss_scale, self.inner_optimizer
        # Checkpoints of Keras's own wrapper use these names.
        if hasattr(loss_scale, "current_loss_scale"):
            self._track_trackable(loss_scale.current_loss_scale, "dynamic_scale")
        if hasattr(loss_scale, "good_steps"):
            self._track_trackable(loss_scale.good_steps, "step_counter")
        listed = []
        for key, variable in self._own_variables().items():
            variable.path = f"{self.name}/{key}"  # Keras saves variables by their path
            listed.append(_AsKerasVariable(variable, variable.path))
        # Of an optimizer that is built, for `apply` without variables. Not public.
        self._note_built(list(getattr(inner, "_trainable_variables", [])))
        self.__dict__.update(_listed=listed, _looked_up=set(), _is_asked_to_build=False)

    learning_rate = forwarded("learning_rate")
    iterations = forwarded("iterations")
    weight_decay = forwarded("weight_decay")
    clipnorm = forwarded("clipnorm")
    global_clipnorm = forwarded("global_clipnorm")
    clipvalue = forwarded("clipvalue")
    use_ema = forwarded("use_ema")
    ema_momentum = forwarded("ema_momentum")
    ema_overwrite_frequency = forwarded("ema_overwrite_frequency")
    gradient_accumulation_steps = forwarded("gradient_accumulation_steps")
    # Only a MultiOptimizer has these. Keras's callbacks set their learning rates.
    optimizers = forwarded("optimizers")

    # The inner optimizer owns the variables that these create, and saves them.
    add_variable = delegated("add_variable")
    add_variable_from_reference = delegated("add_variable_from_reference")
    add_optimizer_variables = delegated("add_optimizer_variables")
    exclude_from_weight_decay = delegated("exclude_from_weight_decay")
    #: Raises the inner optimizer's error: on TensorFlow Keras has no stateless apply.
    stateless_apply = delegated("stateless_apply")

    loss_scale_factor = answered(doc="Always None: see `loss_scale`.")

    @property
    def variables(self) -> List[Variable]:
        """The loss scale's variables, then the inner optimizer's."""
        return [*self._listed, *self.inner_optimizer.variables]

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the inner optimizer's slots for `variables`. Without any, nothing."""
        variables = list(variables)
        if not variables and not self.inner_optimizer.built:
            # Keras loads an .h5 file so, before it knows the variables of the layers.
            # An optimizer that is built for none cannot train any.
            self.__dict__.update(_is_asked_to_build=True)
            return
        # Keras's own build would create the state of its own loss scale.
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        self._note_built(variables)
        self._note_overwritten(self._built_for)
        self._engine.build(self._built_for)
        self.built = True

    def _note_built(self, variables: List[Variable]) -> None:
        # Asked once here, and not at each eager step.
        has_float16 = "float16" in [variable.dtype for variable in variables]
        self.__dict__.update(_built_for=variables, _has_float16=has_float16)

    @do_not_convert
    def apply(
        self,
        grads: Iterable[Grad],
        trainable_variables: Optional[Iterable[Variable]] = None,
    ) -> None:
        """Applies gradients, or skips them on all replicas. Call it on each replica.

        Args:
          grads: A list of gradients of the scaled loss, or a list of unscaled ones.
          trainable_variables: The variables of these gradients. None: those that the
            optimizer was built with.
        """
        replicas.check_can_apply()
        if "_variables" in self._looked_up and not self._looked_up & _ONLY_IN_WRAPPED:
            self._looked_up.clear()
            warn(_BARE_CHECKPOINT)
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:
                # A `tf.function` cannot initialize slots on several replicas.
                with tf.init_scope():
                    self.build(trainable_variables)
        inner, trained = self.inner_optimizer, trainable_variables or self._built_for
        new_values: Grads = []
        check = NO_CHECK
        are_new = [getattr(v, _OVERWRITTEN, False) for v in trained]
        if any(are_new):
            self._note_overwritten(trained)
            grads, new_values, check = _apart(grads, are_new)

        def apply_inner(true_grads: Grads, _: Any = None) -> None:
            with self._inner_sum.left_out(true_grads):
                if new_values:
                    pairs = zip(true_grads, new_values)
                    true_grads = [g if v is None else v for g, v in pairs]
                # Its own `apply_gradients` may centralize gradients.
                if true_grads and trainable_variables:
                    inner.apply_gradients(list(zip(true_grads, trainable_variables)))
                else:
                    inner.apply(true_grads, trainable_variables)

        if not inner.built or not [grad for grad in grads if grad is not None]:
            apply_inner(grads)  # what Keras does then, or its own error
            return
        if self._engine.communication_dtype is not None:
            # The inner optimizer may have been changed since the wrapper was made.
            self._dialect.refuse_own_sum(self._engine.communication_dtype, inner)
        self._engine._step(grads, trained, apply_inner, check=check)
        if self._has_float16 and "float16" in [v.dtype for v in trained]:
            float16_weights.warn_of_float16(self, grads, trained)

    def _note_overwritten(self, variables: List[Variable]) -> None:
        # A float8 layer divides gradients by such a scale, and multiplies them again:
        # they are scaled all the same.
        kinds = self._engine.division.uses.kinds
        for variable in [v for v in variables if getattr(v, _OVERWRITTEN, False)]:
            is_scaled = variable.name in _OF_SCALED_GRADIENTS
            kinds.note_variables([variable], Kind(SCALED if is_scaled else UNKNOWN))

    def apply_gradients(self, grads_and_vars: Any, name: Any = None) -> Any:
        """Applies pairs as `apply` does. Ignores `name`, and returns `iterations`."""
        del name
        pairs = list(grads_and_vars)
        if not pairs:
            return self.inner_optimizer.apply_gradients(pairs)  # Keras's own error
        self.apply(*zip(*pairs))
        return self.inner_optimizer.iterations

    def set_weights(self, weights: Any) -> None:
        """Sets the values of `variables`, or those of `inner_optimizer.variables`.

        Raises:
          ValueError: `weights` is neither list. Nothing has changed then.
        """
        values, inner, own = list(weights), self.inner_optimizer, self._own_variables()
        # Keras builds an optimizer for no variables before it reads an .h5 file of it.
        waits = not inner.built and self._is_asked_to_build
        if not inner.built and not (waits and all(map(files.is_of_h5, values))):
            inner.set_weights(values)  # Keras's own error
        # Slots that do not exist yet have no names to look for.
        there = [(each.name if waits else "", each) for each in inner.variables]
        for ours in (own, {}):
            listed = [*ours.items(), *there]
            if not files.fit(listed, values[: len(listed)] if waits else values):
                continue
            rest = values[len(ours) :]
            files.set_when_built(inner, rest) if waits else inner.set_weights(rest)
            for variable, value in zip(ours.values(), values):
                variable.assign(np.array(value))
            return
        files.refuse(values, own, len(inner.variables))

    def save_own_variables(self, store: Any) -> None:
        """Writes the loss scale's state. Keras saves the inner optimizer by itself."""
        for name, variable in self._own_variables().items():
            store[name] = variable.numpy()
        if "build" in vars(self.inner_optimizer):
            warn(files.NOT_BUILT)

    def load_own_variables(self, store: Any) -> None:
        """Reads the loss scale's state, also from files of other optimizers."""
        keys, variables = set(store.keys()), self._own_variables()
        files.refuse_holder(keys, variables)
        stored = {name: name for name in variables if name in keys}
        # Keras's wrapper has these numbers for the scale and the counter. The third
        # variable of an optimizer without a wrapper is a slot, which is no integer.
        if not stored and "3" in keys and np.array(store["2"]).dtype.kind == "i":
            theirs = {"current_loss_scale": "3", "good_steps": "2"}
            stored = {name: key for name, key in theirs.items() if name in variables}
        elif not stored and keys:
            inner = self.inner_optimizer
            inner.load_own_variables(store)
            # Next Keras loads the inner optimizer's own group, which such a file lacks,
            # and would warn of that.
            vars(inner)["load_own_variables"] = partial(files.load_what_is_there, inner)
        # All are read before the first is set: a damaged file changes nothing here.
        values = {name: np.array(store[key]) for name, key in stored.items()}
        listed = [(name, variables[name]) for name in values]
        if not files.fit(listed, list(values.values())):
            files.refuse(list(values.values()), variables, 0)
        for name, value in values.items():
            variables[name].assign(value)

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        # Private to TensorFlow, which calls it with each name that a checkpoint holds
        # for this optimizer. Without this method, a warning of `apply` is lost.
        if cached_dependencies is not None:
            self._looked_up.add(name)
        return super()._lookup_dependency(name, cached_dependencies)


def _apart(grads: Grads, are_new: List[bool]) -> Tuple[Grads, Grads, Check]:
    """Separates gradients from new values: each list has None for the other's.

    The new values are as the layer returned them, before `get_unscaled_gradients`
    divided them, with their check: a float8 layer bounds its gradients, so an infinity
    is often left only in its history. The worst numbers are those of both lists.
    """
    rest, values = list(grads), [None] * len(grads)
    for i, (grad, is_new) in enumerate(zip(grads, are_new)):
        if is_new and grad is not None:
            scaled = before(grad)
            rest[i], values[i] = None, grad if scaled is None else scaled.grad
    if all(value is None for value in values):
        return rest, values, NO_CHECK
    both = [g if v is None else v for v, g in zip(values, rest)]
    groups = [[i] for i in range(len(both))]
    check = checked(values)._replace(worst=lambda: worst_of_each(both, groups))
    return rest, values, check


# Other code tells an optimizer's kind by this name. Files find the class by the
# registered one.
Keras3LossScaleOptimizer.__name__ = "LossScaleOptimizer"
registry.register(keras, Keras3LossScaleOptimizer, "LossScaleOptimizer")
