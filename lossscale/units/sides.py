"""The units of a branch's results on each of its sides, for later branches.

A branch is a `tf.cond` or a `tf.switch_case`; its flag says which side runs. A later
branch with the same flag runs the same side. There a result of the earlier branch has
the unit that it got on that side.

The gradient of a branch is such a later branch. It needs values of the earlier one.
TensorFlow adds results to the earlier branch for them, and one result may hold a value
of one side or an unrelated value of the other side.
"""

from __future__ import annotations

from typing import Dict, Hashable, List, NamedTuple, Optional, Sequence

from lossscale.units.unit import Unit, Units


class _Result(NamedTuple):
    """One result of a branch.

    Attributes:
      flag: The key of the branch's flag.
      unit: The result's unit, whichever side runs.
      on_sides: Its unit on each side.
    """

    flag: Hashable
    unit: Unit
    on_sides: Units


class Sides:
    """The units of the results of a graph's branches, on each side."""

    def __init__(self) -> None:
        self._results: Dict[Hashable, _Result] = {}

    def note(
        self,
        flag: Hashable,
        keys: Sequence[Hashable],
        units: Units,
        on_sides: Sequence[Units],
    ) -> None:
        """Notes the results of a branch.

        Args:
          flag: The key of the branch's flag.
          keys: The keys of its results.
          units: Their units, whichever side runs.
          on_sides: For each side, their units there.
        """
        for key, unit, each in zip(keys, units, zip(*on_sides)):
            if unit is not None:
                self._results[key] = _Result(flag, unit, each)

    def on(
        self, side: int, flag: Hashable, keys: Sequence[Hashable], units: Units
    ) -> List[Optional[Unit]]:
        """Returns the units that values have on one side of a branch.

        Args:
          side: The number of the side.
          flag: The key of the branch's flag.
          keys: The keys of the values.
          units: Their units, whichever side runs.
        """
        found = list(units)
        for index, (key, unit) in enumerate(zip(keys, units)):
            result = self._results.get(key)
            # A result may be a variable's handle, and the unit one assigned since then.
            if result and result.flag == flag and result.unit is unit:
                found[index] = result.on_sides[side]
        return found
