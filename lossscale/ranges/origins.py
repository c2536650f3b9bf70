"""Notes each eager operation whose result is not finite, and where that comes from."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Optional

import numpy as np
import tensorflow as tf

from lossscale.ranges.float32_model import SIXTEEN_BITS
from lossscale.ranges.layer_calls import Call, CallStack
from lossscale.runtime import callbacks
from lossscale.runtime.callbacks import key_of


class Origin:
    """One operation whose result is not finite.

    Attributes:
      operation: Its type, such as "MatMul". "given": no noted operation made the value.
      call: The layer's call that ran it, None outside of the model.
      sources: The keys of its inputs that are not finite either.
      largest: The largest finite magnitude of its inputs and its result.
      kinds: Which of "inf", "-inf" and "nan" the result holds.
      dtype: The name of the result's dtype.
      is_cast: Whether it is a cast of a layer's input that the new dtype cannot hold.
    """

    def __init__(
        self, operation: str, call: Optional[Call], inputs: Any, result: Any
    ) -> None:
        self.operation, self.call = operation, call
        self.sources: List[int] = []
        self.largest = max([largest_of(each) for each in (*inputs, result)])
        self.kinds = kinds_of(result)
        self.dtype = str(result.dtype.name)
        self.is_cast = False

    @property
    def is_overflow(self) -> bool:
        """Whether finite values became infinite in 16 bits, within the model.

        A result that holds only -inf, or that a cast made, may be a mask. In float32 no
        overflow happens by accident and is then hidden by later operations.
        """
        if self.call is None or self.sources or self.kinds == ["-inf"]:
            return False
        is_made = self.operation not in {"given", "Cast"} or self.is_cast
        return is_made and self.dtype in SIXTEEN_BITS


class Origins:
    """Notes each operation whose result is not finite: a `callbacks.Listener`."""

    def __init__(self, stack: CallStack) -> None:
        self._stack = stack
        self._listens = False
        #: By key of the tensor, in the order of computation.
        self.found: Dict[int, Origin] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes operations until the context ends."""
        self._listens = True
        callbacks.add(self)
        try:
            yield
        finally:
            self._listens = False

    def hear(self, kind: str, inputs: Any, outputs: Any, attrs: Any) -> bool:
        """Notes an operation that has run."""
        del attrs
        if self._listens:
            for output in outputs:
                if is_bad(output):
                    self._note(kind, inputs, output)
        return self._listens

    def _note(self, kind: str, inputs: Any, output: Any) -> None:
        floats = [each for each in inputs if _is_float(each)]
        this = Origin(kind, self._stack.innermost, floats, output)
        for each in floats:
            if is_bad(each):
                key = key_of(each)
                if key not in self.found:  # a constant, or computed before this began
                    self.found[key] = Origin("given", this.call, (), each)
                this.sources.append(key)
        self.found[key_of(output)] = this

    def enter(self, call: Call, inputs: List[Any]) -> None:
        """If the cast of a layer's input overflowed, ascribes that to the layer."""
        for tensor in inputs:
            origin = self.found.get(key_of(tensor))
            if origin is None or origin.operation != "Cast" or origin.sources:
                continue
            if origin.call is call.parent:
                origin.call, origin.is_cast = call, True

    def first_behind(self, tensor: Any) -> Optional[Origin]:
        """Returns the first operation that made a value infinite or NaN, None if none.

        It is on the way to the value. A mask of -inf before a softmax, say, is not.
        """
        keys, seen = [key_of(tensor)], set()
        while keys:
            key = keys.pop()
            if key not in seen and key in self.found:
                seen.add(key)
                keys += self.found[key].sources
        ends = [k for k in self.found if k in seen and not self.found[k].sources]
        return self.found[ends[0]] if ends else None

    def first_hidden(self) -> Optional[Origin]:
        """Returns the model's first overflow in 16 bits, None if there is none."""
        overflows = (each for each in self.found.values() if each.is_overflow)
        return next(overflows, None)


def _is_float(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating


def _values(tensor: Any) -> Any:
    # With NumPy, since no tape must record this, and no listener must hear of it.
    # Older versions of NumPy cannot check bfloat16.
    found = tensor.numpy()
    return found.astype(np.float32) if tensor.dtype == tf.bfloat16 else found


def is_bad(tensor: Any) -> bool:
    """Tells whether a tensor of eager mode holds inf or NaN."""
    return _is_float(tensor) and not np.isfinite(_values(tensor)).all()


def largest_of(tensor: Any) -> float:
    """Returns the largest finite magnitude in an eager tensor, 0 if there is none."""
    values = _values(tensor)
    return float(np.max(np.abs(values), initial=0, where=np.isfinite(values)))


def kinds_of(tensor: Any) -> List[str]:
    """Returns which of "inf", "-inf" and "nan" a tensor of eager mode holds."""
    values = _values(tensor)
    tests = (("inf", np.isposinf), ("-inf", np.isneginf), ("nan", np.isnan))
    return [name for name, test in tests if test(values).any()]
