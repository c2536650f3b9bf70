"""What is not finite, where it comes from, and what to write against it.

`Attempt` notes a `Fault` for each value of a run that is not finite. `Advice` decides
what to write against it:

```
an overflow in a layer's own operations, or where its inputs are cast:
  the layer is float32, with the layers of a library that contain or surround it;
  it may be the model itself, which casts its data
in an operation between layers, or in a `call` that a user wrote around layers:
  the operation's inputs are cast to float32, since a dtype would not reach them
two dtypes meet where only one may be, since a layer became float32:
  the layer around them is float32, else their operations' inputs are cast
in the loss, outside of all layers:
  the loss is computed in float32, from outputs in float32
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Tuple

import tensorflow as tf

from lossscale.ranges import calls, causes
from lossscale.ranges.calls import Call, Watcher, copy_of
from lossscale.ranges.magnitudes import floats_in, is_bad, is_float, look
from lossscale.ranges.model_state import SIXTEEN_BITS, in_float32
from lossscale.runtime import keras_versions
from lossscale.runtime.derivatives import derivative
from lossscale.runtime.op_callbacks import key_of

_OPERATION = """\
{name} is an operation, and operations have no dtype. Cast its inputs to float32: \
{cast}."""
_IN_CALL = """\
In `call` of {name} ({kind}) cast the inputs of {operation} to float32: {cast}. Layers \
within it keep their own dtype."""
_DATA = """\
{name} casts its data to float16, which ends at 65504. Instead you may divide the data \
by a number, as in x / 255, before the model gets them."""


@dataclasses.dataclass
class Fault:
    """Something that goes wrong in a call: mostly, a value that is not finite."""

    #: The innermost call of a layer or an operation. None: outside of the model.
    call: Optional[Call]
    #: The type of TensorFlow's operation, such as "MatMul". "given": no noted operation
    #: made the value. None: it is unknown.
    operation: Optional[str] = None
    #: The cast of the call's inputs overflows, or is missing: they have two dtypes.
    is_cast: bool = False
    dtype: str = ""
    #: Which of "inf", "-inf" and "nan" it holds.
    kinds: List[str] = dataclasses.field(default_factory=list)
    largest: float = 0.0  # the largest finite magnitude of inputs and result
    sources: List[int] = dataclasses.field(default_factory=list)  # keys of bad inputs
    #: It is in the gradient that the call hands back, and `operation` computes that.
    is_backward: bool = False
    #: On the way back, the operation whose derivative it is. Else the operation.
    of: str = ""
    #: What the argument of that held: `causes.held_by`.
    held: FrozenSet[str] = frozenset()
    #: Whether its derivative meets 16 bits: here, or in a layer before.
    meets_16_bits: bool = False

    @property
    def is_overflow(self) -> bool:
        """Whether finite values became infinite in 16 bits, within the model."""
        # A result that holds only -inf, or that a cast made, may be a mask.
        if self.call is None or self.sources or self.kinds == ["-inf"]:
            return False
        is_made = self.operation != "given"
        if self.operation == "Cast":  # Keras 3.3's normalizations cast within `call`
            is_within = self.call.makes_layers and self.call.parent is not None
            is_made = self.is_cast or self.call.is_recurrent or is_within
        return is_made and self.dtype in SIXTEEN_BITS


class Advice:
    """Layers to make with dtype="float32", and operations whose inputs to cast."""

    def __init__(self, keras: Any, faults: Tuple[Fault, ...] = ()) -> None:
        self.keras = keras
        #: By path, the calls of the layers, in the order in which they were added.
        self.layers: Dict[str, Call] = {}
        #: By path, the calls of operations and of layers with operations of their own,
        #: and the types of these operations.
        self.casts: Dict[str, Tuple[Call, str]] = {}
        #: The loss is computed in float32.
        self.widens_loss = False
        #: The faults against which something was added.
        self.faults: List[Fault] = []
        for fault in faults:
            self.add(fault)

    def __bool__(self) -> bool:
        return bool(self.layers or self.casts or self.widens_loss)

    def add(self, fault: Fault) -> bool:
        """Adds what may help against a fault. False if all that may help is known."""
        before = (len(self.layers), len(self.casts), self.widens_loss)
        if fault.call is not None:
            self._add(fault, fault.call.owner)
        else:
            self.widens_loss |= fault.dtype in SIXTEEN_BITS
        is_new = before != (len(self.layers), len(self.casts), self.widens_loss)
        self.faults += [fault] * is_new
        return is_new

    def _add(self, fault: Fault, call: Call) -> None:
        above = call.parent
        is_between = call.is_written_around_layers and not fault.is_cast
        # The model itself only if it casts its data.
        takes_dtype = call.is_layer and (above is not None or fault.is_cast)
        if takes_dtype and not is_between:
            wanted = _with_wrappers(call)
            new = [c for c in wanted if c.path not in self.layers]
            self.layers.update((c.path, c) for c in new)
            # In float32 a layer casts nothing: the cast of another input is known, too.
            is_own_cast = fault.is_cast and fault.operation == "Cast"
            if new or call.is_of_library or is_own_cast:
                return
        if call.is_of_library and call.is_layer and fault.operation == "Cast":
            return  # nobody wrote its `call`, or can change it
        operation = "" if fault.is_backward else fault.operation
        self.casts.setdefault(call.path, (call, operation or "its operations"))

    def complete(
        self,
        attempt_of: Callable[[Advice], Attempt],
        run: Callable[[Any], List[Fault]],
    ) -> str:
        """Adds what helps against the faults that `run` returns, until none does.

        Returns the error of the last run, "" if there was none.
        """
        for _ in range(20):  # then the advice is given as it is
            attempt, error = attempt_of(self), ""
            try:
                faults = run(attempt)
            except (tf.errors.OpError, TypeError, ValueError) as raised:
                # The model cannot run, since two dtypes meet in the call that failed.
                faults = [Fault(attempt.failed, is_cast=True)]
                error = f"{raised!s:.200}"
            is_new = [self.add(fault) for fault in faults]
            if not any(is_new):
                break
        return error

    def casts_in(self, call: Optional[Call]) -> bool:
        """Whether what a call gets is cast to float32. None: the step around all."""
        if call is None or call.parent is None:
            return self.widens_loss
        return any(call.layer is other.layer for other, _ in self.casts.values())

    def __str__(self) -> str:
        is_keras3 = keras_versions.is_keras3(self.keras)
        cast = 'keras.ops.cast(x, "float32")' if is_keras3 else "tf.cast(x, tf.float32)"

        said = []
        for call, operation in self.casts.values():
            name, kind = call.path, type(call.layer).__name__
            text = _IN_CALL if call.is_layer else _OPERATION
            said.append(
                text.format(name=name, kind=kind, operation=operation, cast=cast)
            )
        models = [call for call in self.layers.values() if call.parent is None]
        said += [_DATA.format(name=call.path) for call in models]
        said += [causes.LOSS_IN_FLOAT16] * self.widens_loss
        lines = dict.fromkeys(map(_line, self.layers.values()))
        indented = "".join(f"    {line}\n" for line in lines)
        to_write = f"Write\n\n{indented}" if lines else ""
        return "\n".join(filter(None, [to_write, " ".join(said)]))


def _with_wrappers(call: Call) -> List[Call]:
    """Returns a layer's call, and those around it whose dtype must be the same.

    Keras 3's TimeDistributed calls the method `call` of its layer, so that its own
    dtype counts. The state of a loop over time has one dtype, also in stacked cells.
    """
    calls, between = [call], [call]
    for above in call.around[:-1]:  # without the model's
        between.append(above)
        is_given = any(hasattr(above.layer, n) for n in ("layer", "forward_layer"))
        wraps = is_given and above.is_of_library and above is call.parent
        if wraps or above.is_recurrent:
            calls = list(between)
        if above.is_recurrent and hasattr(above.layer.cell, "cells"):
            stack = Call(above.layer.cell, above)
            cells = [Call(cell, stack) for cell in stack.layer.cells]
            stacked = [*between[:-1], *cells, stack, above]
            calls = list({id(c.layer): c for c in stacked}.values())
    return calls[::-1]


def _line(call: Call) -> str:
    name, kind = str(call.layer.name), type(call.layer).__name__
    if call.parent is not None and hasattr(call.parent.layer, "forward_layer"):
        # Bidirectional makes two of the one that it is given.
        name = name.replace("forward_", "", 1).replace("backward_", "", 1)
    if kind == "Sequential":  # its constructor takes no dtype
        return f"Sequential([keras.Input(...), ...], name={name!r})  # made in float32"
    line = f'{kind}(..., dtype="float32", name={name!r})'
    accepted = inspect.signature(type(call.layer).__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    if takes_any or "dtype" in accepted:
        return line
    return f"{line}  # whose constructor must pass dtype on to super().__init__"


class Attempt(Watcher):
    """A run of the model as if some advice had been followed, and its faults."""

    def __init__(self, advice: Advice) -> None:
        super().__init__()
        self._advice = advice
        #: The faults by key of the tensor, in the order of computation.
        self.faults: Dict[int, Fault] = {}
        #: The call that each tensor, or gradient, belongs to.
        self._made: Dict[int, Optional[Call]] = {}

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        advice, layers = self._advice, []
        for call in advice.layers.values():
            # A layer makes others with its dtype. Bidirectional makes two of its one.
            makes_some = call.makes_layers or hasattr(call.layer, "forward_layer")
            of_call = keras_versions.layers_of(call.layer)
            layers += of_call if makes_some else [call.layer]
        layers += [call.layer for call, _ in advice.casts.values() if call.is_layer]
        with in_float32(advice.keras, layers), super().watching(model):
            yield

    def note_op(self, kind: str, inputs: Any, outputs: Any) -> bool:
        if not self.is_watching:
            return False
        call, floats = self.innermost, floats_in(list(inputs))
        # Integers are data, too.
        given = list(inputs) if kind == "Cast" else floats
        if call is None and derivative(calls.__file__) is not None:
            made_in = (self._made.get(key_of(tensor)) for tensor in floats)
            call = next(filter(None, made_in), None)
        self._made.update((key_of(each), call) for each in filter(is_float, outputs))
        for output in filter(is_bad, outputs):
            fault = _fault_of(call, kind, [*given, output])
            for tensor in filter(is_bad, floats):
                key = key_of(tensor)
                if key not in self.faults:  # a constant, or computed before this began
                    self.faults[key] = _fault_of(call, "given", [tensor])
                    self._look_closer(self.faults[key], [])
                fault.sources.append(key)
            if not fault.sources:
                self._look_closer(fault, floats)
            self.faults[key_of(output)] = fault
        return True

    def _look_closer(self, fault: Fault, floats: List[Any]) -> None:
        """Finds out whether this computes a derivative, of what, and in which call."""
        now = derivative(calls.__file__)
        if now is None:
            fault.call = self.innermost
        else:
            fault.is_backward = True
            floats = floats_in(list(now.get("inputs") or ()))
            results = floats_in(list(now.get("outputs") or ()))
            for tensor in (*results, *floats):
                if key_of(tensor) in self._made:
                    fault.call = self._made[key_of(tensor)]
                    break
            fault.of = str(now.get("op_name", ""))
            floats = floats or results  # of sqrt(x) only the result is still needed
        fault.of = fault.of or str(fault.operation)
        fault.held = causes.held_by(fault.of, floats)
        before = [tensor.dtype.name for c in self.calls for tensor in c.outputs]
        fault.meets_16_bits = any(n in SIXTEEN_BITS for n in (fault.dtype, *before))

    def begin(self, call: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        for tensor in floats_in((args, kwargs)):
            # A cast of the layer's inputs that overflowed is the layer's own.
            fault = self.faults.get(key_of(tensor))
            if fault is None or fault.operation != "Cast" or fault.sources:
                continue
            if fault.call in (call.parent, None):
                fault.call, fault.is_cast = call, True
        # Copies, since two layers may get the same tensor: the copy is of this call.
        args, kwargs = self._copied((args, kwargs), self._advice.casts_in(call))
        return super().begin(call, args, kwargs)

    def end(self, call: Call, outputs: Any) -> Any:
        def copy(tensor: Any) -> Any:
            return copy_of(tensor, functools.partial(self._come_back, call))

        outputs = self._copied(outputs, self._advice.casts_in(call.parent), copy)
        above = None if call.parent is self.root else call.parent
        self._made.update((key_of(tensor), above) for tensor in floats_in(outputs))
        return super().end(call, outputs)

    def _come_back(self, call: Call, upstream: Any) -> Any:
        """Returns a copy of the gradient of a call's output, which is of that call."""
        for key in self.origins(upstream) if is_bad(upstream) else ():
            fault = self.faults[key]
            is_cast = fault.is_backward and fault.operation == "Cast"
            if is_cast and fault.call in (call.parent, None):
                fault.call, fault.is_cast = call, True
        copy = tf.identity(upstream)
        if is_float(copy):
            self._made[key_of(copy)] = call
        return copy

    def origins(self, tensor: Any) -> List[int]:
        """Returns the keys of the faults, of finite numbers, that made a tensor bad."""
        waiting, found = [key_of(tensor)], {}
        while waiting:
            key = waiting.pop()
            if key in self.faults and key not in found:
                found[key] = self.faults[key]
                waiting += found[key].sources
        return [key for key, fault in found.items() if not fault.sources]

    @property
    def overflows(self) -> List[Fault]:
        of_layers = [each for each in self.faults.values() if each.is_overflow]
        return [fault for fault in of_layers if not fault.is_backward]

    def _copied(
        self, nest: Any, is_widened: bool, copy: Callable[..., Any] = tf.identity
    ) -> Any:
        def copied(value: Any) -> Any:
            if not is_float(value):
                return value
            is_short = value.dtype.name in SIXTEEN_BITS
            wide = tf.cast(value, tf.float32) if is_short and is_widened else value
            return keras_versions.with_mask(copy(wide), value)

        return tf.nest.map_structure(copied, nest)


def _fault_of(call: Optional[Call], operation: str, tensors: List[Any]) -> Fault:
    """Returns the fault of an operation. Its result is the last of the tensors."""
    looks, dtype = list(map(look, tensors)), str(tensors[-1].dtype.name)
    largest = max(one.largest for one in looks)
    return Fault(call, operation, dtype=dtype, kinds=looks[-1].kinds, largest=largest)
