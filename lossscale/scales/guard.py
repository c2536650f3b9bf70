"""Guard: the contract of what leaves finite steps out."""

from __future__ import annotations

import abc
import inspect
import weakref
from types import SimpleNamespace
from typing import Any, Mapping, Tuple

from lossscale.runtime.aliases import Flag, Scalar, Tensor
from lossscale.scales.variables import HasVariables


class Guard(HasVariables):
    """Leaves finite steps out, such as those with huge gradients.

    `SpikeGuard` is one. Your own implements `judge` and `get_config`, and sets
    `left_out_as`: https://github.com/lossscale/lossscale/blob/main/docs/bad-batches.md.
    An optimizer asks it about each of its finite steps. It can only leave a step out:
    one that is not finite is never applied. A step that is left out changes no weight,
    slot or loss scale, whose rule does not learn of it. Only the guard's own variables
    and the loss scale's `last_largest` get new values. Each optimizer has its own.

    Attributes:
      left_out_as: A string that a subclass sets: what reports call the steps that it
        leaves out, such as `"all zero"`.
    """

    left_out_as: str = ""
    _called = "guard"
    # File format: Keras's files have these names of its variables.
    _prefix = "guard_"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not (isinstance(cls.left_out_as, str) and cls.left_out_as):
            raise TypeError(
                "`left_out_as` must be a string that says what the steps are that "
                f'`judge` leaves out, such as "all zero", got {cls.left_out_as!r} for '
                f"{cls.__name__}. Set it in the class, next to `judge`."
            )
        signature = inspect.signature(cls.judge)
        try:
            signature.bind("self", "state", "largest")
        except TypeError as error:
            raise TypeError(
                "`judge` must take the arguments (self, state, largest), got "
                f"{signature} for {cls.__name__}. It is asked of finite steps only, "
                "and returns (should_apply, values)."
            ) from error

    def __init__(self) -> None:
        super().__init__()
        self._unsaved = SimpleNamespace(owner=lambda: None)

    def _claim(self, engine: Any) -> None:
        """Makes an engine the only one whose steps it judges. None: no engine."""
        owner, cls = self._unsaved.owner(), type(self).__name__
        # A copy has the reference, too, and the engine has another guard.
        is_taken = owner is not None and owner.guard is self and not owner._is_replaced
        if engine is not None and is_taken and owner is not engine:
            raise ValueError(
                "`guard` must be a guard that no other optimizer has, got a "
                f"{cls} in use: it compares each step with the steps before. Write "
                f"{cls}(...) for each optimizer, or {cls}.from_config("
                "guard.get_config())."
            )
        self._unsaved.owner = weakref.ref(engine) if engine else lambda: None

    @abc.abstractmethod
    def judge(self, state: Any, largest: Scalar) -> Tuple[Flag, Mapping[str, Tensor]]:
        """Decides about a finite step, and changes nothing.

        Called once for all replicas. AutoGraph does not convert it: choose with
        `tf.where`. In a graph it is computed at each step, and what it returns of one
        that is not finite is not used.

        Args:
          state: The values before the step: a tensor of each variable, as an attribute
            of its name.
          largest: A `float32` tensor of shape `[]`, equal on all replicas: the greatest
            magnitude of any replica's unscaled gradients, before you clipped them.

        Returns:
          `(should_apply, values)`: whether the step is applied, a bool or a `bool`
          tensor of one element, and a dictionary of new values by the names of the
          guard's variables, which are assigned in either case. Others stay.
        """
