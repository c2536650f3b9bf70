"""What can be looked at in a model, and in the data that its `fit` was given."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from lossscale.arguments import shown
from lossscale.gradients.check import worst_of_all
from lossscale.optimizer import LossScaleOptimizer
from lossscale.ranges.magnitudes import WORDS
from lossscale.runtime import keras_versions
from lossscale.runtime.aliases import Variable

#: A variable, and what it or its gradient holds: "inf" or "nan".
Fault = Tuple[Variable, str]

_NAMED = 5  # the most variables or rows that a message names
_MOST_BYTES = 2**31  # data of this size are looked at in a second or two
_KERAS = ("keras", "tf_keras", "tensorflow")
_NONE_FOUND = """\
`model.optimizer` must be a lossscale.LossScaleOptimizer, got {got}. Write

    model.compile(lossscale.LossScaleOptimizer(optimizer), ...)

or, for optimizers that are not attributes of the model,

    LossScaleMonitor(optimizers={{"name": optimizer}})
"""


def given_optimizers(name: str, value: Any) -> Dict[str, Any]:
    """Returns the optimizers of the argument `name`. A single one has an empty name."""
    optimizers, listed = value, value if isinstance(value, (list, tuple)) else [value]
    if not isinstance(value, dict):
        names = [f"optimizer_{i}" for i in range(len(listed))]
        optimizers = dict(zip(names if len(listed) > 1 else [""], listed))
    are_named = all(isinstance(key, str) for key in optimizers)
    are_ours = all(isinstance(o, LossScaleOptimizer) for o in optimizers.values())
    if not (optimizers and are_named and are_ours):
        raise TypeError(
            f"`{name}` must be a lossscale.LossScaleOptimizer, a list of them, or a "
            f"dict of them by name, got {shown(value)}. Pass the wrapper: "
            "lossscale.LossScaleOptimizer(optimizer)."
        )
    return dict(optimizers)


def optimizers_of(model: Any) -> Dict[str, Any]:
    """Returns the compiled optimizer and those in a model's attributes, or raises.

    They have the attributes' names, and a single one an empty name.
    """
    compiled = getattr(model, "optimizer", None)
    pairs = [("optimizer", compiled), *attributes_of(model)]
    ours: Dict[int, Tuple[str, Any]] = {}
    for name, value in pairs:
        if isinstance(value, LossScaleOptimizer):
            ours.setdefault(id(value), (name.strip("_"), value))
    if ours:
        return {name if len(ours) > 1 else "": value for name, value in ours.values()}
    # A user with other optimizers may not know the one that Keras compiles by default.
    others = [
        f"model.{name.strip('_')} = {shown(value)}"
        for name, value in pairs
        if hasattr(value, "apply_gradients") and value is not compiled
    ]
    got = ", ".join(others) or shown(compiled)
    if keras_versions.is_own_wrapper(compiled) and not others:
        got += ", Keras's own: under mixed_float16 `compile` wraps any optimizer "
        got += "without a wrapper"
    raise TypeError(_NONE_FOUND.format(got=got))


def attributes_of(model: Any) -> Iterator[Tuple[str, Any]]:
    """Yields what is in a model's attributes, also in lists and dicts, with names."""
    for name, thing in vars(model).items():
        if not isinstance(thing, (dict, list, tuple)):
            yield name, thing
        elif not name.startswith("_"):  # Keras keeps the objects that it tracks there
            items = thing.items() if isinstance(thing, dict) else enumerate(thing)
            yield from ((f"{name}_{key}", value) for key, value in items)


def dtypes_of(model: Any) -> List[str]:
    """Returns the dtypes of the layers that compute, not of those that hold others."""
    dtypes = []
    for layer in keras_versions.layers_of(model):
        is_of_keras = type(layer).__module__.split(".")[0] in _KERAS
        is_input = type(layer).__name__ == "InputLayer"
        if not (is_of_keras and (hasattr(layer, "layers") or is_input)):
            dtypes.append(layer.compute_dtype)
    return dtypes


def with_bad_loss(model: Any, logs: Any) -> str:
    """Returns which outputs have a loss in the logs that is not finite, if it shows."""
    named = getattr(model, "loss", None)
    outputs = [*(getattr(model, "output_names", None) or ())]
    outputs += list(named) if isinstance(named, dict) else []
    losses = logs if isinstance(logs, dict) else {}
    bad = [n for n in outputs if not np.isfinite(losses.get(f"{n}_loss", 0.0))]
    return f" of output {' and '.join(dict.fromkeys(bad))}" if bad else ""


