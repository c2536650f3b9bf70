"""import_state, export_state: continue another system's run here, or one of ours there.

A state is a dict of plain numbers under the system's own names, which `STATE_FORMATS`
lists: the two variables of TensorFlow's `DynamicLossScale` and of each Keras's
`LossScaleOptimizer`; `state_dict()` of the grad scalers of torch, NeMo, Paddle and
Megatron; and apex's `amp.state_dict()`.

Source: as in `presets`; `state_dict` of apex at dec4fdd, `apex/amp/frontend.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from lossscale import arguments, presets
from lossscale.arguments import or_none, shown
from lossscale.scales.base import LossScale, unguarded
from lossscale.scales.dynamic import DynamicLossScale


class StateFormat(NamedTuple):
    """What one system saves, and under which names."""

    preset: str  # the one with that system's schedule
    keys: Mapping[str, str]  # its key -> our attribute
    fixed: Mapping[str, Any] = {}  # our argument -> the only value it has there
    constants: Mapping[str, Any] = {}  # its key -> the only value it may have
    inside: str = ""  # the key of the dict that holds the state, if it is nested
    in_an_array: bool = False  # whether its scale is an array of one entry


_TORCH_KEYS = {
    "scale": "current_loss_scale",
    "growth_factor": "multiplier",
    "backoff_factor": "backoff_factor",
    "growth_interval": "increment_period",
    "_growth_tracker": "good_steps",
}
_MEGATRON_KEYS = {
    "scale": "current_loss_scale",
    "growth_tracker": "good_steps",
    "hysteresis_tracker": "bad_steps_left",  # hysteresis - bad_steps
}
_PADDLE_KEYS = {
    "scale": "current_loss_scale",
    "incr_ratio": "multiplier",
    "decr_ratio": "backoff_factor",
    "incr_every_n_steps": "increment_period",
    "decr_every_n_nan_or_inf": "hysteresis",
    "incr_count": "good_steps",
    "decr_count": "bad_steps",
}
_APEX_KEYS = {"loss_scale": "current_loss_scale", "unskipped": "good_steps"}
_KERAS2_KEYS = {"current_loss_scale": "current_loss_scale", "good_steps": "good_steps"}
_KERAS3_KEYS = {"dynamic_scale": "current_loss_scale", "step_counter": "good_steps"}
# NeMo's own loader misspells the last key, and then takes 1.
_NEMO_KEYS = {**_TORCH_KEYS, "_hysteresis_tracker": "bad_steps_left"}
_DOUBLING = {"multiplier": 2.0, "backoff_factor": 0.5, "hysteresis": 1}
_BY_2000 = {**_DOUBLING, "increment_period": 2000}
_IS_DYNAMIC = {"use_dynamic_loss_scaling": True}
_DIVIDING = {"backoff_factor": None, "hysteresis": 1}

#: The system's name -> its `StateFormat`.
STATE_FORMATS: Mapping[str, StateFormat] = {
    "tensorflow": StateFormat("tensorflow", _KERAS2_KEYS, _DIVIDING),
    "tf_keras": StateFormat("tensorflow", _KERAS2_KEYS, _DOUBLING),
    "keras3": StateFormat("keras3", _KERAS3_KEYS, _DOUBLING),
    "torch": StateFormat("torch", _TORCH_KEYS, {"hysteresis": 1}),
    "nemo": StateFormat("nemo", _NEMO_KEYS),
    "megatron": StateFormat("megatron", _MEGATRON_KEYS),
    "apex": StateFormat("apex", _APEX_KEYS, _BY_2000, inside="loss_scaler0"),
    "paddle": StateFormat(
        "paddle", _PADDLE_KEYS, constants=_IS_DYNAMIC, in_an_array=True
    ),
}

#: The check of each attribute's value. Those of `_STATE` are state, others arguments.
_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "current_loss_scale": arguments.loss_scale,
    "multiplier": partial(arguments.factor, above=1.0),
    "backoff_factor": partial(arguments.factor, above=0.0, below=1.0),
    "increment_period": arguments.count,
    "hysteresis": arguments.count,
    "good_steps": partial(arguments.count, least=0, most=arguments.MOST_STEPS),
    "bad_steps": partial(arguments.count, least=0, most=arguments.MOST_STEPS),
    "bad_steps_left": partial(arguments.count, least=-arguments.MOST_STEPS),
}
_STATE = ("current_loss_scale", "good_steps", "bad_steps", "bad_steps_left")


def import_state(
    system: str, state: Mapping[str, Any], **overrides: Any
) -> DynamicLossScale:
    """Returns a loss scale that continues from another system's saved state.

    Training goes on as in the other system, but for what `lossscale.presets` lists.

    >>> state = {  # torch.amp.GradScaler.state_dict()
    ...     "scale": 1024.0,
    ...     "growth_factor": 2.0,
    ...     "backoff_factor": 0.5,
    ...     "growth_interval": 100,
    ...     "_growth_tracker": 99,
    ... }
    >>> loss_scale = import_state("torch", state)
    >>> _ = loss_scale.adjust(True)
    >>> float(loss_scale)
    2048.0

    Args:
      system: The system's name, such as "torch"; a wrong one raises an error that
        lists all.
      state: A dict with exactly that system's keys. Its values are numbers of Python or
        NumPy, or tensors and variables of any framework with one entry. Nothing is
        unpickled here.
      **overrides: Arguments of `DynamicLossScale`. Pass the other run's settings that
        its state lacks, such as Megatron's `hysteresis`. The preset has the rest.

    Returns:
      A new `DynamicLossScale`. Without an override, its `initial_loss_scale` is the
      imported scale.

    Raises:
      TypeError: `state` is no dict, a value is no number, or an argument is missing
        that only the caller knows, such as NeMo's `hysteresis`.
      ValueError: The system or a key is unknown, a key is missing, or a value is out of
        its range.
    """
    theirs = STATE_FORMATS[arguments.choice("system", system, [*STATE_FORMATS])]
    found, names = _read(theirs, state)
    scale = found["current_loss_scale"]
    given = {name: value for name, value in found.items() if name not in _STATE}
    given = {"initial_loss_scale": scale, **given, **overrides}
    call = f"import_state({system!r}, state"
    settings = presets.preset_arguments(theirs.preset, given, call)
    # The bounds come from elsewhere than the scale, so errors name its key.
    name = names["current_loss_scale"]
    floor = arguments.loss_scale("min_loss_scale", settings.get("min_loss_scale", 1.0))
    ceiling = settings.get("max_loss_scale")
    ceiling = or_none(arguments.loss_scale)("max_loss_scale", ceiling)
    bounds = {"min_loss_scale": floor, name: scale, "max_loss_scale": ceiling}
    arguments.within_bounds(bounds, name)
    bad_steps = found.get("bad_steps", 0)
    if "bad_steps_left" in found:
        hysteresis = arguments.count("hysteresis", settings.get("hysteresis", 1))
        if found["bad_steps_left"] > hysteresis:
            raise ValueError(
                f"`{names['bad_steps_left']}` must be at most the hysteresis, "
                f"{hysteresis}, got {found['bad_steps_left']}. Pass the "
                "hysteresis=... that the other run had."
            )
        bad_steps = min(hysteresis - found["bad_steps_left"], arguments.MOST_STEPS)
    loss_scale = DynamicLossScale(**settings)
    loss_scale.current_loss_scale.assign(scale)
    loss_scale.good_steps.assign(found["good_steps"])
    loss_scale.bad_steps.assign(bad_steps)
    return loss_scale


def export_state(system: str, loss_scale: LossScale) -> Dict[str, Any]:
    """Returns a loss scale's state in the form in which another system saves its own.

    There the run goes on as it would have here, but with that system's floor. What the
    saved state lacks, such as Megatron's `hysteresis`, goes to the constructor there.

    >>> state = export_state("keras3", DynamicLossScale(1024))
    >>> state
    {'dynamic_scale': 1024.0, 'step_counter': 0}

    Args:
      system: As in `import_state`.
      loss_scale: A `DynamicLossScale`, or a `SpikeGuard` that holds one.

    Returns:
      A new dict of plain numbers. Paddle's scale is a `float32` array of shape `[1]`,
      as Paddle loads it; Megatron loads a tensor: `torch.tensor([state["scale"]])`.

    Raises:
      TypeError: `loss_scale` is no `DynamicLossScale`.
      ValueError: The system is unknown, or cannot do what `loss_scale` does, such as
        hysteresis, a ceiling, another growth than doubling, or a search.
    """
    theirs = STATE_FORMATS[arguments.choice("system", system, [*STATE_FORMATS])]
    loss_scale = unguarded(loss_scale)
    if not isinstance(loss_scale, DynamicLossScale):
        raise TypeError(
            f"`loss_scale` must be a DynamicLossScale, got {shown(loss_scale)}. For a "
            "manager: manager.as_loss_scale()."
        )
    bad_steps = int(loss_scale.bad_steps.numpy())
    values: Dict[str, Any] = {
        **vars(loss_scale),
        "backoff_factor": loss_scale.backoff_factor or 1.0 / loss_scale.multiplier,
        "current_loss_scale": loss_scale._to_show(),
        "good_steps": int(loss_scale.good_steps.numpy()),
        "bad_steps": bad_steps,
        "bad_steps_left": loss_scale.hysteresis - bad_steps,
    }
    _check_it_can(system, theirs, values)
    state: Dict[str, Any] = {key: values[ours] for key, ours in theirs.keys.items()}
    if theirs.in_an_array:
        state["scale"] = np.array([state["scale"]], np.float32)
    state.update(theirs.constants)
    return {theirs.inside: state} if theirs.inside else state


def _read(theirs: StateFormat, state: Any) -> Tuple[Dict[str, Any], Dict[str, str]]:
    """Returns the values of our attributes, checked, and what errors call each."""
    path = "state"
    if theirs.inside:
        _check_keys(path, state, [theirs.inside])
        path, state = f"state[{theirs.inside!r}]", state[theirs.inside]
    _check_keys(path, state, [*theirs.keys, *theirs.constants])
    for key, value in theirs.constants.items():
        found = state[key]  # NumPy has a boolean type of its own
        if not isinstance(found, (type(value), np.bool_)) or found != value:
            raise ValueError(
                f"`{path}[{key!r}]` must be {value}, got {shown(found)}. If the scale "
                "never changes, use FixedLossScale."
            )
    values, names = {}, {}
    for key, ours in theirs.keys.items():
        name = names[ours] = f"{path}[{key!r}]"
        values[ours] = _CHECKS[ours](name, _plain(name, state[key]))
    return values, names


def _check_keys(path: str, state: Any, keys: Sequence[str]) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"`{path}` must be a dict with the keys {keys}, got {shown(state)}."
        )
    missing = [key for key in keys if key not in state]
    unknown = [key for key in state if key not in keys]
    if missing or unknown:
        raise ValueError(
            f"`{path}` must have the keys {keys}, got {shown(list(state))}: missing "
            f"are {missing}, unknown {shown(unknown)}. Pass only the scaler's own "
            "state; if it has several, pass one, under the key of the first."
        )


def _plain(name: str, value: Any) -> Any:
    """Returns the one number in a Python number, array, tensor or variable."""
    try:
        if not hasattr(value, "item") and hasattr(value, "numpy"):
            value = value.numpy()  # a tensor or variable of TensorFlow or Keras
        return value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"`{name}` must be one number, got {shown(value)}.") from error


def _check_it_can(system: str, theirs: StateFormat, values: Mapping[str, Any]) -> None:
    """Raises unless the system can do what a loss scale with these `values` does."""
    preset = presets.PRESETS[theirs.preset].arguments
    must = {**theirs.fixed, "backoff_cooldown": None, "overflow_tolerance": None}
    if must.get("backoff_factor", ...) is None:
        must["backoff_factor"] = 1.0 / values["multiplier"]
    if values["hysteresis"] > 1 and "hysteresis" not in theirs.fixed:
        must["hysteresis_reset"] = preset["hysteresis_reset"]
    if int(values["skipped_steps"].numpy()) == 0:  # no bad step has ended the search
        must["search_period"] = None
    # A system has a ceiling if its preset has one.
    has_ceiling = values["max_loss_scale"] != arguments.FLOAT32_MAX
    if has_ceiling and "max_loss_scale" not in preset:
        must["max_loss_scale"] = None
    for name, wanted in must.items():
        if wanted != values[name]:
            raise ValueError(
                f"`loss_scale` must have {name}={wanted!r} to continue in {system!r}, "
                f"which supports no other value, got {name}={values[name]!r}."
            )
