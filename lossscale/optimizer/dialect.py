"""Dialect: what one Keras's optimizers are called, hold and save."""

from __future__ import annotations

import abc
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import tensorflow as tf

from lossscale.arguments import shown
from lossscale.optimizer import files
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Grads

#: The mark on a wrapped optimizer. Keras 2 uses the same name (seen on 2.8 to 2.21).
MARK = "_is_wrapped_by_loss_scale_optimizer"


class Dialect(abc.ABC):
    """The optimizers of one Keras, or of one of Keras 2's two generations.

    Attributes:
      keras: The module of this Keras.
      optimizer_class: The base class of these optimizers.
      summing_methods: Their methods that prepare and sum gradients over the replicas.
        The last one sums.
      unscales_in_apply: Whether this Keras's own wrapper unscales in `apply_gradients`.
      not_in_names: The characters that this Keras allows in no name.
      listed_last: The names of our variables that lists hold last, in this order.
    """

    keras: Any
    optimizer_class: type
    summing_methods: Tuple[str, ...]
    unscales_in_apply: bool
    not_in_names: str = ""
    listed_last: Tuple[str, ...] = files.LAST

    @abc.abstractmethod
    def constructor_arguments(self, name: str) -> Dict[str, Any]:
        """Returns the arguments of the constructor of this Keras's own wrapper."""

    @abc.abstractmethod
    def recognizes(self, inner_config: Dict[str, Any]) -> bool:
        """Whether a config is that of one of these optimizers."""

    @abc.abstractmethod
    def deserialize(self, config: Any, custom_objects: Optional[Any]) -> Any:
        """Returns a new optimizer."""

    def applied_steps(self, inner: Any) -> Any:
        """Returns an optimizer's count of the steps that it took, a variable."""
        return inner.iterations

    def release(self, inner: Any) -> None:
        """Removes what a wrapper left on an optimizer. A copy of that has it, too."""
        setattr(inner, MARK, False)
        for part in parts(inner):
            vars(part).pop(self.summing_methods[-1], None)

    def refuse_own_sum(self, dtype: Optional[str], inner: Any) -> None:
        """Raises if a dtype is given, and the optimizer's sum cannot be replaced."""
        if dtype is None:
            return
        name = "gradient_accumulation_steps"  # Keras 3's
        steps = next(filter(None, (getattr(p, name, 0) for p in parts(inner))), None)
        if "horovod" in {cls.__module__.split(".")[0] for cls in type(inner).__mro__}:
            way = (
                "sums them with Horovod. Leave out `communication_dtype`, and write "
                "hvd.DistributedOptimizer(..., compression=hvd.Compression.fp16)"
            )
        elif steps:
            way = (
                f"has {name}={steps!r}: Keras sums within its own update. Set it to "
                "None and accumulate in your loop, or leave out `communication_dtype`"
            )
        elif self.has_own_sum(inner):
            way = "sums by its own method or argument. Leave out `communication_dtype`"
        else:
            return
        raise ValueError(
            "`communication_dtype` must be None if the inner optimizer sums gradients "
            f"in its own way, got {dtype!r} and {shown(inner)}, which {way}."
        )

    def has_own_sum(self, inner: Any) -> bool:
        return any(
            getattr(type(part), name, None)
            is not getattr(self.optimizer_class, name, None)
            for part in parts(inner)
            for name in self.summing_methods
        )


class InnerSum:
    """The sum over replicas of an inner optimizer, which the wrapper may leave out.

    No argument turns it off in every optimizer: Keras 3 has none, and an optimizer of
    Keras 2 may ignore it. So the method that sums is replaced on the object.
    """

    def __init__(self, optimizer: Any, method: str, is_left_out: bool) -> None:
        self._optimizer, self._method = optimizer, method
        self._is_left_out = is_left_out
        #: How many replicas are within `left_out` now.
        self._inside = 0
        #: How many of the gradients that they apply the method has not been given yet.
        self._missing = 0
        for part in parts(optimizer) if is_left_out else []:
            setattr(part, method, partial(self._leave_out, getattr(part, method)))

    @contextmanager
    def left_out(self, grads: Grads) -> Iterator[None]:
        """Leaves out the sum of what the optimizer applies within.

        Raises if the method was not called for each: it may have summed them again.
        """
        if not self._is_left_out or replicas.count() == 1:
            yield
            return
        if not self._inside:
            self._missing = 0  # an error may have left some
        self._missing += sum(grad is not None for grad in grads)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
        if self._missing > 0 and not self._inside:
            raise ValueError(
                "`communication_dtype` must be None if the inner optimizer applies "
                f"gradients in its own way, got {shown(self._optimizer)}, which does "
                f"not call {self._method} for each. Leave out `communication_dtype`."
            )

    def _leave_out(self, add_up: Callable[[Any], Any], grads_and_vars: Any) -> Any:
        if not self._inside:  # the inner optimizer is used without its wrapper
            return add_up(grads_and_vars)
        pairs = list(grads_and_vars)
        # One call is for all replicas, or for one of them.
        calls = self._inside if tf.distribute.in_cross_replica_context() else 1
        self._missing -= calls * sum(grad is not None for grad, _ in pairs)
        return pairs


def parts(optimizer: Any) -> List[Any]:
    """Returns an optimizer, and the optimizers in it if it is a `MultiOptimizer`."""
    inside = getattr(optimizer, "optimizers", None) or []
    return [optimizer, *(part for member in inside for part in parts(member))]


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
        scale = self.loss_scale
        values = (getattr(scale, name, None) for name in names)
        return next((value for value in values if value is not None), None)

    def refuse(self: Any, value: Any) -> None:
        # Keras 3's constructor sets its defaults before the loss scale exists.
        if hasattr(self, "_engine"):
            raise AttributeError(
                "The loss scale's settings must be arguments of LossScaleOptimizer, "
                f"got {shown(value)} for an attribute. Write LossScaleOptimizer("
                "inner_optimizer, DynamicLossScale(...)), or, to set the value, "
                "optimizer.loss_scale.current_loss_scale.assign(...)."
            )

    return property(get_value, refuse, doc=doc)
