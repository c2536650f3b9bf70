"""LossScaleEngine: the loss scaling of one optimizer, whatever framework it is of."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import tensorflow as tf

from lossscale import arguments
from lossscale.gradients.bundle import Bundle
from lossscale.gradients.check import NO_CHECK, Check, dense_part
from lossscale.optimizer import reduction as reductions
from lossscale.optimizer.pending import Host, PendingDivision
from lossscale.optimizer.record import NonfiniteGradient, Record, Spike
from lossscale.optimizer.step import Step
from lossscale.optimizer.uses import Uses
from lossscale.runtime import keras_versions, mode, replicas
from lossscale.runtime.aliases import Grad, Grads, Op, Results, Tensor, Variable
from lossscale.runtime.graphs import do_not_convert
from lossscale.scales import serialization
from lossscale.scales.base import LossScale
from lossscale.scales.guard import Guard
from lossscale.scales.ignored_losses import IgnoredLosses, count_ignored_steps

_DICT = """\
`loss` must be a tensor, a list of equal shapes or a function, got the dict {}. Add \
its losses up, scale_loss(sum(losses.values())), or scale each: \
{{name: scale_loss(each) for name, each in losses.items()}}."""


#: A loss scale with one of these methods of its own may take a dict.
_SCALES_ITSELF = {"scale", "scale_by"}
#: Arguments that no attribute changes: steps are made for what they were at first.
ARGUMENTS = ("loss_scale", "guard", "communication_dtype", "nonfinite_loss")


def refuse_attribute(name: str, value: Any) -> None:
    """Raises: an argument is set as an attribute, of an object or of a class."""
    shown = arguments.shown(value)
    given, instead = "..." if " of class " in shown else shown, ""
    if name in ("loss_scale", "guard"):
        instead = ". For another one in a run write optimizer.with_loss_scale(...), to "
        instead += "set the value optimizer.loss_scale.current_loss_scale.assign(...)"
    raise AttributeError(
        f"`{name}` must be an argument of the constructor, got {shown} for an "
        f"attribute. Write {name}={given} there, in a subclass "
        f"super().__init__(..., {name}={given}){instead}."
    )


class LossScaleEngine(tf.Module):
    """Loss scaling for an optimizer of your own, which need not be one of Keras.

    Make one for each optimizer, eagerly, in the strategy's scope. Then a step is:

    ```
    engine = lossscale.LossScaleEngine("dynamic")

    with tf.GradientTape() as tape:
        loss = ...
        scaled_loss = engine.scale_loss(loss)
    grads = tape.gradient(scaled_loss, variables)
    grads = engine.unscale(grads)                         # optional, to clip them
    engine.apply(grads, variables, apply_fn)              # calls apply_fn, or skips
    ```

    All rules are those of `LossScaleOptimizer`, which holds an engine. A checkpoint
    holds the loss scale and `applied_steps`; your optimizer saves its own slots.
    https://github.com/lossscale/lossscale/blob/main/docs/custom-loops.md has a program.

    Args:
      loss_scale: Whatever `lossscale.get` accepts, except None. Engines may share one:
        it counts a step as bad if the gradients of any of them were not finite.
      guard: A `Guard`, such as a `SpikeGuard`, which may leave out finite steps of this
        engine, or None.
      communication_dtype: `"float16"`, `"bfloat16"` or None: see `LossScaleOptimizer`.
        If it is given, `apply` adds the gradients up, and your function must not.
      nonfinite_loss: `"backoff"` or `"skip"`, as in `LossScaleOptimizer`.
      gather: A function, as in `LossScaleOptimizer`, or None.

    Raises:
      TypeError: An argument has the wrong type.
      ValueError: An argument is out of range, or does not fit the loss scale or the
        strategy.

    Source: Keras 3's `LossScaleOptimizer`:
      https://github.com/lossscale/lossscale/blob/main/docs/origins.md.
    """

    _is_replaced = False
    #: The wrapper that holds this engine. None: it is the user's own.
    _host: Optional[Host] = None
    #: The variable of applied steps, if nobody else counts them.
    _counted: Optional[Variable] = None

    def __init__(
        self,
        loss_scale: Any = "dynamic",
        *,
        guard: Any = None,
        communication_dtype: Any = None,
        nonfinite_loss: str = "backoff",
        gather: Optional[Callable[[Tensor], Tensor]] = None,
    ) -> None:
        super().__init__(name="loss_scale_engine")
        dtype = communication_dtype
        dtype = dtype.name if isinstance(dtype, tf.DType) else dtype
        check = arguments.or_none(arguments.choice, allowed=("float16", "bfloat16"))
        self.communication_dtype: Optional[str] = check("communication_dtype", dtype)
        if self.communication_dtype is not None:
            reductions.refuse_dtype(self.communication_dtype)
        arguments.choice("nonfinite_loss", nonfinite_loss, allowed=("backoff", "skip"))
        self.skips_losses = nonfinite_loss == "skip"
        if gather is not None:
            reductions.Workers(gather)  # raises if it cannot be
        self.gather = gather
        replicas.refuse_tpu()
        #: Its attribute is its key in checkpoints.
        self.guard: Optional[Guard] = serialization.get_guard(guard)
        self.loss_scale = self._usable(loss_scale)
        self._check_sharing()
        if self.guard is not None:
            self.guard._claim(self)
            self.loss_scale.keep_largest()
        host = self._host or Host(applied_steps=lambda: self._counted)
        self.division = PendingDivision(self.loss_scale, host)
        self.__dict__.update(_applied_steps=host.applied_steps)
        is_recorded = self.loss_scale.checks_gradients
        #: Why steps were skipped. What a SavedModel of a step holds must track it.
        self.record = Record(host.applied_steps if is_recorded else None, self.guard)
        self.record.kept.update(self.division.variables())
        #: Which bad losses the loss scale ignores. None: it ignores none.
        self.ignored_losses: Optional[IgnoredLosses] = None
        if self.skips_losses:
            count_ignored_steps(self.loss_scale)
            self.ignored_losses = IgnoredLosses(host.applied_steps)
            self.record.kept["bad_losses_counted"] = self.ignored_losses.counted
        if self._host is None:  # it counts steps itself, and tracks what it saves
            self.division.warnings.optimizer_class = type(self).__name__
            counted = replicas.new_variable("applied_steps", 0, tf.int64)
            self.__dict__.update(_counted=counted)
            # These names are their keys in checkpoints.
            for name, variable in {"applied_steps": counted, **self._saved()}.items():
                self._track_trackable(variable, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_set = name in vars(self) or callable(getattr(type(self), name, None))
        if name in ARGUMENTS and is_set:
            refuse_attribute(name, value)
        super().__setattr__(name, value)

    def _usable(self, loss_scale: Any) -> LossScale:
        usable = serialization.get_checked(loss_scale, self.guard)
        if usable is None:
            raise TypeError(
                "`loss_scale` must not be None. To train without a loss scale, use the "
                "inner optimizer as it is, or pass loss_scale=1."
            )
        if self.communication_dtype == "float16":
            serialization.check_it_checks(usable, "communication_dtype='float16'")
        if self.skips_losses:
            serialization.check_it_checks(usable, "nonfinite_loss='skip'")
        return usable

    def _check_sharing(self) -> None:
        """Raises if the loss scale's variables would depend on who else used it."""
        has_ignored = self.loss_scale.ignored_loss_steps is not None
        was_used = isinstance(self.loss_scale._observer, Uses)
        if has_ignored != self.skips_losses and (has_ignored or was_used):
            shown = '"skip"' if has_ignored else '"backoff"'
            raise ValueError(
                f"`nonfinite_loss` must be {shown} as in the other optimizer that uses "
                "or has used this loss scale, got the other one. Write "
                f"nonfinite_loss={shown}, or pass a new loss scale."
            )

    def _options(self) -> Dict[str, Any]:
        """Returns the arguments that are set, of those that most programs leave out."""
        options = {
            "communication_dtype": self.communication_dtype,
            "guard": self.guard,
            "gather": self.gather,
            "nonfinite_loss": "skip" if self.skips_losses else None,
        }
        return {name: value for name, value in options.items() if value is not None}

    def _state_variables(self) -> List[Variable]:
        """Returns the variables of the loss scale, then those of the guard."""
        of_guard = () if self.guard is None else self.guard.variables
        return [*self.loss_scale.variables, *of_guard]

    def _saved(self) -> Dict[str, Variable]:
        return {} if self.ignored_losses is None else self.ignored_losses.saved

    @property
    def applied_steps(self) -> Any:
        """How many steps were applied, an `int64` variable of shape `[]`."""
        return self._applied_steps and self._applied_steps()

    @do_not_convert
    def scale_loss(self, loss: Tensor) -> Any:
        """Begins a step, as `LossScaleOptimizer.scale_loss`."""
        if callable(loss):
            return lambda: self.scale_loss(loss())
        if isinstance(loss, dict) and not self.loss_scale._overridden & _SCALES_ITSELF:
            raise TypeError(_DICT.format(arguments.shown(loss)))
        if self._is_replaced:
            self._refuse()
        return self.loss_scale._scaled(loss, owner=self.division)

    @do_not_convert
    def unscale(self, grads: Iterable[Grad]) -> Grads:
        """As `LossScaleOptimizer.get_unscaled_gradients`."""
        if self._is_replaced:
            self._refuse()
        return self.division.unscale(list(grads))

    @do_not_convert
    def apply(
        self,
        grads: Iterable[Grad],
        variables: Iterable[Variable],
        apply_fn: Callable[[Grads, List[Variable]], Results],
    ) -> Op:
        """Calls `apply_fn`, or skips the step on all replicas. Call it on each replica.

        `applied_steps` rises after each call of `apply_fn`.

        Args:
          grads: A list of gradients of the scaled loss, or a list of unscaled ones.
          variables: The variables of these gradients.
          apply_fn: Is called with the list of true gradients and the list of variables,
            on each replica, in a branch of a graph, where it can create no variable. It
            adds the gradients up over the replicas, divides by their number if your
            loss did not, and changes the variables. It may return anything: in a graph
            the operations in it are run.

        Returns:
          In a graph, an operation that does it all. None in eager mode.

        Raises:
          ValueError: A gradient cannot be broadcast to its variable's shape, or the
            context is the cross-replica one.
        """
        replicas.check_can_apply()
        grads, variables = list(grads), list(variables)
        counted = self._counted
        if counted is None:
            return self._step(grads, variables, apply_fn)

        def apply_and_count(grads: Grads, variables: List[Variable]) -> Any:
            results = apply_fn(grads, variables)
            return [results, counted.assign_add(1, read_value=False)]

        return self._step(grads, variables, apply_and_count)

    def _step(
        self,
        grads: Grads,
        variables: List[Variable],
        apply_fn: Callable[[Grads, List[Variable]], Results],
        *,
        are_added: bool = True,
        aggregate: Optional[Callable[..., Tuple[Bundle, List[Variable]]]] = None,
        check: Check = NO_CHECK,
    ) -> Op:
        """Does what `apply` does, with what only our wrappers need.

        `are_added` tells whether `apply_fn` adds the gradients up over the replicas. If
        not, each replica applies its own, unless `aggregate` is given: it is called at
        every step, even one that is skipped, adds a bundle's gradients up, and returns
        them with their variables. `check` covers other values that `apply_fn` applies.
        """
        if self._is_replaced:
            self._refuse()
        replicas.refuse_mesh(variables)
        check_shapes(grads, variables)
        bundle = self.division.resolve(grads, variables)
        if check is not NO_CHECK:
            bundle = bundle.but(check=check & bundle.check)
        if aggregate is not None:
            bundle, variables = aggregate(bundle, variables)
        reduction: reductions.Reduction = reductions.EqualReplicas()
        if self.communication_dtype is not None:
            bundle = reductions.summed(bundle, self.communication_dtype)
        elif replicas.count() > 1:
            reduction = reductions.SeveralReplicas(are_added)
        if self.gather is not None:
            reduction = reductions.Workers(self.gather)
        elif self.skips_losses:
            reductions.refuse_own_losses()
        entry = self.record.entry_of(variables)
        mine = self.loss_scale, self.guard, self.ignored_losses, self.division
        step = Step(*mine, reduction, entry)
        return step.run(bundle, lambda true_grads: apply_fn(true_grads, variables))

    def build(self, variables: List[Variable]) -> None:
        """Notes the variables of all steps, and creates what the reports need.

        If the first step had to do it, a `tf.function` around it is traced twice.
        """
        replicas.refuse_mesh(variables)
        self.division.uses.kinds.note_variables(variables)
        self.record.entry_of(variables)

    def nonfinite_gradients(self) -> List[NonfiniteGradient]:
        """As `LossScaleOptimizer.nonfinite_gradients`."""
        return self.record.gradients()

    def nonfinite_loss(self) -> Optional[str]:
        """As `LossScaleOptimizer.nonfinite_loss`."""
        return self.record.loss()

    def last_spike(self) -> Optional[Spike]:
        """As `LossScaleOptimizer.last_spike`."""
        return self.record.spike()

    def _check_can_be_replaced(self) -> None:
        if self._is_replaced:
            self._refuse()
        if self.division.state is None or not mode.current().knows_values:
            raise RuntimeError(
                "`with_loss_scale` must be called eagerly, and under no "
                "ParameterServerStrategy, got a call in a graph or under one. Wrap a "
                "new inner optimizer there, and restore a checkpoint into it."
            )

    def _replace(self, other: LossScaleEngine) -> None:
        """Takes the place of another engine, which `_is_replaced`."""
        self.division.replace(other.division)
        self._take_level_of(other)
        self.record.kept.update(self.division.variables())
        for entry in other.record.entries:
            self.build(entry.variables)

    def _take_level_of(self, other: LossScaleEngine) -> None:
        for name, variable in self._saved().items():
            variable.assign(tf.convert_to_tensor(other._saved()[name]))

    def _refuse(self) -> None:
        raise RuntimeError(
            "This optimizer must not take steps after `with_loss_scale`, which has "
            "replaced it. Use the optimizer that it returned: write "
            "model.compile(optimizer.with_loss_scale(...), ...), and create each "
            "tf.function again."
        )


