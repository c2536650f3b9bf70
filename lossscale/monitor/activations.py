"""Finds the first layer whose output was not finite, during `fit`."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import numpy as np
import tensorflow as tf

from lossscale.monitor.layer_outputs import INF, MASK, NAN, LayerOutputs
from lossscale.plotting import power_text

_KINDS = {MASK: "-inf", INF: "inf", NAN: "NaN"}

_FIRST = """\
The first layer whose output was not finite at the last step: {path}: {kind}{before}; \
its inputs were {inputs}. """
_WRITE = """Give it dtype="float32"."""
_MASKED = """\
They held -inf, as a mask does. If that is no mask, look at {path}."""
_GIVEN = "Look at the data, and at operations between the layers before it."
_FINITE = """\
The outputs of all layers{but} were finite at the last step. The largest was that of \
{path}, {largest}."""
_NONE = "The monitor saw no output of a layer at the last step."


class Activations:
    """Watches the outputs of a model's layers during one `fit`.

    It replaces the model's `train_step` meanwhile, which Keras traces again when this
    begins and when it ends. If `fit` ends with an error that the monitor does not see,
    the next `fit` or `train_on_batch` restores the original.
    """

    def __init__(self, model: Any, loss_scales: Sequence[Any]) -> None:
        self._model = model
        with model.distribute_strategy.scope():
            self._outputs = LayerOutputs(model, loss_scales)
        self._begin()

    def _begin(self) -> None:
        model, outputs = self._model, self._outputs
        original = model.train_step

        # AutoGraph converts this and all that it calls, as it would the model's own.
        def train_step(*args: Any, **kwargs: Any) -> Any:
            with outputs.step():
                return original(*args, **kwargs)

        def make_train_function(*args: Any, **kwargs: Any) -> Any:
            self.end()
            return model.make_train_function(*args, **kwargs)

        ours = {"train_step": train_step, "make_train_function": make_train_function}
        self._before: Dict[str, Any] = {n: vars(model).get(n) for n in ours}
        make = model.make_train_function
        for name, function in ours.items():
            object.__setattr__(model, name, function)
        model.train_function = None  # the old trace measures nothing
        make()

    def end(self) -> None:
        """Restores the original methods. A second call does nothing."""
        before, self._before = self._before, {}
        for name, function in before.items():
            if function is None:
                object.__delattr__(self._model, name)
            else:
                object.__setattr__(self._model, name, function)
        if before:
            self._model.train_function = None  # the old trace would go on measuring

    def finding(self) -> str:
        """Reads the device. Returns a sentence about the last step's outputs."""
        outputs = self._outputs
        last = self._read(outputs.last)
        called = [number for number in outputs.paths if last[number] > 0]
        bad = [number for number in called if last[number] >= MASK]
        meant = self._read(outputs.meant) > 0
        # The call that ends last is the model's. Its output is no mask.
        least = MASK if called and last[called[-1]] >= MASK else INF
        least = INF if any(last[number] >= INF for number in called) else least
        new = [number for number in bad if last[number] >= least and not meant[number]]
        if not new:
            return self._of_finite(last, [n for n in called if n not in bad], bad)
        return self._of_first(new[0], last, bad)

    def _of_first(self, first: int, last: Any, bad: List[int]) -> str:
        outputs = self._outputs
        recent = self._read(outputs.recent)[:, first].max()
        given = last[outputs.count + first]
        advice = _WRITE if given < MASK else _GIVEN
        if given == MASK and bad[0] != first:
            advice = _MASKED.format(path=outputs.paths[bad[0]])
        said = _FIRST.format(
            path=outputs.paths[first],
            kind=_KINDS[float(last[first])],
            before=f", after {power_text(recent)}" if recent > 0 else "",
            inputs="finite" if given < MASK else "not",
        )
        return said + advice

    def _of_finite(self, last: Any, finite: List[int], bad: List[int]) -> str:
        if not finite:
            return _NONE
        largest = max(finite, key=lambda number: float(last[number]))
        paths = self._outputs.paths
        names = ", ".join(paths[number] for number in bad)
        return _FINITE.format(
            but=f", but for masks of -inf and the like ({names})," if bad else "",
            path=paths[largest],
            largest=power_text(last[largest]),
        )

    def _read(self, variable: Any) -> Any:
        """Returns the largest value over all replicas."""
        copies = self._model.distribute_strategy.experimental_local_results(variable)
        return np.max([tf.convert_to_tensor(copy).numpy() for copy in copies], axis=0)
