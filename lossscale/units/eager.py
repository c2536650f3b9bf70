"""The units of eager mode's values. TensorFlow tells the tracker of each operation.

The tracker keeps units by the keys of tensors, so it keeps no tensor alive, and forgets
the oldest units when there are many. It sweeps a function that eager mode calls once
for each list of units that the function is called with.
"""

from __future__ import annotations

import threading
from typing import Callable, Dict, Hashable, List, Optional, Tuple, TypeVar

from lossscale.runtime import callbacks
from lossscale.runtime.aliases import Array, Attributes, Handle, Tensor, Tensors
from lossscale.runtime.bodies import (
    definition,
    forget_definitions,
    function_of_elements,
    numbers_in,
    width_of,
)
from lossscale.runtime.callbacks import held_rank, key_of
from lossscale.runtime.graphs import DATASETS
from lossscale.units.direct_reads import DirectReads
from lossscale.units.operations import results
from lossscale.units.sources import Input, ReadNow, Source, Sources, carried_on
from lossscale.units.sweep import Found, Sweep, Swept
from lossscale.units.unit import Operands, Unit, Units
from lossscale.units.variables import ASSIGNS, as_held, assign

#: After so many units a new table begins. The table before it is kept.
_UNITS = 1 << 16
#: So many variables and functions are remembered.
_VARIABLES, _FUNCTIONS = 1 << 14, 256
#: After so many operations on one thread that have nothing to do with the loss scale,
#: the tracker stops listening there, until the loss scale is read again.
_IDLE = 20_000
#: The numbers in a tensor with more elements are not read.
_FEW = 1 << 10

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
#: What sweeps of one function found, by the units of its inputs.
Results = Dict[Hashable, Found]


class _Here(threading.local):
    """The state of one thread. Each replica has a thread of its own."""

    silent = 0
    idle = 0


