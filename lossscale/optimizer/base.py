"""LossScaleOptimizer: what the wrappers of all Kerases have in common."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import tensorflow as tf

from lossscale import arguments as checks
from lossscale.gradients.check import CLEAN, Check
from lossscale.optimizer import arguments, reduction, wrappers
from lossscale.optimizer.pending import Pending
from lossscale.optimizer.record import NonfiniteGradient, Record, Spike
from lossscale.optimizer.step import Step, aggregated
from lossscale.runtime import kerases, mode, op_callbacks, replicas
from lossscale.runtime.aliases import Grad, Grads, Op, Results, Tensor, Variable
from lossscale.runtime.autograph import do_not_convert
from lossscale.scales import serialization
from lossscale.scales.base import LossScale, unguarded


def forwarded(name: str) -> Any:
    """Returns a property that reads and sets the inner optimizer's attribute `name`."""

    def get_value(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def set_value(self: Any, value: Any) -> None:
        # Keras 3's constructor sets its defaults before `inner_optimizer` exists.
        if hasattr(self, "inner_optimizer"):
            setattr(self.inner_optimizer, name, value)

    return property(get_value, set_value, doc=f"The inner optimizer's `{name}`.")


def delegated(name: str) -> Callable[..., Any]:
    """Returns a method that calls the inner optimizer's method `name`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner_optimizer, name)(*args, **kwargs)

    call.__name__, call.__doc__ = name, f"Calls the inner optimizer's `{name}`."
    return call


def answered(*names: str, doc: str = "") -> Any:
    """Returns a property: the first of these attributes that the loss scale has."""
    doc = doc or f"The loss scale's `{'` or `'.join(names)}`, None if it has none."

    def get_value(self: Any) -> Any:
        scale = unguarded(self._loss_scale)
        return next((getattr(scale, n) for n in names if hasattr(scale, n)), None)

    def refuse(self: Any, value: Any) -> None:
        # Keras 3's constructor sets its defaults before the loss scale exists.
        if hasattr(self, "_loss_scale"):
            raise AttributeError(
                "The loss scale's settings must be arguments of LossScaleOptimizer, "
                f"got {value!r} for an attribute. Write LossScaleOptimizer("
                "inner_optimizer, DynamicLossScale(...)), or, to set the value, "
                "optimizer.loss_scale.current_loss_scale.assign(...)."
            )

    return property(get_value, refuse, doc=doc)


class LossScaleOptimizer:
    """An optimizer that scales the loss and skips the steps that overflowed.

    It wraps an optimizer of Keras 2 or Keras 3. Pass the wrapper to `model.compile`,
    which does not wrap it again:

    ```
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
    model.compile(optimizer, loss="mse")
    ```

    In a custom loop, scale the loss, then apply its gradients. To see or clip the true
    gradients, unscale them first:

    ```
    with tf.GradientTape() as tape:
        loss = ...
        scaled_loss = optimizer.scale_loss(loss)
    grads = tape.gradient(scaled_loss, variables)
    grads = optimizer.get_unscaled_gradients(grads)       # optional
    grads, _ = tf.clip_by_global_norm(grads, 1.0)         # only after the line above
    optimizer.apply_gradients(zip(grads, variables))
    ```

    A step is applied only if the gradients were finite on every replica when they were
    unscaled, and are finite after the replicas' gradients were added up. Otherwise
    nothing changes on any replica but the loss scale's own state: not even
    `iterations`. `FixedLossScale(S)` checks nothing: all steps are applied.

    `scale_loss` makes a division pending, `get_unscaled_gradients` divides, and
    `apply_gradients` divides if the division is still pending. Unscale all gradients of
    a loss, or none. Do not divide by hand: the library sees a division by a tensor of
    the loss scale in eager mode and within one `tf.function`, but not in its branches
    and loops (`tf.while_loop`), and not through a variable.

    Args:
      inner_optimizer: A Keras optimizer that no other loss scale optimizer wraps.
      loss_scale: Anything but None that `lossscale.get` takes: `"dynamic"`, a number,
        a `LossScale`, a `LossScaleManager` or a config. Optimizers may share one.
      name: The optimizer's name, a string.
      dynamic: Keras 2's argument, in the place of `loss_scale`: True means a
        `DynamicLossScale`, False means `FixedLossScale(initial_scale)`.
      initial_scale: An argument of both Kerases: the first value of the loss scale,
        `2.0**15` by default. With `dynamic=False` you must give it.
      dynamic_growth_steps: An argument of both Kerases: the loss scale doubles after
        this many finite steps in a row, 2000 by default.
      communication_dtype: `"float16"` or `"bfloat16"`, in which replicas exchange their
        gradients, half the bytes of float32. The wrapper sums them while they are still
        scaled, and unscales the sum in float32. None: their own dtypes.
      nonfinite_loss: What a loss does that was NaN or infinite on any replica before it
        was scaled, so that no loss scale helps. Its step is skipped and counted in any
        case. `"backoff"`: the loss scale is told of an overflow, as by TensorFlow's,
        Keras's and torch's. `"skip"`: it is told nothing, and stays as it is, with its
        counters of good and bad steps. If the gradients of a good loss overflowed on
        another replica, or the loss cannot be seen here (one `tf.function` scaled it,
        and another one applies its gradients), the step is an overflow.
      **kwargs: Keras 3's other arguments, such as `clipnorm`, at their defaults. Any
        other value is a `ValueError`: set it on the inner optimizer.

    By position you may give the arguments in Keras 2's order, `(optimizer, False,
    1024)`, or two numbers in Keras 3's: `(optimizer, 1024.0, 2000)`. One number alone
    is a fixed `loss_scale`.

    Raises:
      TypeError: An argument has the wrong type; `loss_scale` came together with one of
        the three arguments that take its place; or `inner_optimizer` belongs to Keras 3
        on another backend than TensorFlow.
      ValueError: A loss scale optimizer wraps `inner_optimizer` already; an argument is
        out of range; the strategy is a TPUStrategy; or `communication_dtype` is given
        and the inner optimizer sums gradients in its own way or accumulates them
        (Keras 3), the strategy is a ParameterServerStrategy, or a `FixedLossScale`
        checks no sum in float16. Also if the inner optimizer clips gradients that it
        computes itself, or has a `loss_scale_factor`.

    Source: names and meaning of Keras 2's and Keras 3's `LossScaleOptimizer` (tf_keras
    2.21 `src/mixed_precision/loss_scale_optimizer.py`, Keras 3.15
    `src/optimizers/loss_scale_optimizer.py`).
    """

    #: The wrapped optimizer. An attribute and no property, so that Keras 3 tracks it.
    inner_optimizer: Any
    iterations: Any
    name: str

    _loss_scale: LossScale
    _pending: Pending
    _record: Record
    _communication_dtype: Optional[str]
    #: Whether `nonfinite_loss` is "skip".
    _skips_losses: bool
    _inner_sum: reduction.InnerSum
    #: Whether `with_loss_scale` has returned another optimizer in the place of this.
    _is_replaced: bool = False
    #: The module of this Keras.
    _keras: Any
    #: Whether this Keras's own wrapper unscales in `apply_gradients`.
    _unscales_in_apply: bool
    #: The characters that this Keras allows in no name.
    _not_in_names: str = ""
    #: The base class of this Keras's optimizers, and their methods that prepare and sum
    #: gradients over the replicas. The last one sums.
    _optimizer_class: type
    _summing_methods: Tuple[str, ...]
    #: Constructs Keras's part of the wrapper, and calls `_attach`.
    _wrap: Callable[[Any, LossScale, Optional[str]], None]
    #: Makes an inner optimizer of its config and custom objects.
    _deserialize_inner: Callable[[Dict[str, Any], Optional[Dict[str, Any]]], Any]

    __signature__ = wrappers.Signature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Picks the wrapper for the Keras that the inner optimizer belongs to."""
        if not wrappers.is_open(cls):  # a Keras's wrapper; `copy` passes no arguments
            return super().__new__(cls)
        return super().__new__(wrappers.for_call(cls, LossScaleOptimizer, args, kwargs))

    @arguments.counts_positions
    def __init__(
        self,
        inner_optimizer: Any,
        loss_scale: Any = "dynamic",
        name: Optional[str] = None,
        dynamic_growth_steps: Optional[int] = None,
        *,
        dynamic: Optional[bool] = None,
        initial_scale: Optional[float] = None,
        communication_dtype: Optional[str] = None,
        nonfinite_loss: str = "backoff",
        **kwargs: Any,
    ) -> None:
        by_position = kwargs.pop("by_position")
        given = {
            "loss_scale": loss_scale,
            "name": name,
            "dynamic_growth_steps": dynamic_growth_steps,
            "dynamic": dynamic,
            "initial_scale": initial_scale,
            **kwargs,
        }
        wrappers.check_inner(inner_optimizer, type(self))
        dtype: Any = communication_dtype
        dtype = dtype.name if isinstance(dtype, tf.DType) else dtype
        check = checks.or_none(checks.choice, allowed=("float16", "bfloat16"))
        dtype = check("communication_dtype", dtype)
        # Keras's own __setattr__ works only after Keras's constructor has run, and
        # tracks objects under names that it makes up.
        checks.choice("nonfinite_loss", nonfinite_loss, allowed=("backoff", "skip"))
        skips_losses = nonfinite_loss == "skip"
        self.__dict__.update(_communication_dtype=dtype, _skips_losses=skips_losses)
        self._refuse_to_sum(inner_optimizer)
        ours = arguments.as_ours(given, by_position)
        name = ours["name"]
        checks.or_none(checks.text, without=self._not_in_names)("name", name)
        replicas.refuse_tpu()
        found = self._usable(ours["loss_scale"])
        self._wrap(inner_optimizer, found, name)
        self._take(inner_optimizer)

    def _usable(self, loss_scale: Any) -> LossScale:
        """Returns the loss scale that an argument stands for. Raises if it is none."""
        found = serialization.get(loss_scale)
        if found is None:
            raise TypeError(
                "`loss_scale` must not be None. To train without a loss scale, use the "
                "inner optimizer as it is, or pass loss_scale=1."
            )
        reduction.refuse_unchecked(self._communication_dtype, found)
        if self._skips_losses and not found.checks_gradients:
            raise ValueError(
                "`loss_scale` must be one that checks gradients with "
                f"nonfinite_loss='skip', got {found!r}, with which every step is "
                "applied. Write FixedLossScale(..., skip_nonfinite=True)."
            )
        if self._skips_losses:
            found._count_untold()
        return found

    def _take(self, inner_optimizer: Any) -> None:
        """Marks the inner optimizer as wrapped, and may sum gradients in its place."""
        wrappers.mark(inner_optimizer)
        is_left_out, method = (
            self._communication_dtype is not None,
            self._summing_methods[-1],
        )
        inner_sum = reduction.InnerSum(inner_optimizer, method, is_left_out)
        self.__dict__.update(_inner_sum=inner_sum)

    def _attach(self, loss_scale: LossScale) -> None:
        pending = Pending(loss_scale, self._unscales_in_apply)
        record = Record(pending.kept(), lambda: self.applied_steps)
        self.__dict__.update(_loss_scale=loss_scale, _pending=pending, _record=record)
        track: Any = self._track_trackable  # type: ignore[attr-defined] # Keras has it
        track(loss_scale, "loss_scale")
        track(self._record, "faults")

    def __repr__(self) -> str:
        inner = getattr(self, "inner_optimizer", None)
        loss_scale = getattr(self, "_loss_scale", None)
        dtype = getattr(self, "_communication_dtype", None)
        more = f", communication_dtype={dtype!r}" if dtype is not None else ""
        if getattr(self, "_skips_losses", False):
            more += ", nonfinite_loss='skip'"
        return f"LossScaleOptimizer({type(inner).__name__}, {loss_scale!r}{more})"

    @property
    def loss_scale(self) -> LossScale:
        """The `LossScale`. Where a number is expected, it acts as its current value."""
        return self._loss_scale

    @property
    def applied_steps(self) -> Any:
        """How many of the steps that the loss scale counts were applied.

        This is `iterations`, except under Keras 3's `gradient_accumulation_steps`: then
        each batch is a step of the loss scale, and `iterations` counts updates of
        several batches. A variable or a tensor: read it with `.numpy()`.
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
        self._check_not_replaced()
        with self._pending.scales():
            return self._loss_scale.scale(loss)

    @do_not_convert
    def get_unscaled_gradients(self, grads: Iterable[Grad]) -> Grads:
        """Returns the true gradients, and remembers whether they were finite.

        You may look at them and clip them. You may unscale several lists of gradients
        of one loss.

        Args:
          grads: A list of gradients of the scaled loss. `None`s stay.

        Returns:
          A list of gradients. Each has the dtype of its scaled gradient.

        Raises:
          ValueError: One of these gradients was unscaled already. A gradient that came
            through another `tf.function` is not recognized.
        """
        self._check_not_replaced()
        return self._pending.unscale(list(grads))

    def get_scaled_loss(self, loss: Tensor) -> Any:
        """Like `scale_loss`. Keras 2's name."""
        return self.scale_loss(loss)

    def nonfinite_gradients(self) -> List[NonfiniteGradient]:
        """Returns the gradients that were not finite at the last skipped step.

        It covers all replicas of this process, before clipping; with
        `communication_dtype`, also their sum. It reads the device: call it between
        steps.

        Returns:
          A list of `NonfiniteGradient`. It is empty if no step was skipped, if a loss
          scale of your own skipped finite gradients, in a `tf.compat.v1` graph, or if
          the overflow was clipped away.
        """
        return self._record.gradients()

    def nonfinite_loss(self) -> Optional[str]:
        """Returns whether the unscaled loss of the last skipped step was inf or NaN.

        If it was, no loss scale helps. Call it between steps.

        Returns:
          `"inf"` or `"nan"`. None if the loss was finite or is not known, as where one
          `tf.function` scaled it and another one applied the gradients.
        """
        return self._record.loss()

    def last_spike(self) -> Optional[Spike]:
        """Returns the last spike: a step that a `SpikeGuard` skipped for its size.

        It covers this process. Call it between steps.

        Returns:
          A `Spike`. None if no step was skipped for its size.
        """
        return self._record.spike()

    dynamic = answered("_can_change", doc="Whether the loss scale can change.")
    initial_scale = answered("initial_loss_scale", "loss_scale_value")
    dynamic_growth_steps = answered("increment_period")
    dynamic_counter = answered("good_steps")
    step_counter = answered("good_steps")
    dynamic_scale = answered("current_loss_scale")

    def __setattr__(self, name: str, value: Any) -> None:
        is_ours = getattr(type(self), name, None) is LossScaleOptimizer.loss_scale
        if is_ours:  # Keras 3 would track the value before the property refuses it
            raise AttributeError(
                f"`loss_scale` must not be set, got {value!r} for the attribute. Write "
                "optimizer = optimizer.with_loss_scale(...), or, to set the value, "
                "optimizer.loss_scale.current_loss_scale.assign(...)."
            )
        # Ask the class first: reading a legacy optimizer's `iterations` creates it.
        is_ours = name.startswith("_") or hasattr(type(self), name)
        is_ours = is_ours or hasattr(self, name)
        if not is_ours and hasattr(getattr(self, "inner_optimizer", None), name):
            raise AttributeError(
                f"`{name}` must be set on the inner optimizer, got {value!r} for the "
                f"wrapper. Write optimizer.inner_optimizer.{name} = ..."
            )
        super().__setattr__(name, value)

    @property
    def communication_dtype(self) -> Optional[str]:
        """The dtype in which replicas exchange gradients. None: the gradients' own."""
        return self._communication_dtype

    def _refuse_to_sum(self, inner_optimizer: Any) -> None:
        """Raises if the inner optimizer rules `communication_dtype` out."""
        dtype = self._communication_dtype
        if dtype is not None:
            way = self._own_way_to_sum(inner_optimizer)
            reduction.refuse_impossible(dtype, inner_optimizer, way)

    @classmethod
    def _own_way_to_sum(cls, inner: Any) -> Optional[str]:
        """Says how an optimizer sums gradients, in words that complete an error.

        None: as its base class does, by a method that the wrapper can replace.
        """
        for each in reduction.parts(inner):
            steps = getattr(each, "gradient_accumulation_steps", None)  # Keras 3's
            if steps:
                return (
                    f"has gradient_accumulation_steps={steps!r}: Keras sums "
                    "accumulated gradients within its own update. Set it to None and "
                    "accumulate in your loop, or leave out `communication_dtype`"
                )
        if cls._has_own_aggregation(inner):
            way = "sums them by a method or an argument of its own"
            return f"{way}. Leave out `communication_dtype`"
        return None

    @classmethod
    def _has_own_aggregation(cls, inner: Any) -> bool:
        """Tells whether an optimizer, or one in it, sums gradients in its own way."""
        base = cls._optimizer_class
        return any(
            getattr(type(each), name, None) is not getattr(base, name, None)
            for each in reduction.parts(inner)
            for name in cls._summing_methods
        )

    def _apply_or_skip(
        self,
        grads: Grads,
        variables: List[Variable],
        apply: Callable[[Grads, List[Variable]], Results],
        aggregates: bool = True,
        aggregate: Optional[Callable[[List[Any]], Any]] = None,
        *,
        check: Check = CLEAN,
    ) -> Op:
        """Applies `grads` to `variables`, or skips them on all replicas.

        `aggregates` tells whether `apply` or this wrapper sums them across replicas. If
        not, the user's function `aggregate` may. `check` is of what else is applied.
        """
        self._check_not_replaced()
        self._note_trained(variables)
        bundle = self._pending.resolve(grads)
        bundle = bundle.but(check=check & bundle.check)
        if aggregate is not None:
            bundle, variables = aggregated(bundle, variables, aggregate)
        # The inner optimizer may have been changed since the wrapper was made.
        self._refuse_to_sum(self.inner_optimizer)
        dtype = self._communication_dtype if replicas.count() > 1 else None
        if dtype is not None:
            with op_callbacks.paused():
                bundle = reduction.summed(bundle, dtype)
        reduces = reduction.reduction_for(aggregates, dtype is not None)
        entry = self._record.entry_of(variables, self._loss_scale)
        step = Step(self._pending, reduces, entry, self._skips_losses)
        return step.run(bundle, lambda grads: apply(grads, variables))

    def _trains(self, variables: List[Variable]) -> None:
        """Notes the variables at build."""
        self._note_trained(variables)
        self._record.entry_of(variables, self._loss_scale)

    def _note_trained(self, variables: List[Variable]) -> None:
        tensors = map(kerases.tensor_of, variables)
        self._pending.observer.kinds.note_variables(tensors)

    @classmethod
    def from_config(
        cls, config: Dict[str, Any], custom_objects: Optional[Dict[str, Any]] = None
    ) -> Any:
        """Returns a new optimizer with the arguments of another one, and a new state.

        Args:
          config: What `get_config` returned: of this wrapper, or of the wrapper that
            Keras 2, Keras 3 or TensorFlow 2.0 to 2.3 has.
          custom_objects: A dict from names to your own classes. A class that is
            registered with Keras needs no entry.

        Raises:
          TypeError: `config` is not the config of one of these wrappers.
        """
        config = arguments.config_as_ours(config)
        wrapper: Any = wrappers.for_config(config) if wrappers.is_open(cls) else cls
        # Keras 2 changes the config that it deserializes. The caller's stays as it is.
        config = arguments.plain(config)
        inner, loss_scale = config.pop("inner_optimizer"), config.pop("loss_scale")
        if isinstance(inner, dict):
            inner = wrapper._deserialize_inner(inner, custom_objects)
        if isinstance(loss_scale, dict):
            loss_scale = serialization.deserialize(loss_scale, custom_objects)
        return cls._of(inner, loss_scale, config)

    @classmethod
    def _of(cls, inner: Any, loss_scale: Any, others: Dict[str, Any]) -> Any:
        # The user's own class, if `wrappers.for_call` derived `cls` from it.
        asked: Any = getattr(cls, "_asked_class", cls)
        names = set(inspect.signature(asked).parameters)
        if "loss_scale" in names or not names & {*arguments.OF_THE_SCALE}:
            return asked(inner, loss_scale, **others)
        # It derived from Keras's own wrapper once, and from ours now. Its constructor
        # takes Keras's arguments in the place of `loss_scale`.
        found: Any = serialization.get(loss_scale)
        given = {**others, **arguments.as_theirs(found)}
        return asked(inner, **{n: v for n, v in given.items() if n in names})

    @classmethod
    def from_keras(
        cls,
        optimizer: Any,
        *,
        communication_dtype: Optional[str] = None,
        nonfinite_loss: str = "backoff",
    ) -> Any:
        """Returns an optimizer that goes on from the state of Keras's own wrapper.

        It takes over the inner optimizer, in the middle of a run if you like. Do not
        use Keras's wrapper after this call: it would change the same weights. Call
        `from_keras` eagerly, in the scope of the strategy that trains the model:

        ```
        optimizer = lossscale.LossScaleOptimizer.from_keras(model.optimizer)
        model.compile(optimizer, loss="mse")
        ```

        Args:
          optimizer: Keras's own `LossScaleOptimizer`, of Keras 2 or of Keras 3.
          communication_dtype: As in the constructor.
          nonfinite_loss: As in the constructor.

        Returns:
          A `LossScaleOptimizer` with the same loss scale, count of finite steps and
          arguments.

        Raises:
          TypeError: `optimizer` is not Keras's own `LossScaleOptimizer`.
          ValueError: Its loss scale has become zero or infinite, as Keras 3's can.
          RuntimeError: You called it in a graph, which cannot read the state.
        """
        wrappers.check_keras_own(optimizer)
        loss_scale = arguments.loss_scale_of(optimizer)
        inner = optimizer.inner_optimizer
        wrappers.for_optimizer(inner)._release(inner)
        dtype = communication_dtype
        others = {} if dtype is None else {"communication_dtype": dtype}
        if nonfinite_loss != "backoff":
            others["nonfinite_loss"] = nonfinite_loss
        return cls._of(inner, loss_scale, others)

    def with_loss_scale(self, loss_scale: Any) -> Any:
        """Returns an optimizer that goes on from this one with another loss scale.

        It takes over the inner optimizer, and so `iterations`, slots and the learning
        rate. Use it in the place of this one, which raises an error from now on. So
        compile the model with it, and make functions and `tf.train.Checkpoint`s anew:

        ```
        scale = lossscale.FixedLossScale(float(optimizer.loss_scale), True)
        optimizer = optimizer.with_loss_scale(scale)
        model.compile(optimizer, loss="mse")
        ```

        A `tf.function` that was traced before goes on with the old loss scale: it
        scales and unscales by that one. To set the value of a dynamic loss scale,
        assign it: `optimizer.loss_scale.current_loss_scale.assign(1024.0)`. That needs
        no new optimizer, and functions that were traced before read it.

        Call it eagerly, between two steps, in the scope of the strategy that trains the
        model. Optimizers that share a loss scale share the new one if you pass it to
        `with_loss_scale` of each.

        Args:
          loss_scale: As in the constructor. `SpikeGuard(optimizer.loss_scale)` goes on
            with the state of the old one.

        Returns:
          A `LossScaleOptimizer` of the same class with the same name and
          `communication_dtype`. The record of skipped steps begins anew.

        Raises:
          TypeError: `loss_scale` is no loss scale.
          ValueError: `loss_scale` is out of range, or is a `FixedLossScale` that checks
            nothing with `communication_dtype`.
          RuntimeError: You called it in a graph or under a ParameterServerStrategy, or
            this optimizer was replaced already.
        """
        self._check_not_replaced()
        inner = self.inner_optimizer
        if self._pending.state is None or not mode.current().knows_values:
            raise RuntimeError(
                "`with_loss_scale` must be called eagerly, and under no "
                "ParameterServerStrategy, got a call in a graph or under one. Wrap a "
                "new inner optimizer there, and restore a checkpoint into it."
            )
        loss_scale = self._usable(loss_scale)
        others = {"name": self.name, **self._own_options()}
        self._release(inner)
        try:
            other = self._of(inner, loss_scale, others)
        except BaseException:
            self._take(inner)
            raise
        other._pending.go_on_from(self._pending)
        other._record._kept.update(other._pending.kept())
        for entry in self._record._entries:
            other._trains(entry.variables)
        self.__dict__.update(_is_replaced=True)
        return other

    def _check_not_replaced(self) -> None:
        if self._is_replaced:
            raise RuntimeError(
                "This LossScaleOptimizer must not take steps after `with_loss_scale`, "
                "which has returned another one in its place. Use that one: write "
                "model.compile(optimizer.with_loss_scale(...), ...), and make each "
                "tf.function anew."
            )

    @classmethod
    def _release(cls, inner_optimizer: Any) -> None:
        """Removes what a wrapper has left on its inner optimizer."""
        wrappers.mark(inner_optimizer, wrapped=False)
        reduction.restore(inner_optimizer, cls._summing_methods[-1])

    def get_config(self) -> Dict[str, Any]:
        """Returns the constructor's arguments as a dict that JSON can hold."""
        config = {
            "name": self.name,
            "inner_optimizer": self._keras.optimizers.serialize(self.inner_optimizer),
            "loss_scale": serialization.serialize(self.loss_scale),
            **self._own_options(),
        }
        plain: Dict[str, Any] = arguments.plain(config)
        return plain

    def _own_options(self) -> Dict[str, Any]:
        """Returns what older releases do not know, if it is set: else they read it."""
        dtype = self._communication_dtype
        options = {} if dtype is None else {"communication_dtype": dtype}
        return {**options, "nonfinite_loss": "skip"} if self._skips_losses else options

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        # Keras 3 would save and load each optimizer by itself. If two optimizers share
        # a loss scale, each would get a copy of its own.
        inner = copy.deepcopy(self.inner_optimizer, memo)
        self._release(inner)
        loss_scale = copy.deepcopy(self._loss_scale, memo)
        return type(self)(inner, loss_scale, name=self.name, **self._own_options())
