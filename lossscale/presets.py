"""A table of other systems' schedules, as arguments of DynamicLossScale.

Every framework has its own rule for moving its loss scale. Each of these is the rule of
`DynamicLossScale` with other arguments. Use one by its name:

>>> import lossscale
>>> loss_scale = lossscale.DynamicLossScale.from_preset("torch", increment_period=100)
>>> float(loss_scale), loss_scale.increment_period
(65536.0, 100)

`PRESETS` is the table. Each entry names its source, and says how it differs from it:

>>> print(PRESETS["flax"].source)
flax 0.12.8, flax/training/dynamic_scale.py, DynamicScale
>>> PRESETS["jmp"].asks_for
('initial_loss_scale',)

Three differences apply to all presets, and the table does not repeat them:

* No schedule here ever leaves float32's normal range. If the original has no floor,
  ours is the smallest normal float32, so that the loss scale can never be 0. If the
  original grows to infinity, ours stops before.
* Growth and backoff test `>=`, but most originals test `==`. If a restored counter is
  beyond its period, ours grows at the next good step, and such an original never again.
* We compute the scale in float32. torch multiplies in float64 and rounds: the result is
  the same to the last bit for factors that float32 holds exactly, as all defaults are.
  DeepSpeed and apex double and halve a Python float: again the result is the same.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Dict, Mapping, NamedTuple, Tuple

from lossscale import arguments
from lossscale.preset_table import ROWS, Row


class Preset(NamedTuple):
    """One system's schedule.

    Attributes:
      arguments: Arguments of `DynamicLossScale`. The others keep their defaults.
      asks_for: Arguments that you must give, since the system has no default for them.
      source: The system, version and file from which the arguments were read.
      differs: How a run differs from the original's, besides the differences above.
    """

    arguments: Mapping[str, Any]
    asks_for: Tuple[str, ...]
    source: str
    differs: str


def _preset(row: Row) -> Preset:
    asks_for = tuple(name for name, value in row.given.items() if value is ...)
    settled = {name: value for name, value in row.given.items() if value is not ...}
    return Preset(MappingProxyType(settled), asks_for, row.source, row.differs)


_NAMED = {name: _preset(row) for name, row in ROWS.items()}
#: Name -> `Preset`.
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {"dynamic": _NAMED["tensorflow"], **_NAMED}
)


def preset_arguments(
    name: str, overrides: Mapping[str, Any], call: str = ""
) -> Dict[str, Any]:
    """Returns the preset's arguments. `overrides` take precedence over them.

    Args:
      name: A key of `PRESETS`.
      overrides: Arguments of `DynamicLossScale`.
      call: The user's call, as text up to the overrides, for the error.

    Raises:
      TypeError: `name` is no string, or the preset asks for an argument that
        `overrides` lacks.
      ValueError: There is no such preset.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"`name` must be the name of a preset, got {arguments.shown(name)}."
        )
    if name not in PRESETS:
        raise ValueError(
            f"`name` must be one of {', '.join(map(repr, sorted(PRESETS)))}, "
            f"got {name!r}."
        )
    preset = PRESETS[name]
    call = call or f"DynamicLossScale.from_preset({name!r}"
    for argument in preset.asks_for:
        if argument not in overrides:
            listed = ", ".join(f"{argument}=..." for argument in preset.asks_for)
            raise TypeError(
                f"`{argument}` must be given with the preset {name!r}, which has no "
                f"default for it, got nothing. Write {call}, {listed})."
            )
    return {**preset.arguments, **overrides}