def untrained(model: Any, *, of_frozen: bool) -> List[Variable]:
    """Returns the variables that are not trained, of frozen layers or of all others.

    Those of others are statistics: a forward pass may change them.
    """
    # Inner layers come last: one may be trained within a frozen one.
    layers = keras_versions.layers_of(model)
    is_frozen = {id(v): not layer.trainable for layer in layers for v in layer.weights}
    found = keras_versions.statistics_of(model)
    return [v for v in found if is_frozen.get(id(v), False) == of_frozen]


def nonfinite(model: Any, variables: Sequence[Variable]) -> List[Fault]:
    """Returns the variables that hold inf or NaN, and which."""
    faults = []
    for variable in variables:
        tensor = keras_versions.tensor_of(variable)
        copies = model.distribute_strategy.experimental_local_results(tensor)
        # Of a large variable only one number comes from the device to the host.
        worst = sum(float(worst_of_all([copy])[0]) for copy in copies)
        if not math.isfinite(worst):
            faults.append((variable, "nan" if math.isnan(worst) else "inf"))
    return faults


def accumulators(model: Any, faults: Sequence[Fault]) -> Dict[str, Variable]:
    """Returns bad attributes of a model that may add up the gradients at fault."""
    shapes = [variable.shape for variable, _ in faults]
    trained = {id(v) for v in model.trainable_weights}
    return {
        name: value
        for name, value in attributes_of(model)
        if hasattr(value, "assign")
        and id(value) not in trained
        and getattr(value, "shape", None) in shapes
        and nonfinite(model, [value])
    }


def layer_with_bad_input(
    model: Any, faults: Sequence[Fault]
) -> Optional[Tuple[str, str]]:
    """Returns the kernel and the bias of a layer whose input was not finite, or None.

    A bias's gradient is the sum of the gradients at the layer's output. If it is
    finite, so are these, and a NaN in the kernel's gradient is of the input.
    """
    kinds = {id(variable): kind for variable, kind in faults}
    for layer in keras_versions.layers_of(model) if kinds else ():
        kernel, bias = (getattr(layer, name, None) for name in ("kernel", "bias"))
        are_trained = all(getattr(v, "trainable", False) for v in (kernel, bias))
        if are_trained and kinds.get(id(kernel)) == "nan" and id(bias) not in kinds:
            names = keras_versions.variable_name
            return names(kernel), names(bias)
    return None


class Data(NamedTuple):
    """What is known of the data of a `fit`."""

    #: Which rows of its arrays hold inf or NaN. None: it is not known.
    bad_rows: Optional[List[int]]
    #: Whether each epoch has the rows of its arrays in another order.
    is_shuffled: bool


def data_of_fit(model: Any) -> Data:
    """Looks at the arrays that the `fit` that runs now was given, if it was arrays."""
    given = keras_versions.frame_where(
        lambda at: at.get("self") is model and {"x", "shuffle"} <= {*at}
    )
    parts = tf.nest.flatten([given.get(name) for name in ("x", "y", "sample_weight")])
    parts = [part for part in parts if part is not None]
    if not parts or not all(isinstance(p, (np.ndarray, tf.Tensor)) for p in parts):
        return Data(None, False)
    arrays = [np.asarray(part) for part in parts]
    are_numbers = all(array.dtype.kind in "fiub" for array in arrays)
    if not are_numbers or sum(array.nbytes for array in arrays) > _MOST_BYTES:
        return Data(None, bool(given["shuffle"]))
    bad = np.zeros(len(arrays[0]), bool)
    for array in arrays:
        bad |= ~np.isfinite(array.reshape(len(array), -1)).all(axis=1)
    return Data(np.flatnonzero(bad).tolist(), bool(given["shuffle"]))


def listed(faults: Sequence[Fault]) -> str:
    """Returns the names of variables and what they hold, the last ones first."""
    name = keras_versions.variable_name
    return first_of([f"{name(v)} ({WORDS[kind]})" for v, kind in faults[::-1]])


def first_of(names: Sequence[Any]) -> str:
    """Returns the first of some names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(str, names[:_NAMED])) + more
