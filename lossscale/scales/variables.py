"""HasVariables: what loss scales and guards have in common, variables with a config."""

from __future__ import annotations

import abc
import numbers
from typing import TYPE_CHECKING, Any, Dict

import numpy as np
import tensorflow as tf

from lossscale.arguments import shown
from lossscale.runtime import mode, replicas
from lossscale.runtime.aliases import Variable
from lossscale.runtime.saved_models import OnlyInSavedModels

#: Says what to do with what 3.1.0 has written of a loss scale that held another one.
HELD_ANOTHER = """\
This was written by lossscale 3.1.0 with a loss scale that held another one, as \
SpikeGuard did. No loss scale holds another one now: a guard stands beside it. Finish \
this run with lossscale 3.1.0. Or restore the model alone, as load_model(path, \
compile=False) and tf.train.Checkpoint(model=model) do, and go on with

    lossscale.LossScaleOptimizer(inner, "dynamic", guard=lossscale.SpikeGuard())
"""


class HasVariables(OnlyInSavedModels, metaclass=abc.ABCMeta):
    """An object with variables that checkpoints hold, and arguments that configs hold.

    Its constructor ends with `_unsaved`: the variables of every such object are made.
    """

    #: What programs and errors call such an object.
    _called: str = "loss_scale"
    #: What the names of its variables begin with. Their keys in checkpoints do not.
    _prefix: str = ""
    #: How a constructor calls that of its base, for an error.
    _base_call: str = "super().__init__()"

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
                f"`__init__` of {cls} must call `{self._base_call}`, which makes the "
                f"variables of every such object, got no such call: {problem}."
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
                f"the attribute. Write {self._called}.{name}.assign({shown(value)})."
            )
        super().__setattr__(name, value)

    def _add_weight(self, name: str, initial_value: Any, dtype: Any = None) -> Any:
        """Returns a new variable, checkpointed as `name`. Assign it to an attribute.

        Named as in tf.train.experimental.LossScale, for compatibility.
        """
        variable = replicas.new_variable(self._prefix + name, initial_value, dtype)
        self._track_trackable(variable, name)
        return variable

    def _kept(self) -> Dict[str, Variable]:
        unsaved = vars(self._unsaved).items()
        return {name: value for name, value in unsaved if hasattr(value, "assign")}

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        # Private to TensorFlow, which calls it with each name that a checkpoint holds
        # for this object, before it sets any variable. Without this method, a part of
        # such a checkpoint would be restored, and the rest left out.
        found = super()._lookup_dependency(name, *args)
        if name == "loss_scale" and found is None:
            raise ValueError(HELD_ANOTHER)
        return found

    def __repr__(self) -> str:
        state, config = {}, dict(self.get_config())
        for name, value in vars(self).items():
            is_scalar = isinstance(value, tf.Variable) and not value.shape.rank
            if is_scalar and mode.current().knows_values:
                state[name] = value.numpy()
        listed = ", ".join(f"{k}={value}" for k, value in {**state, **config}.items())
        return f"{type(self).__name__}({listed})"

    @abc.abstractmethod
    def get_config(self) -> Dict[str, Any]:
        """Returns the constructor's arguments, not the state, as a dict for JSON."""

    @classmethod
    def from_config(cls, config: Dict[str, Any]) -> Any:
        """Returns a new object in its initial state, given a `get_config()`."""
        return cls(**config)
