"""Where values that are not finite come from, in a step of eager mode."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import tensorflow as tf

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
    def fault(self) -> Optional[Fault]:
        """The fault of its call, None if it is outside of the model."""
        if self.call is None:
            return None
        return Fault(self.call, self.operation, self.is_cast)

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
      advice: What the model computes as if it had been followed.
    """

    def __init__(self, advice: Advice) -> None:
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
        for output in outputs if self._listens else ():
            if not is_bad(output):
                continue
            floats = floats_in(list(inputs))
            this = Origin(kind, self.innermost, floats, output)
            for each in filter(is_bad, floats):
                key = key_of(each)
                if key not in self.found:  # a constant, or computed before this began
                    self.found[key] = Origin("given", this.call, (), each)
                this.sources.append(key)
            self.found[key_of(output)] = this
        return self._listens

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
        return self._advice.arguments(call, args, kwargs)

    def end(self, call: Call, outputs: Any) -> Any:
        """Casts outputs if the advice says so."""
        return outputs if is_building() else self._advice.outputs(call, outputs)

    def behind(self, tensor: Any) -> List[Origin]:
        """Returns the operations that made a value infinite or NaN, in their order.

        They are on the way to the value. A mask of -inf before a softmax, say, is not.
        """
        keys, seen = [key_of(tensor)], set()
        while keys:
            key = keys.pop()
            if key not in seen and key in self.found:
                seen.add(key)
                keys += self.found[key].sources
        on_the_way = [each for key, each in self.found.items() if key in seen]
        return [each for each in on_the_way if not each.sources]

    @property
    def overflows(self) -> List[Origin]:
        """The model's overflows in 16 bits, in the order of computation."""
        return [each for each in self.found.values() if each.is_overflow]

    def faults_in(self, run: Callable[[], List[Origin]]) -> List[Fault]:
        """Returns the faults behind the origins that a run of the model returns.

        If the model cannot run, two dtypes meet in the call that failed.
        """
        try:
            return [origin.fault for origin in run() if origin.fault]
        except (tf.errors.OpError, TypeError, ValueError):
            return [Fault(self.failed, is_mixed=True)] if self.failed else []
