"""How other systems save a loss scale: a table.

A state is a dict of plain numbers under the names that the system itself uses.
TensorFlow's `DynamicLossScale` and each Keras's `LossScaleOptimizer` have two
variables; torch, NeMo and Paddle have `GradScaler.state_dict()`; Megatron has its grad
scaler's, and apex has `amp.state_dict()`. The rest are arguments of that system.

Source: as in `presets`; `state_dict` of apex at dec4fdd, `apex/amp/frontend.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Mapping, NamedTuple

from lossscale import arguments


class StateFormat(NamedTuple):
    """What one system saves, and under which names.

    Attributes:
      preset: The name of the preset with that system's schedule.
      keys: Its key -> our attribute. `bad_steps_left` is `hysteresis - bad_steps`.
      fixed: Our argument -> its unchangeable value there. None means our None.
      constants: Those of its keys that must have one given value.
      inside: The key of the dict that holds the state, if it is nested.
      in_an_array: Whether its scale is an array of one entry.
      has_ceiling: Whether it can have a maximum loss scale.
    """

    preset: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Any] = {}
    constants: Mapping[str, Any] = {}
    inside: str = ""
    in_an_array: bool = False
    has_ceiling: bool = False


_TORCH_KEYS = {
    "scale": "current_loss_scale",
    "growth_factor": "multiplier",
    "backoff_factor": "backoff_factor",
    "growth_interval": "increment_period",
    "_growth_tracker": "good_steps",
}
_KERAS2_KEYS = {"current_loss_scale": "current_loss_scale", "good_steps": "good_steps"}
_DOUBLING = {"multiplier": 2.0, "backoff_factor": 0.5, "hysteresis": 1}

#: The system's name -> its `StateFormat`.
STATE_FORMATS: Mapping[str, StateFormat] = {
    "tensorflow": StateFormat(
        "tensorflow", _KERAS2_KEYS, {"backoff_factor": None, "hysteresis": 1}
    ),
    "tf_keras": StateFormat("tensorflow", _KERAS2_KEYS, _DOUBLING),
    "keras3": StateFormat(
        "keras3",
        {"dynamic_scale": "current_loss_scale", "step_counter": "good_steps"},
        _DOUBLING,
    ),
    "torch": StateFormat("torch", _TORCH_KEYS, {"hysteresis": 1}),
    # NeMo's own loader misspells the last key, and then takes 1.
    "nemo": StateFormat(
        "nemo", {**_TORCH_KEYS, "_hysteresis_tracker": "bad_steps_left"}
    ),
    "megatron": StateFormat(
        "megatron",
        {
            "scale": "current_loss_scale",
            "growth_tracker": "good_steps",
            "hysteresis_tracker": "bad_steps_left",
        },
    ),
    "apex": StateFormat(
        "apex",
        {"loss_scale": "current_loss_scale", "unskipped": "good_steps"},
        {**_DOUBLING, "increment_period": 2000},
        inside="loss_scaler0",
        has_ceiling=True,
    ),
    "paddle": StateFormat(
        "paddle",
        {
            "scale": "current_loss_scale",
            "incr_ratio": "multiplier",
            "decr_ratio": "backoff_factor",
            "incr_every_n_steps": "increment_period",
            "decr_every_n_nan_or_inf": "hysteresis",
            "incr_count": "good_steps",
            "decr_count": "bad_steps",
        },
        constants={"use_dynamic_loss_scaling": True},
        in_an_array=True,
    ),
}

#: The check of each attribute's value.
CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "current_loss_scale": arguments.loss_scale,
    "multiplier": partial(arguments.factor, above=1.0),
    "backoff_factor": partial(arguments.factor, above=0.0, below=1.0),
    "increment_period": arguments.count,
    "hysteresis": arguments.count,
    "good_steps": partial(arguments.count, least=0, most=arguments.MOST_STEPS),
    "bad_steps": partial(arguments.count, least=0, most=arguments.MOST_STEPS),
    "bad_steps_left": partial(arguments.count, least=-arguments.MOST_STEPS),
}
#: The attributes above that are state. The others are arguments.
STATE = ("current_loss_scale", "good_steps", "bad_steps", "bad_steps_left")
