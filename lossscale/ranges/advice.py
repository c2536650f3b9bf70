"""What to write against an overflow: the one place that decides it, for all tools.

```
an overflow in a layer's own operations, or where its inputs are cast:
  the layer is float32, with the layers of a library that contain or surround it
in an operation between layers, or in a `call` that a user wrote around layers:
  the operation's inputs are cast to float32, since a dtype would not reach them
two dtypes meet where only one may be, since a layer became float32:
  the layer around them is float32, else their operations' inputs are cast
```

`Advice` can be tried: `applied` lets the model compute as if it had been followed.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.ranges.calls import Call, with_mask
from lossscale.ranges.magnitudes import floats_in
from lossscale.ranges.model_state import SIXTEEN_BITS, in_float32
from lossscale.runtime import kerases

#: After so many trials the advice is given as it is.
_TRIALS = 20

_OPERATION = """\
{name} is an operation, and operations have no dtype. Cast its inputs to float32: \
{cast}."""
_IN_CALL = """\
In `call` of {name} ({kind}) cast the inputs of {operation} to float32: {cast}. Layers \
within it keep their own dtype, whatever dtype it has itself."""
_MEETS = """\
If `call` of {name} ({kind}) combines its outputs with others, cast those to float32, \
too: {cast}."""
_COMPUTED_IN_32 = """\
It computes in {dtype} already: look for a division by zero, a logarithm of zero, an \
exponential, and a learning rate that is too high."""


class Fault(NamedTuple):
    """A call in which something goes wrong.

    Attributes:
      call: The innermost call of a layer or an operation.
      operation: The type of TensorFlow's operation, None if it is unknown.
      is_cast: Whether the cast of the call's inputs overflows.
      is_mixed: Whether tensors of two dtypes meet, rather than something overflows.
    """

    call: Call
    operation: Optional[str] = None
    is_cast: bool = False
    is_mixed: bool = False


class Advice:
    """Layers to make with dtype="float32", and operations whose inputs to cast.

    Attributes:
      layers: By path, the calls of the layers, in the order in which they were added.
      casts: By path, the calls of operations and of layers with operations of their
        own, and the types of these operations.
    """

    def __init__(self, keras: Any) -> None:
        self._keras = keras
        self.layers: Dict[str, Call] = {}
        self.casts: Dict[str, Tuple[Call, str]] = {}
        #: The calls around a layer whose `call` may have to cast what it meets there.
        self._may_meet: Dict[str, Call] = {}

    def __bool__(self) -> bool:
        return bool(self.layers or self.casts)

    def add(self, fault: Fault) -> bool:
        """Adds what helps against a fault. False if all that may help is known."""
        call = fault.call.owner
        can_cast = not call.is_of_library or not call.is_layer
        if not call.is_layer or call.parent is None:
            return self._cast(call, fault.operation)
        if call.is_written_around_layers and not (fault.is_cast or fault.is_mixed):
            return self._cast(call, fault.operation)
        return self._make_float32(call) or (
            can_cast and self._cast(call, fault.operation)
        )

    def _make_float32(self, call: Call) -> bool:
        new = [each for each in _with_wrappers(call) if each.path not in self.layers]
        for each in new:
            self.layers[each.path] = each
        above = call.parent
        if above is not None and not above.is_of_library:
            self._may_meet[above.path] = above
        return bool(new)

    def _cast(self, call: Call, operation: Optional[str]) -> bool:
        is_new = call.path not in self.casts
        self.casts.setdefault(call.path, (call, operation or "its operations"))
        return is_new

    def try_out(self, faults_now: Callable[[], List[Fault]]) -> None:
        """Adds what helps against the faults that remain, until none does.

        Args:
          faults_now: Runs the model with this advice `applied`, and returns the faults.
        """
        self._may_meet = {}
        for _ in range(_TRIALS):
            is_new = [self.add(fault) for fault in faults_now()]
            if not any(is_new):
                break
        self._may_meet = {}

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Lets the model compute as if this advice had been followed.

        `arguments` and `outputs` must be called for each call meanwhile.
        """
        layers = [layer for call in self.layers.values() for layer in _made_by(call)]
        around = [call.layer for call, _ in self.casts.values() if call.is_layer]
        with in_float32(self._keras, [*layers, *around]):
            yield

    def arguments(self, call: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Returns a call's arguments, in float32 where the advice casts them."""
        if self._casts_in(call):
            args, kwargs = tf.nest.map_structure(_in_32_bits, (args, kwargs))
        return args, kwargs

    def outputs(self, call: Call, outputs: Any) -> Any:
        """Returns a call's outputs, in float32 where the advice casts them."""
        if call.parent is not None and self._casts_in(call.parent):
            outputs = tf.nest.map_structure(_in_32_bits, outputs)
        return outputs

    def _casts_in(self, call: Call) -> bool:
        return any(call.layer is made.layer for made, _ in self.casts.values())

    @property
    def lines(self) -> List[str]:
        """A line of Python for each layer that the user makes in another way."""
        lines = {_line(call): None for call in self.layers.values()}
        return list(lines)

    @property
    def sentences(self) -> List[str]:
        """A sentence for each place where the user casts the inputs of operations."""
        is_keras3 = kerases.is_keras3(self._keras)
        cast = 'keras.ops.cast(x, "float32")' if is_keras3 else "tf.cast(x, tf.float32)"
        found = []
        for path, (call, operation) in self.casts.items():
            text = _IN_CALL if call.is_layer else _OPERATION
            kind = type(call.layer).__name__
            found.append(
                text.format(name=path, kind=kind, operation=operation, cast=cast)
            )
        for path, call in self._may_meet.items():
            if path not in self.casts:
                kind = type(call.layer).__name__
                found.append(_MEETS.format(name=path, kind=kind, cast=cast))
        return found

    @property
    def in_one_line(self) -> str:
        """All of it as sentences of one paragraph."""
        lines = [f"Write {' and '.join(self.lines)}."] if self.lines else []
        return " ".join([*lines, *self.sentences])

    def __str__(self) -> str:
        lines = [f"    {line}" for line in self.lines]
        paragraphs = ["Write", "\n".join(lines)] if lines else []
        if not self.sentences:
            return "\n\n".join(paragraphs) + "\n"
        return "\n\n".join([*paragraphs, " ".join(self.sentences)])


def for_faults(keras: Any, faults: List[Fault], dtype: str) -> Tuple[Advice, str]:
    """Returns the advice against some faults, and what to say if there is none.

    Args:
      keras: The Keras of the model.
      faults: The faults.
      dtype: The name of the dtype in which they happened.
    """
    found = Advice(keras)
    if dtype not in SIXTEEN_BITS:
        return found, _COMPUTED_IN_32.format(dtype=dtype)
    for fault in faults:
        found.add(fault)
    return found, ""


def _with_wrappers(call: Call) -> List[Call]:
    """Returns a layer's call, and those around it whose dtype must be the same.

    Keras 3's TimeDistributed calls the method `call` of its layer, so that its own
    dtype counts. The state of a loop over time has one dtype, also in stacked cells.
    """
    found, between = [call], [call]
    above = call.parent
    while above is not None and above.parent is not None:
        between.append(above)
        wraps = above is call.parent and above.is_of_library
        wraps = wraps and any(
            hasattr(above.layer, n) for n in ("layer", "forward_layer")
        )
        if wraps or above.is_recurrent:
            found = list(between)
        if above.is_recurrent and hasattr(above.layer.cell, "cells"):
            stack = Call(above.layer.cell, above)
            cells = [Call(each, stack) for each in stack.layer.cells]
            made = [*between[:-1], *cells, stack, above]
            found = list({id(each.layer): each for each in made}.values())
        above = above.parent
    return found[::-1]


def _made_by(call: Call) -> List[Any]:
    """Returns a layer, and the layers that it makes with its own dtype."""
    is_given = call.is_given_layers or not call.is_of_library
    # Bidirectional makes two of the one that it is given.
    is_alone = is_given and not hasattr(call.layer, "forward_layer")
    return [call.layer] if is_alone else kerases.layers_of(call.layer)


def _line(call: Call) -> str:
    name, kind = str(call.layer.name), type(call.layer).__name__
    if call.parent is not None and hasattr(call.parent.layer, "forward_layer"):
        # Bidirectional makes two of the one that it is given.
        name = name.replace("forward_", "", 1).replace("backward_", "", 1)
    if kind == "Sequential":  # its constructor takes no dtype
        return f"Sequential([keras.Input(...), ...], name={name!r})  # made in float32"
    line = f'{kind}(..., dtype="float32", name={name!r})'
    accepted = inspect.signature(type(call.layer).__init__).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    if takes_any or "dtype" in accepted:
        return line
    return f"{line}  # whose constructor must pass dtype on to super().__init__"


def _in_32_bits(value: Any) -> Any:
    is_short = floats_in(value) and value.dtype.name in SIXTEEN_BITS
    return with_mask(tf.cast(value, tf.float32), value) if is_short else value