class LimitedDict(Dict[Key, Value]):
    """A dictionary that forgets its oldest entries beyond a size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self._size and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, value)


class Tracker:
    """The units of eager mode's values, as far as they are known.

    Args:
      marked: Returns the unit that a mark on an operation of a function means.
      read_now: Reads the loss scale as it is now, and returns that read as a source.
    """

    def __init__(
        self, marked: Callable[[str], Optional[Unit]], read_now: ReadNow
    ) -> None:
        self._marked, self._read_now = marked, read_now
        self._new: Dict[int, Unit] = {}
        self._old: Dict[int, Unit] = {}
        #: The units of what variables hold, by the keys of their handles.
        self._held: LimitedDict[Hashable, Unit] = LimitedDict(_VARIABLES)
        self._returned: LimitedDict[str, Results] = LimitedDict(_FUNCTIONS)
        self._direct = DirectReads()
        self._here = _Here()

    def unit(self, tensor: Tensor) -> Optional[Unit]:
        """Returns the unit of a tensor or of a variable's handle."""
        return self._get(key_of(tensor))

    def note(self, tensor: Tensor, unit: Unit) -> None:
        """Notes the unit of a tensor, and tracks this thread's operations from now."""
        self._set(key_of(tensor), unit)
        self.listen()

    def note_handle(self, handle: Handle, unit: Unit) -> None:
        """Notes the unit of what a variable holds."""
        self._held[key_of(handle)] = unit

    def listen(self) -> None:
        """Tracks each operation that this thread runs from now on."""
        self._here.idle = 0
        callbacks.add(self)

    def is_deaf(self) -> bool:
        """Tells whether the tracker has stopped listening on this thread."""
        return self._here.idle >= _IDLE

    def is_silent(self) -> bool:
        """Tells whether this thread is within a `with` of this tracker: untracked."""
        return self._here.silent > 0

    def __enter__(self) -> None:
        """Does not track this thread's operations within the `with`."""
        self._here.silent += 1

    def __exit__(self, *_: object) -> None:
        self._here.silent -= 1

    def _get(self, key: int) -> Optional[Unit]:
        found = self._new.get(key) or self._old.get(key)
        return found or self._held.get(key)

    def _set(self, key: int, unit: Unit) -> None:
        if len(self._new) >= _UNITS:
            self._new, self._old = {}, self._new
        if len(unit.sources) > 1:
            unit = unit._replace(sources=carried_on(unit.sources))
        self._new[key] = unit

    def hear(
        self, kind: str, inputs: Tensors, outputs: Tensors, attrs: Attributes
    ) -> bool:
        """Notes the units of an operation's results, as a `callbacks.Listener`."""
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

    def _note_operation(
        self, kind: str, inputs: Tensors, outputs: Tensors, attrs: Attributes
    ) -> None:
        units = [self._get(key_of(each)) for each in inputs]
        if kind in ASSIGNS:
            assign(self._held, key_of(inputs[0]), kind, units)
            if inputs[-1].shape.rank:
                self._direct.note(inputs[0], self._held.get(key_of(inputs[0])))
        elif kind == "MakeIterator":
            self._hold_elements(key_of(inputs[1]), units[0])
        else:
            if self._direct and None in units:
                units = list(map(self._read_directly, inputs, units))
            found = self._results(kind, inputs, units, len(outputs), attrs)
            self._set_all(outputs, found)

    def _results(
        self, kind: str, inputs: Tensors, units: Units, count: int, attrs: Attributes
    ) -> Units:
        """Returns the units of an operation's results (empty: none has any)."""
        if kind in DATASETS:
            return self._dataset(kind, attrs, units, count)
        if kind.startswith("__"):
            return self._call(kind, inputs, units, count)
        return results(kind, units, _operands(inputs), count)

    def _set_all(self, outputs: Tensors, units: Units) -> None:
        for output, unit in zip(outputs, units):
            if unit is not None:
                self._set(key_of(output), unit)
                if not unit.from_variable and not unit.is_zero:
                    self._here.idle = 0

    def _read_directly(self, tensor: Tensor, unit: Optional[Unit]) -> Optional[Unit]:
        """Returns the unit of an input, which may be a variable read directly."""
        key = None if unit is not None else self._direct.variable_of(tensor)
        return unit if key is None else self._held.get(key)

    def _look_into(
        self, name: str, key: Hashable, look: Callable[[Sweep], Found]
    ) -> Found:
        """Returns what a function does to units. It is swept once for each key."""
        known = self._returned.get(name)
        if known is None:
            known = self._returned[name] = {}
        if key not in known:
            known[key] = look(Sweep(lambda _: None, lambda _: Swept(), self._marked))
            forget_definitions()
        return known[key]

    def _dataset(self, kind: str, attrs: Attributes, units: Units, count: int) -> Units:
        """Returns the units of a dataset, or of the result of reducing one."""
        key, given = _as_inputs(units)
        name, counts = function_of_elements(attrs)
        found, _ = self._look_into(
            name,
            (kind, key),
            lambda s: (s.dataset(kind, definition(name), key, counts, count), []),
        )
        called = _as_called(found, given)
        return list(map(self._with_read, called)) if kind == "ReduceDataset" else called

    def _hold_elements(self, iterator: int, unit: Optional[Unit]) -> None:
        """Notes the unit of the elements that an iterator returns from now on."""
        read = self._with_read(unit, is_from_then_on=True)
        if read is not None:
            self._held[iterator] = read

    def _call(self, name: str, inputs: Tensors, units: Units, count: int) -> Units:
        """Returns the units of a function's results, and notes what it assigned."""
        key, given = _as_inputs(units)
        outs, after = self._look_into(
            name, key, lambda sweep: sweep.body(definition(name), list(key), count)
        )
        for each, before, unit in zip(inputs, key, after):
            if unit is not before and unit is not None and not unit.is_scale:
                self._hold(key_of(each), _with_sources(unit, given))
                if held_rank(each):
                    self._direct.note(each, self._held.get(key_of(each)))
        return list(map(self._with_read, _as_called(outs, given)))

    def _hold(self, key: int, unit: Unit) -> None:
        """Notes the unit of the value that a function left in a variable."""
        if not unit.is_free or unit.unscalings:
            self._held[key] = as_held(unit)
        elif not self._held.get(key, unit).is_trained:
            self._held.pop(key, None)  # a variable that is not listed holds a weight

    def _with_read(
        self, unit: Optional[Unit], is_from_then_on: bool = False
    ) -> Optional[Unit]:
        """Adds a read of the loss scale as it is now to a scaled unit without one."""
        if (
            unit is None
            or unit.is_free
            or unit.is_zero
            or unit.reads
            or unit.from_variable
        ):
            return unit
        return unit._replace(sources=unit.sources | {self._read_now(is_from_then_on)})


def _operands(inputs: Tensors) -> Operands:
    """Returns inputs as operands. Rules rarely read one, which waits for the device."""

    def value(index: int) -> Optional[Array]:
        tensor = inputs[index]
        # A handle is not compatible with NumPy.
        is_few = (
            tensor.dtype.is_numpy_compatible and tensor.shape.num_elements() <= _FEW
        )
        return numbers_in(tensor.numpy()) if is_few else None

    return Operands(value, lambda index: width_of(inputs[index]))


def _as_inputs(units: Units) -> Tuple[Tuple[Optional[Unit], ...], List[Unit]]:
    """Returns units as a function's body sees them, and the different units given.

    In a body `Input`s stand for sources. So a function is swept once for all lists of
    units that differ in their sources only.
    """
    given: List[Unit] = []
    found: Dict[Unit, Unit] = {}
    for unit in units:
        if unit is not None and unit not in found:
            kinds = {each.is_read for each in unit.sources}
            inputs = frozenset(Input(len(given), is_read) for is_read in kinds)
            given.append(unit)
            found[unit] = unit._replace(sources=inputs)
    return tuple(None if unit is None else found[unit] for unit in units), given


def _as_called(units: Units, given: List[Unit]) -> List[Optional[Unit]]:
    """Returns the units of a function's results, with the sources of this call."""
    return [unit if unit is None else _with_sources(unit, given) for unit in units]


def _with_sources(unit: Unit, given: List[Unit]) -> Unit:
    behind = (each for s in unit.sources for each in _behind(s, given))
    return unit._replace(sources=frozenset(behind), parts=())


def _behind(source: Source, given: List[Unit]) -> Sources:
    if not isinstance(source, Input):
        return frozenset([source])
    unit = given[source.position]
    return unit.reads if source.is_read else unit.unscalings
