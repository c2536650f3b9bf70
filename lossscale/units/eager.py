"""The units of what eager mode computes: TensorFlow tells of each operation.

Units are kept by the number that TensorFlow gives each tensor, no tensor is kept alive,
and the oldest are forgotten when they are many. A function that eager mode calls is
looked into once for each list of units that it is called with.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple

from lossscale.runtime import callbacks
from lossscale.runtime.aliases import Tensor
from lossscale.runtime.bodies import (
    definition,
    forget_definitions,
    function_of_elements,
    numbers_in,
    width_of,
)
from lossscale.runtime.callbacks import held_rank, number_of
from lossscale.runtime.graphs import DATASETS
from lossscale.units.direct_reads import DirectReads
from lossscale.units.moves import STARTS
from lossscale.units.operations import results
from lossscale.units.sweep import Sweep, Swept
from lossscale.units.unit import KEPT, Operands, Unit, Units
from lossscale.units.variables import (
    ADDS,
    ASSIGNS,
    READS,
    assign,
    latest,
    still_open,
)

#: How many units are kept, and as many older ones.
_UNITS = 1 << 16
#: The same of variables, and of functions.
_VARIABLES, _FUNCTIONS = 1 << 14, 256
#: After so many operations on one thread that have nothing to do with the loss scale,
#: the tracker stops listening there, until the loss scale is read again.
_IDLE = 20_000
#: Of a tensor with more elements it is not asked which numbers they are.
_FEW = 1 << 10


class _Here(threading.local):
    """What belongs to one thread, as a replica does."""

    silent = 0
    idle = 0


class Bounded(Dict[Any, Any]):
    """A dictionary that forgets its oldest entries beyond a size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self._size and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, value)


