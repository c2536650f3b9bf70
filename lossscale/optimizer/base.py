"""LossScaleOptimizer: what the wrappers for Keras 2 and Keras 3 have in common."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Callable, Dict, Iterable, List, Optional

from lossscale import arguments
from lossscale.optimizer import engine as engines
from lossscale.optimizer import files, keras_arguments, wrappers
from lossscale.optimizer.dialect import MARK, Dialect, InnerSum, answered
from lossscale.optimizer.engine import ARGUMENTS, refuse_attribute
from lossscale.optimizer.pending import Host
from lossscale.optimizer.record import NonfiniteGradient, Spike
from lossscale.runtime import keras_versions, mode
from lossscale.runtime.aliases import Grad, Grads, Tensor, Variable
from lossscale.scales import serialization
from lossscale.scales.base import LossScale
from lossscale.scales.guard import Guard
from lossscale.scales.variables import HELD_ANOTHER

#: For `with_loss_scale`: the guard stays.
KEPT = "kept"


class LossScaleOptimizer:
    """An optimizer that scales the loss and skips the steps that overflowed.

    Use it in float16, where small gradients become zero unless the loss is scaled. It
    wraps an optimizer of Keras 2 or Keras 3. For `fit`, compile the model with it:

    ```
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
    model.compile(optimizer, loss="mse")  # does not wrap it again
    ```

    In a custom loop, call `scale_loss`, and apply the gradients, which unscales them.
    To clip them, call `get_unscaled_gradients` first:
    https://github.com/lossscale/lossscale/blob/main/docs/custom-loops.md.

    A step is applied only if the gradients were finite on every replica when they were
    unscaled, and their sum over the replicas is finite. Otherwise nothing changes on
    any replica but the loss scale's own state. Without a guard, a number checks
    nothing: write `FixedLossScale(S, skip_nonfinite=True)`.

    Args:
      inner_optimizer: A Keras optimizer that is not wrapped yet.
      loss_scale: What `lossscale.get` accepts: a name such as `"dynamic"`, a
        `LossScale`, or a number. Several optimizers may share one.
      name: A string, the optimizer's name.
      guard: A `Guard`, such as a `SpikeGuard`, which may leave finite steps out, or
        None.
      dynamic: A boolean, Keras 2's argument: False means a fixed `initial_scale`.
      initial_scale: A number, Keras's name for the first loss scale.
      dynamic_growth_steps: An integer, Keras's name for `increment_period`.
      communication_dtype: `"float16"` or `"bfloat16"`, in which replicas exchange
        gradients (https://github.com/lossscale/lossscale/blob/main/docs/replicas.md),
        or None: their own dtypes.
      nonfinite_loss: `"backoff"` or `"skip"`: whether the loss scale falls at a skipped
        step whose unscaled loss was NaN or infinite
        (https://github.com/lossscale/lossscale/blob/main/docs/bad-batches.md).
      gather: A function that lets workers agree which `tf.distribute` does not know, or
        None. It is given a `float32` vector, and returns those of all workers as the
        rows of a matrix: `lambda x: hvd.allgather(x[tf.newaxis])`. It is in no config.
      **kwargs: Keras 3's other arguments, at their defaults.

    Attributes:
      inner_optimizer: The wrapped optimizer. Its settings, such as `learning_rate`, are
        the wrapper's, too.
      iterations: Integer variable of shape `[]`, how many updates were applied.

    Raises:
      TypeError: An argument has the wrong type, or is given under two names.
      ValueError: An argument is out of range, or `inner_optimizer` cannot be wrapped.

    Source: Keras's own `LossScaleOptimizer`:
      https://github.com/lossscale/lossscale/blob/main/docs/origins.md.
    """

    #: The wrapped optimizer. An attribute and no property, so that Keras 3 tracks it.
    inner_optimizer: Any
    iterations: Any
    name: str
    #: These are set in `__dict__`, or Keras would track what is in them.
    _engine: engines.LossScaleEngine
    _inner_sum: InnerSum
    _given_name: str
    #: Keras 2's own wrapper has it, and programs read it.
    _loss_scale: LossScale
    _dialect: Dialect

    __signature__ = wrappers.Signature()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ARGUMENTS:
            value = vars(cls).get(name)
            if value is not None and not hasattr(value, "__get__"):
                refuse_attribute(name, value)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if not wrappers.is_open(cls):  # a Keras's wrapper; `copy` passes no arguments
            return super().__new__(cls)
        return super().__new__(wrappers.for_call(cls, LossScaleOptimizer, args, kwargs))

    @keras_arguments.counts_positions
    def __init__(
        self,
        inner_optimizer: Any,
        loss_scale: Any = "dynamic",
        name: Optional[str] = None,
        dynamic_growth_steps: Optional[int] = None,
        *,
        dynamic: Optional[bool] = None,
        initial_scale: Optional[float] = None,
        guard: Any = None,
        communication_dtype: Optional[str] = None,
        nonfinite_loss: str = "backoff",
        gather: Optional[Callable[[Tensor], Tensor]] = None,
        **kwargs: Any,
    ) -> None:
        by_position = kwargs.pop("by_position")
        passed = {
            "loss_scale": loss_scale,
            "name": name,
            "dynamic_growth_steps": dynamic_growth_steps,
            "dynamic": dynamic,
            "initial_scale": initial_scale,
            **kwargs,
        }
        dialect = self._dialect
        wrappers.check_inner(inner_optimizer, type(self))
        dialect.refuse_own_sum(communication_dtype, inner_optimizer)
        ours = keras_arguments.as_ours(passed, by_position)
        name = ours["name"]
        arguments.or_none(arguments.text, without=dialect.not_in_names)("name", name)
        # No partial: `copy` would copy the optimizer in it once more, and fail.
        count = lambda: dialect.applied_steps(inner_optimizer)  # noqa: E731
        engine = engines.EngineOfWrapper(
            Host(count, unscales_in_apply=dialect.unscales_in_apply),
            ours["loss_scale"],
            guard=guard,
            communication_dtype=communication_dtype,
            nonfinite_loss=nonfinite_loss,
            gather=gather,
        )
        files.check_names(engine._state_variables())
        name = name or "loss_scale_optimizer"
        construct: Any = super().__init__  # of Keras's own wrapper
        construct(inner_optimizer, **dialect.constructor_arguments(name))
        self.__dict__.update(_engine=engine, _given_name=name)
        self.__dict__.update(_loss_scale=engine.loss_scale)
        self._take_inner()
        self._show_variables()

    def _show_variables(self) -> None:
        """Shows its variables to this Keras, when it is made."""

    def _take_inner(self) -> None:
        """Marks the inner optimizer as wrapped, and tracks what checkpoints hold."""
        engine, inner = self._engine, self.inner_optimizer
        setattr(inner, MARK, True)
        leaves_out = engine.communication_dtype is not None
        inner_sum = InnerSum(inner, self._dialect.summing_methods[-1], leaves_out)
        self.__dict__.update(_inner_sum=inner_sum)
        tracked = {"loss_scale": engine.loss_scale, "faults": engine.record}
        tracked.update({} if engine.guard is None else {"guard": engine.guard})
        track: Any = self._track_trackable  # type: ignore[attr-defined] # Keras has it
        for key, each in {**tracked, **engine._saved()}.items():
            track(each, key)

    def _own_variables(self) -> Dict[str, Variable]:
        """Returns what files hold of the loss scale and the guard, by name."""
        # Asked each time: a loss scale of the user's may create some at its first step.
        variables = {files.plain_name(v): v for v in self._engine._state_variables()}
        variables.update(self._engine._saved())
        names = self._dialect.listed_last
        last = {name: variables.pop(name) for name in names if name in variables}
        return {**variables, **last}

    def __repr__(self) -> str:
        inner = getattr(self, "inner_optimizer", None)
        engine = getattr(self, "_engine", None)  # Keras's constructor may print it
        listed = [type(inner).__name__, repr(engine and engine.loss_scale)]
        options = engine._options() if engine else {}
        listed += [f"{name}={value!r}" for name, value in options.items()]
        return f"LossScaleOptimizer({', '.join(listed)})"

    @property
    def engine(self) -> engines.LossScaleEngine:
        """The `LossScaleEngine` that scales, unscales and decides about steps."""
        return self._engine

    @property
    def loss_scale(self) -> LossScale:
        """The `LossScale`. Where a number is expected, it acts as its current value."""
        return self._engine.loss_scale

    @property
    def guard(self) -> Optional[Guard]:
        """The `Guard` that may leave out finite steps, or None."""
        return self._engine.guard

    @property
    def applied_steps(self) -> Any:
        """How many of the steps that the loss scale counts were applied.

        Under Keras 3's `gradient_accumulation_steps` each batch is such a step, while
        `iterations` counts updates. A variable or a tensor: read it with `.numpy()`.
        """
        return self._dialect.applied_steps(self.inner_optimizer)

    def scale_loss(self, loss: Tensor) -> Any:
        """Returns `loss` times the loss scale, and begins a step.

        Args:
          loss: A tensor of any shape, or a function that returns one. TensorFlow makes
            one tensor of a list or tuple of losses, which must have the same shape.

        Returns:
          A tensor, `float32` or wider, or a function that returns one.

        Raises:
          TypeError: `loss` is a dict.
        """
        return self._engine.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Iterable[Grad]) -> Grads:
        """Returns the true gradients, and remembers whether they were finite.

        You may clip them. You may unscale several lists of gradients of one loss.

        Args:
          grads: A list of gradients of the scaled loss. `None`s stay.

        Returns:
          A list of gradients. Each has the dtype of its scaled gradient.

        Raises:
          ValueError: One of these gradients was unscaled already. A gradient that came
            through another `tf.function` is not recognized.
        """
        return self._engine.unscale(grads)

    def get_scaled_loss(self, loss: Tensor) -> Any:
        """Like `scale_loss`. Keras 2's name."""
        return self.scale_loss(loss)

    def nonfinite_gradients(self) -> List[NonfiniteGradient]:
        """Returns the gradients that were not finite at the last step skipped for that.

        It covers all replicas of this process, before clipping; with
        `communication_dtype`, also their sum. Call it between steps.

        Returns:
          A list of `NonfiniteGradient`. It is empty if no step was skipped for that, in
          a `tf.compat.v1` graph, or if the overflow was clipped away.
        """
        return self._engine.nonfinite_gradients()

    def nonfinite_loss(self) -> Optional[str]:
        """Returns `"inf"` or `"nan"` if the last skipped step's unscaled loss was that.

        Then a lower scale seldom helps. None: the loss was finite, or the gradients are
        not known to be those of this loss, as if another `tf.function` applied them.
        Call it between steps.
        """
        return self._engine.nonfinite_loss()

    def last_spike(self) -> Optional[Spike]:
        """Returns the last step that a `SpikeGuard` skipped for its size, or None.

        It covers this process. Call it between steps.
        """
        return self._engine.last_spike()

    dynamic = answered("_can_change", doc="Whether the loss scale can change.")
    initial_scale = answered("initial_loss_scale", "loss_scale_value")
    dynamic_growth_steps = answered("increment_period")
    dynamic_counter = answered("good_steps")
    step_counter = answered("good_steps")
    dynamic_scale = answered("current_loss_scale")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ARGUMENTS and hasattr(type(self), name):
            # Keras 3 would track the value before a property refuses it.
            refuse_attribute(name, value)
        # Ask the class first: reading a legacy optimizer's `iterations` creates it.
        is_ours = name.startswith("_") or hasattr(type(self), name)
        is_ours = is_ours or hasattr(self, name)
        if not is_ours and hasattr(getattr(self, "inner_optimizer", None), name):
            raise AttributeError(
                f"`{name}` must be set on the inner optimizer, got "
                f"{arguments.shown(value)} for the wrapper. Write "
                f"optimizer.inner_optimizer.{name} = ..."
            )
        super().__setattr__(name, value)

    @property
    def communication_dtype(self) -> Optional[str]:
        """The dtype in which replicas exchange gradients. None: the gradients' own."""
        return self._engine.communication_dtype

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
        if cls.__module__.startswith("horovod."):
            raise TypeError(
                "Horovod's optimizer must not wrap a LossScaleOptimizer, got one. "
                "Write LossScaleOptimizer(hvd.DistributedOptimizer(inner_optimizer))."
            )
        config = keras_arguments.config_as_ours(config)
        wrapper: Any = wrappers.for_config(config) if wrappers.is_open(cls) else cls
        config = keras_arguments.plain(config)  # a copy, which Keras 2 changes
        inner, loss_scale = config.pop("inner_optimizer"), config.pop("loss_scale")
        if isinstance(inner, dict):
            inner = wrapper._dialect.deserialize(inner, custom_objects)
        if isinstance(loss_scale, dict):
            if "loss_scale" in (loss_scale.get("config") or {}):
                raise ValueError(HELD_ANOTHER)
            loss_scale = serialization.deserialize(loss_scale, custom_objects)
        if isinstance(config.get("guard"), dict):
            guard = serialization.deserialize(config["guard"], custom_objects)
            config["guard"] = guard
        return cls._of(inner, loss_scale, config)

    @classmethod
    def _of(cls, inner: Any, loss_scale: Any, others: Dict[str, Any]) -> Any:
        # The user's own class, if `wrappers.for_call` derived `cls` from it.
        asked: Any = getattr(cls, "_asked_class", cls)
        parameters = inspect.signature(asked).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        # Or it was written to derive from Keras's own wrapper, and takes its arguments.
        theirs = {*parameters} & {*keras_arguments.OF_THE_SCALE}
        is_ours = "loss_scale" in parameters or not theirs
        for name, value in {} if takes_all else others.items():
            if name not in parameters and (is_ours or name != "name"):
                raise TypeError(
                    f"`__init__` of {asked.__name__} must take `{name}`, got {name}="
                    f"{arguments.shown(value)} of an optimizer that is copied, "
                    "replaced or loaded. Give it **kwargs, and write "
                    "super().__init__(inner_optimizer, loss_scale, **kwargs)."
                )
        if is_ours:
            return asked(inner, loss_scale, **others)
        resolved: Any = serialization.get(loss_scale)
        passed = {**others, **keras_arguments.as_theirs(resolved)}
        kept = {n: v for n, v in passed.items() if takes_all or n in parameters}
        made = asked(inner, **kept)
        if mode.current().knows_values:
            for new, given in zip(made.loss_scale.variables, resolved.variables):
                new.assign(given)
        return made

    @classmethod
    def from_keras(
        cls,
        optimizer: Any,
        *,
        guard: Any = None,
        communication_dtype: Optional[str] = None,
        nonfinite_loss: str = "backoff",
    ) -> Any:
        """Returns an optimizer that continues from the state of Keras's own wrapper.

        It takes over the inner optimizer, also in the middle of a run: do not use
        Keras's wrapper after that. Call it eagerly, in the scope of the strategy:

        ```
        optimizer = lossscale.LossScaleOptimizer.from_keras(model.optimizer)
        model.compile(optimizer, loss="mse")
        ```

        Args:
          optimizer: Keras's own `LossScaleOptimizer`, of Keras 2 or of Keras 3.
          guard: As in the constructor.
          communication_dtype: As in the constructor.
          nonfinite_loss: As in the constructor.

        Returns:
          A `LossScaleOptimizer` with the same loss scale, counters and arguments.

        Raises:
          TypeError: `optimizer` is not Keras's own `LossScaleOptimizer`.
          ValueError: Its loss scale has become zero or infinite, as Keras 3's can.
          RuntimeError: You called it in a graph, which cannot read the state.
        """
        is_ours = not wrappers.is_open(type(optimizer))
        if is_ours or not keras_versions.is_own_wrapper(optimizer):
            raise TypeError(
                "`optimizer` must be a LossScaleOptimizer of Keras itself, got "
                f"{arguments.shown(optimizer)}. Use one of lossscale's as it is. Wrap "
                "any other optimizer: lossscale.LossScaleOptimizer(optimizer)."
            )
        loss_scale = keras_arguments.loss_scale_of(optimizer)
        inner = optimizer.inner_optimizer
        wrappers.for_optimizer(inner)._dialect.release(inner)
        options = {"guard": guard, "communication_dtype": communication_dtype}
        options["nonfinite_loss"] = nonfinite_loss
        defaults = (None, "backoff")
        others = {n: value for n, value in options.items() if value not in defaults}
        return cls._of(inner, loss_scale, others)

    def with_loss_scale(self, loss_scale: Any, *, guard: Any = KEPT) -> Any:
        """Returns an optimizer that continues from this one with another loss scale.

        It takes over the inner optimizer, and so `iterations`, slots and the learning
        rate. This one raises an error from now on. So compile the model with the new
        one, and create functions and `tf.train.Checkpoint`s again:
        https://github.com/lossscale/lossscale/blob/main/docs/setting.md.

        ```
        scale = lossscale.FixedLossScale(float(optimizer.loss_scale), True)
        model.compile(optimizer.with_loss_scale(scale), loss="mse")
        ```

        Call it eagerly, between two steps, in the scope of the strategy.

        Args:
          loss_scale: As in the constructor. `optimizer.loss_scale` continues with the
            old one.
          guard: As in the constructor. `"kept"`: this optimizer's, with its state.

        Returns:
          A `LossScaleOptimizer` of the same class with the same name and
          `communication_dtype`. The record of skipped steps begins again.

        Raises:
          TypeError: `loss_scale` is no loss scale.
          ValueError: `loss_scale` is out of range, or checks nothing although
            `communication_dtype` needs that.
          RuntimeError: It is called in a graph or under a ParameterServerStrategy, or
            this optimizer was replaced already.
        """
        engine, inner = self._engine, self.inner_optimizer
        engine._check_can_be_replaced()
        others = {"name": self.name, **engine._options()}
        if not (isinstance(guard, str) and guard == KEPT):
            others["guard"] = serialization.get_guard(guard)
        others = {n: value for n, value in others.items() if value is not None}
        self._dialect.release(inner)
        engine._is_replaced = True
        try:
            other = self._of(inner, loss_scale, others)
        except BaseException:
            engine._is_replaced = False
            if engine.guard is not None:
                engine.guard._claim(None)  # the new engine, which failed, had it
                engine.guard._claim(engine)
            self._take_inner()
            raise
        other.engine._replace(engine)
        return other

    def get_config(self) -> Dict[str, Any]:
        """Returns the constructor's arguments as a dict that JSON can hold."""
        optimizers = self._dialect.keras.optimizers
        config = {
            "name": self.name,
            "inner_optimizer": optimizers.serialize(self.inner_optimizer),
            "loss_scale": serialization.serialize(self.loss_scale),
            **self._engine._options(),
        }
        config.pop("gather", None)  # no config can hold a function
        if self.guard is not None:
            config["guard"] = serialization.serialize(self.guard)
        return dict(keras_arguments.plain(config))

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        # Keras 3 would save and load each optimizer by itself, so that two optimizers
        # that share a loss scale would each get a copy.
        inner = copy.deepcopy(self.inner_optimizer, memo)
        self._dialect.release(inner)
        loss_scale = copy.deepcopy(self.loss_scale, memo)
        options = copy.deepcopy(self._engine._options(), memo)
        copied = self._of(inner, loss_scale, {"name": self.name, **options})
        copied.engine._take_level_of(self._engine)
        return copied
