"""Stateful: what makes a loss scale an object with variables."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import tensorflow as tf

from lossscale.arguments import shown
from lossscale.runtime import mode, replicas
from lossscale.runtime.aliases import Variable
from lossscale.scales.uses import Observer


class Stateful(tf.Module):
    """The base class of LossScale, which documents its attributes."""

    ignored_loss_steps: Optional[Variable] = None
    #: To whom each use is reported: see `observer_of`.
    _observer: Optional[Observer] = None
    #: What the names of its variables begin with. Their keys in checkpoints do not.
    _prefix: str = ""

    if not TYPE_CHECKING:  # or a type checker would allow every name

        def __getattr__(self, name: str) -> Any:
            if "_unsaved" in vars(self) and hasattr(type(self), name):
                # A property has raised: what it lacks is to be named, and not itself.
                return object.__getattribute__(self, name)
            raise self._missing(name)

    def _missing(self, name: str) -> AttributeError:
        cls = type(self).__name__
        problem = f"{cls!r} object has no attribute {name!r}"
        if "_unsaved" not in vars(self):
            problem = (
                f"`__init__` of {cls} must call `super().__init__(initial_loss_scale)`"
                ", which makes the variables of every loss scale, got no such call: "
                f"{problem}. Without an initial loss scale, call `super().__init__()`."
            )
        return AttributeError(problem)

    def __setattr__(self, name: str, value: Any) -> None:
        # Steps that are traced already would use the variable that was here. A subclass
        # may put another variable in its place.
        held = vars(self).get(name, getattr(type(self), name, None))
        if isinstance(held, property) and held.fset is None:
            held = getattr(self, name, None)
        kinds = (numbers.Number, np.ndarray, np.generic, list, tuple)
        is_value = isinstance(value, kinds) or tf.is_tensor(value)
        if isinstance(held, tf.Variable) and is_value and not hasattr(value, "assign"):
            raise AttributeError(
                f"`{name}` must be set by its method `assign`, got {shown(value)} for "
                f"the attribute. Write loss_scale.{name}.assign({shown(value)})."
            )
        super().__setattr__(name, value)

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        # Private to TensorFlow, which calls it with each name that a checkpoint holds
        # for this object, before it sets any variable. Without this method, what older
        # checkpoints do not hold would keep the value that it has.
        if name in ("skipped_steps", "current_loss_scale"):
            self._forget_ignored()
        return super()._lookup_dependency(name, *args)

    def _forget_ignored(self) -> None:
        """Sets to 0 what files of 3.0.0 and older do not hold."""
        if not mode.current().knows_values:
            return
        if self.ignored_loss_steps is not None:
            self.ignored_loss_steps.assign(0)
        if self._observer is not None:
            self._observer.note_restored()

    def _add_weight(self, name: str, initial_value: Any, dtype: Any = None) -> Any:
        """Returns a new variable, checkpointed as `name`. Assign it to an attribute.

        Named as in tf.train.experimental.LossScale, for compatibility.
        """
        variable = replicas.new_variable(self._prefix + name, initial_value, dtype)
        self._track_trackable(variable, name)
        return variable

    def __repr__(self) -> str:
        state, config = {}, dict(self.get_config())
        for name, value in vars(self).items():
            is_scalar = isinstance(value, tf.Variable) and not value.shape.rank
            if is_scalar and mode.current().knows_values:
                state[name] = value.numpy()
            elif name in config and isinstance(value, tf.Module):
                config[name] = value  # a loss scale within shows its own state
        listed = ", ".join(f"{k}={value}" for k, value in {**state, **config}.items())
        return f"{type(self).__name__}({listed})"