class Tracker:
    """The units of eager mode's values, as far as they are known.

    Args:
      marked: Returns the unit that a mark on an operation of a function means.
      read_now: Returns a unit of what is multiplied with the loss scale as it is now.
    """

    def __init__(
        self, marked: Callable[[str], Optional[Unit]], read_now: Callable[..., Unit]
    ) -> None:
        self._marked, self._read_now = marked, read_now
        self._new: Dict[int, Unit] = {}
        self._old: Dict[int, Unit] = {}
        #: What variables hold, by the numbers of their handles.
        self._held = Bounded(_VARIABLES)
        self._returned = Bounded(_FUNCTIONS)
        self._direct = DirectReads()
        self._here = _Here()

    def unit(self, tensor: Tensor) -> Optional[Unit]:
        """Returns the unit of a tensor or of a variable's handle."""
        return self._get(number_of(tensor))

    def note(self, tensor: Tensor, unit: Unit) -> None:
        """Notes the unit of a tensor, and listens from now on."""
        self._set(number_of(tensor), unit)
        self.listen()

    def note_handle(self, handle: Any, unit: Unit) -> None:
        """Notes the unit of what a variable holds."""
        self._held[number_of(handle)] = unit

    def listen(self) -> None:
        """Is told of each operation on this thread from now on."""
        self._here.idle = 0
        callbacks.add(self)

    def is_deaf(self) -> bool:
        """Tells whether this thread's operations have gone untracked for a while."""
        return self._here.idle >= _IDLE

    def is_silent(self) -> bool:
        """Tells whether this thread's operations are not tracked now."""
        return self._here.silent > 0

    def __enter__(self) -> None:
        """Does not track what this thread does within."""
        self._here.silent += 1

    def __exit__(self, *_: object) -> None:
        self._here.silent -= 1

    def _get(self, number: int) -> Optional[Unit]:
        found = self._new.get(number) or self._old.get(number)
        return found or self._held.get(number)

    def _set(self, number: int, unit: Unit) -> None:
        if len(self._new) >= _UNITS:
            self._new, self._old = {}, self._new
        if len(unit.checks) > 1:
            unit = unit._replace(checks=still_open(unit.checks))
        self._new[number] = unit

    def hear(self, kind: str, inputs: Any, outputs: Any, attrs: Any) -> bool:
        """Notes the units of an operation's results: a `callbacks.Listener`."""
        here = self._here
        if here.silent or here.idle >= _IDLE:
            return bool(here.silent)
        here.silent += 1
        try:
            self._note_operation(kind, inputs, outputs, attrs)
            self._direct.heard(outputs)
        finally:
            here.silent -= 1
        here.idle += 1
        return here.idle < _IDLE

    def _note_operation(self, kind: str, inputs: Any, outputs: Any, attrs: Any) -> None:
        units = [self._get(number_of(each)) for each in inputs]
        if kind in ASSIGNS or kind in ADDS:
            assign(self._held, number_of(inputs[0]), kind, units)
            if inputs[-1].shape.rank:
                self._direct.note(inputs[0], self._held.get(number_of(inputs[0])))
        elif kind == "MakeIterator":
            self._hold_elements(number_of(inputs[1]), units[0])
        else:
            if self._direct and None in units:
                units = list(map(self._read_directly, inputs, units))
            found = self._results(kind, inputs, units, len(outputs), attrs)
            self._set_all(outputs, found)

    def _results(
        self, kind: str, inputs: Any, units: Units, count: int, attrs: Any
    ) -> Units:
        """Returns the units of what an operation returned, nothing if none has any."""
        if kind in READS:
            return [units[0] or KEPT]
        if kind in DATASETS:
            return [self._dataset(attrs, units, kind == "ReduceDataset")] * count
        if kind.startswith("__"):
            return self._call(kind, inputs, units, count)
        if any(units) or kind in STARTS:
            return results(kind, units, _operands(inputs), count)
        return []

    def _set_all(self, outputs: Any, units: Units) -> None:
        for output, unit in zip(outputs, units):
            if unit is not None:
                self._set(number_of(output), unit)
                if not unit.is_kept and not unit.is_zero:
                    self._here.idle = 0

    def _read_directly(self, tensor: Tensor, unit: Optional[Unit]) -> Optional[Unit]:
        """Returns the unit of an input that may be a variable itself."""
        number = None if unit is not None else self._direct.variable_of(tensor)
        return unit if number is None else self._held.get(number)

    def _look_into(self, name: str, key: Any, look: Callable[[Sweep], Any]) -> Any:
        """Returns what a function does to units, once for each list of them."""
        known = self._returned.get(name)
        if known is None:
            known = self._returned[name] = {}
        if key not in known:
            known[key] = look(Sweep(lambda _: None, lambda _: Swept(), self._marked))
            forget_definitions()
        return known[key]

    def _dataset(self, attrs: Any, units: Units, is_run: bool) -> Optional[Unit]:
        """Returns the unit of a dataset's elements, or of what they came to now."""
        key, tokens = _without_origins(units)
        name, counts = function_of_elements(attrs)
        unit: Optional[Unit] = self._look_into(
            name, key, lambda sweep: sweep.of_dataset(definition(name), key, counts)
        )
        if unit is None:
            return None
        unit = _with_origins(unit, tokens)
        return self._with_reading(unit) if is_run else unit

    def _hold_elements(self, iterator: int, unit: Optional[Unit]) -> None:
        """Notes the unit of what an iterator returns from now on."""
        if unit is not None:
            self._held[iterator] = self._with_reading(unit, is_from_then_on=True)

    def _call(self, name: str, inputs: Any, units: Units, count: int) -> Units:
        """Returns the units of what a function returned, and notes what it assigned."""
        key, tokens = _without_origins(units)
        outs, after = self._look_into(
            name, key, lambda sweep: sweep.body(definition(name), list(key), count)
        )
        for each, before, unit in zip(inputs, key, after):
            if unit is not before and unit is not None and not unit.is_scale:
                self._hold(number_of(each), _with_origins(unit, tokens))
                if held_rank(each):
                    self._direct.note(each, self._held.get(number_of(each)))
        return [self._returned_unit(unit, tokens) for unit in outs]

    def _hold(self, number: int, unit: Unit) -> None:
        """Notes what a function left in a variable."""
        if not unit.is_free or unit.checks:
            checks = latest(unit.checks)
            self._held[number] = unit._replace(checks=checks, is_kept=True)
        elif not self._held.get(number, unit).is_trained:
            self._held.pop(number, None)  # as any weight

    def _returned_unit(self, unit: Optional[Unit], tokens: List[Unit]) -> Any:
        if unit is None:
            return None
        return self._with_reading(_with_origins(unit, tokens))

    def _with_reading(self, unit: Unit, is_from_then_on: bool = False) -> Unit:
        """Returns a unit with where the loss scale was read, if that is not known."""
        if unit.is_free or unit.is_zero or unit.readings or unit.is_kept:
            return unit
        readings = self._read_now(is_from_then_on).readings
        return unit._replace(readings=readings)


def _operands(inputs: Any) -> Operands:
    """Returns what inputs are. Rules ask seldom: reading one waits for the device."""

    def value(index: int) -> Any:
        tensor = inputs[index]
        # A handle is no array.
        is_few = (
            tensor.dtype.is_numpy_compatible and tensor.shape.num_elements() <= _FEW
        )
        return numbers_in(tensor.numpy()) if is_few else None

    return Operands(value, lambda index: width_of(inputs[index]))


def _without_origins(units: Units) -> Tuple[Tuple[Optional[Unit], ...], List[Unit]]:
    """Returns units that name others by numbers where they come from."""
    tokens: List[Unit] = []
    found: Dict[Unit, Unit] = {}
    for unit in units:
        if unit is not None and unit not in found:
            name = frozenset([len(tokens)])
            tokens.append(unit)
            found[unit] = unit._replace(
                readings=name if unit.readings else frozenset(),
                checks=name if unit.checks else frozenset(),
            )
    return tuple(None if unit is None else found[unit] for unit in units), tokens


def _with_origins(unit: Unit, tokens: List[Unit]) -> Unit:
    return unit._replace(
        readings=_named(unit.readings, [each.readings for each in tokens]),
        checks=_named(unit.checks, [each.checks for each in tokens]),
    )


def _named(names: FrozenSet[Any], sets: List[FrozenSet[Any]]) -> FrozenSet[Any]:
    found = [sets[name] if isinstance(name, int) else {name} for name in names]
    return frozenset().union(*found)
