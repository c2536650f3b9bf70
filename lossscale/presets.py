"""Other systems' schedules, as arguments of DynamicLossScale: a table.

Every framework moves its loss scale by a rule of its own, and all of them are the one
rule of `DynamicLossScale` with other arguments. Take one by its name:

>>> import lossscale
>>> loss_scale = lossscale.DynamicLossScale.from_preset("torch", increment_period=100)
>>> float(loss_scale), loss_scale.increment_period
(65536.0, 100)

`PRESETS` is the table. Each entry names its source and says where it differs:

>>> print(PRESETS["flax"].source)
flax 0.12.8, flax/training/dynamic_scale.py, DynamicScale
>>> PRESETS["jmp"].asks_for
('initial_loss_scale',)

Three differences are the same everywhere and are not repeated in the table:

* No schedule here ever leaves float32's normal range. Where theirs has no floor, ours
  is the smallest normal float32, so that the loss scale can never be 0. Where theirs
  grows to infinity, ours refuses the growth.
* Growth and backoff test `>=`, where most of theirs test `==`: a counter that was
  restored from beyond its period grows at the next good step, and there never again.
* The scale is computed in float32. torch multiplies in float64 and rounds: the same to
  the last bit for factors that float32 holds exactly, as all defaults are. DeepSpeed
  and apex keep a Python float, and only double and halve it: the same again.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Dict, Mapping, NamedTuple, Tuple

from lossscale import arguments
from lossscale.preset_table import ROWS, Row


class Preset(NamedTuple):
    """One system's schedule.

    Attributes:
      arguments: Arguments of `DynamicLossScale`. Those not named have its defaults.
      asks_for: Arguments that the system leaves to its user, and so does the preset.
      source: System, version and file that the arguments were read from.
      differs: Where a run differs from the original's, other than said above.
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
    """Returns the preset's arguments, with `overrides` in their place.

    Args:
      name: A key of `PRESETS`.
      overrides: Arguments of `DynamicLossScale`.
      call: How the caller was called, up to the overrides, for the message.

    Raises:
      TypeError: `name` is no string, or the preset asks for an argument that
        `overrides` does not have.
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
                f"`{argument}` must be given with the preset {name!r}, which leaves it "
                f"to you, got nothing. Write {call}, {listed})."
            )
    return {**preset.arguments, **overrides}
