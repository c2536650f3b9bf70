"""The training step that `fit` runs, once and eagerly: its losses and gradients.

Optimizers are given the gradients, and do nothing with them. So the step is the model's
own `train_step`, whatever it computes, with any number of optimizers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable, Dict, Iterator, List, Tuple

import tensorflow as tf

from lossscale.gradients import arithmetic
from lossscale.gradients.check import dense_part
from lossscale.optimizer.engine import LossScaleEngine
from lossscale.ranges import inputs
from lossscale.ranges.calls import Watcher
from lossscale.ranges.magnitudes import are_alike, is_bad
from lossscale.ranges.model_state import unchanged
from lossscale.runtime import keras_versions, op_callbacks
from lossscale.scales.base import LossScale

_NO_LOSS = """\
`model` must be compiled with a loss, or `loss` given, got a model without one. Pass \
the loss that the model is trained with, such as loss="mse"."""
_NO_TARGETS = """\
`y` must be the targets that the loss needs, got None. Pass y, or let `x` yield \
batches that hold both."""


class Step:
    """One training step of a model, in which no optimizer changes anything.

    `run` computes the step, such as `of_fit(...)`. `scale_of` returns the number by
    which an optimizer multiplies the loss.

    Attributes:
      watcher: What was told of the calls of layers.
      losses: What optimizers were asked to scale, or to minimize, before it was scaled.
        If none was asked, what tapes have differentiated.
      gradients: By a variable's `id`, the gradient that its optimizer was given.
      computed: All variables that tapes have differentiated by, and the gradients.
      scale: The largest number that multiplied a loss.
    """

    def __init__(
        self,
        model: Any,
        run: Callable[[Step], Any],
        watcher: Watcher,
        scale_of: Callable[[Any], float] = inputs.scale_of,
    ) -> None:
        self.watcher, self.scale, self._scale_of = watcher, 1.0, scale_of
        self.losses: List[Any] = []
        self.gradients: Dict[int, Any] = {}
        self.computed: List[Tuple[Any, Any]] = []
        self._given: List[Any] = []
        self._targets: List[Any] = []
        with unchanged(model), self._replaced_methods(model), watcher.watching(model):
            run(self)
        self.losses = self.losses or self._targets

    @property
    def bad(self) -> List[Any]:
        """The losses, and gradients that optimizers were given, with inf or NaN."""
        # A step that adds gradients up may give no optimizer any.
        tensors = [*self.losses, *(self._given or [g for _, g in self.computed])]
        return [tensor for tensor in tensors if is_bad(tensor)]

    def equals(self, other: Step) -> bool:
        """Whether losses and gradients are those of another step, but for rounding."""
        grads = other.gradients
        pairs = [*zip(self.losses, other.losses)]
        pairs += [(g, grads[k]) for k, g in self.gradients.items() if k in grads]
        return all(are_alike(*pair) for pair in pairs)

    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        """Notes a loss, and returns it times the loss scale of an optimizer."""
        if callable(loss):
            return lambda: self.scale_loss(optimizer, loss())
        self.losses.append(tf.convert_to_tensor(loss))
        factor = self._scale_of(optimizer)
        self.scale = max(self.scale, factor)
        with op_callbacks.paused():  # a loss scale is at fault for no loss
            return loss if factor == 1 else arithmetic.multiply(loss, factor)

    def apply(self, grads: Any, variables: Any) -> None:
        """Notes the gradients of variables, and applies none."""
        grads = list(grads)
        self._given += [dense_part(grad) for grad in grads if grad is not None]
        for grad, variable in zip(grads, variables or ()):
            if grad is not None:
                self.gradients[id(variable)] = dense_part(grad)

    # What is called in place of an `original` method of an optimizer, or of a tape.

    def _scale(self, _: Any, optimizer: Any, loss: Any) -> Any:
        return self.scale_loss(optimizer, loss)

    def _unscale(self, _: Any, optimizer: Any, grads: Any) -> Any:
        grads = list(grads)
        self.apply(grads, None)
        return arithmetic.divide(grads, self._scale_of(optimizer))

    def _apply(self, _: Any, owner: Any, grads: Any, *others: Any, **__: Any) -> Any:
        grads = list(grads)
        if grads and isinstance(grads[0], (tuple, list)):  # apply_gradients
            grads, *others = zip(*grads)  # type: ignore[assignment]
        self.apply(grads, others[0] if others else None)
        return getattr(owner, "iterations", None)

    def _minimize(
        self, original: Any, optimizer: Any, loss: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if tf.is_tensor(loss):
            self.losses.append(loss)
        return original(optimizer, loss, *args, **kwargs)

    def _gradient(
        self, original: Any, tape: Any, target: Any, sources: Any, *args: Any, **kw: Any
    ) -> Any:
        grads = original(tape, target, sources, *args, **kw)
        self._targets += filter(tf.is_tensor, tf.nest.flatten(target))
        self.computed += [
            (source, dense_part(grad))
            for source, grad in zip(tf.nest.flatten(sources), tf.nest.flatten(grads))
            if grad is not None and hasattr(source, "assign")
        ]
        return grads

    @contextlib.contextmanager
    def _replaced_methods(self, model: Any) -> Iterator[None]:
        """Lets all optimizers note what they are given, and do nothing.

        Methods of their classes are replaced, since a `train_step` may use any.
        """
        methods: Dict[str, Any] = {
            **dict.fromkeys(("scale_loss", "get_scaled_loss", "scale"), self._scale),
            **dict.fromkeys(("get_unscaled_gradients", "unscale"), self._unscale),
            **dict.fromkeys(("apply", "apply_gradients"), self._apply),
            "minimize": self._minimize,
            "gradient": self._gradient,
        }
        here = threading.get_ident()

        def instead_of(original: Any, name: str) -> Any:
            @functools.wraps(original)
            def method(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != here:  # it trains meanwhile
                    return original(*args, **kwargs)
                return methods[name](original, *args, **kwargs)

            return method

        replaced = [
            (kind, name, vars(kind)[name])
            for kind in _noting_classes(model)
            for name in methods
            if name in vars(kind)
        ]
        try:
            for kind, name, original in replaced:
                setattr(kind, name, instead_of(original, name))
            yield
        finally:
            for kind, name, original in replaced:
                setattr(kind, name, original)


def _noting_classes(model: Any) -> List[type]:
    """Returns tapes, and all classes of optimizers, with those that they inherit."""
    found: Dict[type, None] = {tf.GradientTape: None}
    # An optimizer of one's own need not be one of Keras.
    waiting: List[Any] = [LossScale, LossScaleEngine]
    waiting += [type(o) for o in vars(model).values() if hasattr(o, "apply_gradients")]
    for keras in keras_versions.installed():
        names = ("legacy", "experimental")
        spaces = [getattr(keras.optimizers, name, None) for name in names]
        waiting += [getattr(s, "Optimizer", None) for s in (keras.optimizers, *spaces)]
    while waiting:
        kind = waiting.pop()
        if kind is not None and kind not in found:
            found.update(dict.fromkeys(kind.__mro__[:-1]))
            waiting += type.__subclasses__(kind)
    return list(found)


def of_fit(keras: Any, model: Any, loss: Any, batch: Any) -> Callable[[Step], Any]:
    """Returns what runs the step of `fit` on a batch, or one with a loss of its own.

    Raises a ValueError if there is no loss, or targets are missing.
    """
    x, y, sample_weight = inputs.triple(batch)
    is_compiled = getattr(model, "optimizer", None) is not None
    if loss is None and is_compiled and has_own(model, "train_step"):
        return lambda _: model.train_step(batch)
    is_overridden = has_own(model, "compute_loss")
    has_loss = loss is not None or bool(getattr(model, "loss", None))
    if loss is None and not is_compiled:
        raise ValueError(_NO_LOSS)
    if y is None and has_loss and not is_overridden:
        raise ValueError(_NO_TARGETS)
    if not has_loss and not is_overridden:  # it may add losses of its own
        inputs.build(model, x)
        with unchanged(model):
            model(x, training=True)
            if not model.losses:
                raise ValueError(_NO_LOSS)
    if loss is None:
        return lambda _: model.train_step(batch)
    compiled = keras.Sequential()
    compiled.compile(loss=loss)

    def loss_of(outputs: Any) -> Any:
        if not hasattr(compiled, "compute_loss"):  # up to TensorFlow 2.4
            return compiled.compiled_loss(y, outputs, sample_weight)
        return compiled.compute_loss(x, y, outputs, sample_weight)

    def run(step: Step) -> None:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            total = tf.add_n([loss_of(outputs), *model.losses])
            total = step.scale_loss(getattr(model, "optimizer", None), total)
        weights = model.trainable_variables
        tensors = list(map(keras_versions.tensor_of, weights))
        step.apply(tape.gradient(total, tensors), weights)

    return run


def build(model: Any, x: Any, run: Callable[[Step], Any]) -> None:
    """Creates missing weights, by a step if the model cannot be called."""
    try:
        inputs.build(model, x)
    except ValueError:
        if not has_own(model, "train_step"):
            raise
        Step(model, run, Watcher())


def has_own(model: Any, name: str) -> bool:
    """Whether a model's class has a method of its own, which is not Keras's."""
    method = getattr(type(model), name, None)
    home = (getattr(method, "__module__", None) or "keras").split(".")[0]
    return home not in ("keras", "tf_keras", "tensorflow")
