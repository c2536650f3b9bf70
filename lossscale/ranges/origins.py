"""Where values that are not finite come from, in a step of eager mode."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Optional, Tuple

from lossscale.ranges.advice import Advice, Fault
from lossscale.ranges.calls import Call, Watcher, things_of, without_functions
from lossscale.ranges.magnitudes import floats_in, is_bad, look
from lossscale.ranges.model_state import SIXTEEN_BITS
from lossscale.runtime import callbacks
from lossscale.runtime.callbacks import key_of
from lossscale.runtime.graphs import is_building


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
        seen = look(result)
        self.largest = max([seen.largest, *(look(each).largest for each in inputs)])
        self.kinds = seen.kinds
        self.dtype = str(result.dtype.name)
        self.is_cast = False

    @property
    def faults(self) -> List[Fault]:
        """This as the fault of its call, nothing if it is outside of the model."""
        fault = self.call and Fault(self.call, self.operation, self.is_cast)
        return [fault] if fault else []

    @property
    def is_overflow(self) -> bool:
        """Whether finite values became infinite in 16 bits, within the model.

        A result that holds only -inf, or that a cast made, may be a mask. In float32 no
        overflow happens by accident and is then hidden by later operations.
        """
        if self.call is None or self.sources or self.kinds == ["-inf"]:
            return False
        is_made = self.operation != "given"
        if self.operation == "Cast":  # Keras 3.3's normalizations cast within `call`
            is_made = self.is_cast or self.call.hides_operations
        return is_made and self.dtype in SIXTEEN_BITS


class Origins(Watcher):
    """Notes each operation whose result is not finite: a `callbacks.Listener`, too.

    Args:
      advice: What the model computes with. None: it computes as it is.
    """

    def __init__(self, advice: Optional[Advice] = None) -> None:
        super().__init__()
        self._advice = advice
        self._listens = False
        #: By key of the tensor, in the order of computation.
        self.found: Dict[int, Origin] = {}

    @contextlib.contextmanager
    def noted(self, model: Any) -> Iterator[None]:
        """Notes the operations that run, and the calls of a model that run them."""
        self._listens = True
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_functions())
            if self._advice is not None:
                stack.enter_context(self._advice.applied())
            stack.enter_context(self.watching(things_of(model)))
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
        floats = floats_in(list(inputs))
        this = Origin(kind, self.innermost, floats, output)
        for each in floats:
            if is_bad(each):
                key = key_of(each)
                if key not in self.found:  # a constant, or computed before this began
                    self.found[key] = Origin("given", this.call, (), each)
                this.sources.append(key)
        self.found[key_of(output)] = this

    def begin(self, call: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Ascribes a cast of the layer's inputs that overflowed to the layer."""
        if is_building():  # for example within a dataset's function
            return args, kwargs
        for tensor in floats_in((args, kwargs)):
            origin = self.found.get(key_of(tensor))
            if origin is None or origin.operation != "Cast" or origin.sources:
                continue
            if origin.call is call.parent:
                origin.call, origin.is_cast = call, True
        if self._advice is not None:
            args, kwargs = self._advice.arguments(call, args, kwargs)
        return args, kwargs

    def end(self, call: Call, outputs: Any) -> Any:
        """Casts outputs if the advice says so."""
        if self._advice is not None and not is_building():
            outputs = self._advice.outputs(call, outputs)
        return outputs

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

    @property
    def overflows(self) -> List[Origin]:
        """The model's overflows in 16 bits, in the order of computation."""
        return [each for each in self.found.values() if each.is_overflow]