class EngineOfWrapper(LossScaleEngine):
    """The engine of a wrapper, which tracks what the engine saves."""

    def __init__(self, host: Host, *args: Any, **options: Any) -> None:
        self._host = host
        super().__init__(*args, **options)


def check_shapes(grads: Grads, variables: List[Variable]) -> None:
    """Raises if a gradient cannot be broadcast to its variable's shape.

    The inner optimizer would raise after the loss scale has counted the step. Only the
    inner optimizer knows whether it broadcasts gradients, so such shapes are allowed.
    """
    for grad, variable in zip(grads, variables):
        if isinstance(grad, tf.Tensor) and grad.shape == variable.shape:
            continue
        if not tf.is_tensor(grad):
            continue
        shape, whole = dense_part(grad).shape, tf.TensorShape(variable.shape)
        if isinstance(grad, tf.IndexedSlices):
            shape, whole = shape[1:], whole[1:]
        try:
            fits = tf.broadcast_static_shape(shape, whole).is_compatible_with(whole)
        except ValueError:
            fits = False
        if not fits:
            name = keras_versions.variable_name(variable)
            raise ValueError(
                "`grads` must have the shapes of their variables, got "
                f"{dense_part(grad).shape} for {name!r} of shape {variable.shape}. "
                "Pass each gradient with its own variable."
            )
