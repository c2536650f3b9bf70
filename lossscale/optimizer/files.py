"""What Keras's files and lists of weights hold of a wrapper.

Names and orders are file format: files of all releases since 0.1.0 must load.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Dict, List, Set

import numpy as np
import tensorflow as tf

from lossscale.runtime.aliases import Variable
from lossscale.runtime.loss_scale_warning import warn
from lossscale.scales.base import LossScale
from lossscale.scales.ignored_losses import SINCE_3_1_0

#: Variables that files of 0.1.0 do not hold, and those that files of 3.0.0 do not hold.
#: Files without names hold them last, in this order.
_SINCE_0_1_0 = ("consecutive_skipped_steps",)
_NEWER = (*_SINCE_0_1_0, *SINCE_3_1_0)

NOT_BUILT = """\
The optimizer was saved without its slots, such as Adam's moments. They were read from \
an .h5 file, and wait until the optimizer is built. Build it, and save again:

    model.optimizer.build(model.trainable_variables)
"""
_DO_NOT_FIT = """\
The slots that an .h5 file holds were not restored: they do not fit the variables that \
the optimizer trains. They begin with their first values.
"""


def names_in_files(loss_scale: LossScale) -> Dict[str, Variable]:
    """Returns a loss scale's variables by their names in Keras's files.

    A variable is called as it was created. If a loss scale holds another one, several
    variables may be called `skipped_steps`. Each of these has its path as its name:
    `skipped_steps` is the outer one's, `loss_scale/skipped_steps` the inner one's.
    """
    variables = loss_scale.variables
    # tf.Module documents this method for its subclasses.
    reached = loss_scale._flatten(
        predicate=lambda value: isinstance(value, tf.Variable), with_path=True
    )
    paths: Dict[int, str] = {}
    for path, variable in reached:
        paths.setdefault(id(variable), "/".join(map(str, path)))
    names = [plain_name(variable) for variable in variables]
    with_path = [paths.get(id(v), name) for v, name in zip(variables, names)]
    clash = _clashing(names)
    mixed = [path if name in clash else name for name, path in zip(names, with_path)]
    # A path can be the name of another variable.
    names = with_path if _clashing(mixed) else mixed
    return dict(zip(names, variables))


def plain_name(variable: Variable) -> str:
    """Returns the name with which a variable was created."""
    return str(variable.name).split(":")[0]


def _clashing(names: List[str]) -> Set[str]:
    """Returns the names that occur twice, or are a folder in the path of another."""
    parts = [name.split("/") for name in names]
    counts = Counter("/".join(p[:end]) for p in parts for end in range(1, len(p) + 1))
    return {name for name in names if counts[name] > 1}


def in_order(variables: List[Variable]) -> List[Variable]:
    """Returns a wrapper's own variables in the order of Keras 2's files."""
    places = {name: place for place, name in enumerate(_NEWER)}
    return sorted(variables, key=lambda v: places.get(plain_name(v), -1))


def under_names(variables: List[Variable], loss_scale: LossScale) -> List[Variable]:
    """Returns variables under their names in files, as Keras 2 writes .h5 files."""
    names = {id(v): name for name, v in names_in_files(loss_scale).items()}
    return [
        variable
        if names.get(id(variable)) in {None, plain_name(variable)}
        else Renamed(variable, f"{names[id(variable)]}:0")
        for variable in variables
    ]


def is_count_of(count: int, inner: List[Variable], ours: List[Variable]) -> bool:
    """Whether a file without names that holds so many variables is one of ours.

    Older releases did not write the newest of `ours`, the wrapper's variables.
    """
    names = [plain_name(variable) for variable in ours]
    newer = sum(name in SINCE_3_1_0 for name in names)
    since = sum(name in _SINCE_0_1_0 for name in names)
    older = len(inner) + len(ours) - newer
    # A file of a run with nonfinite_loss="skip", into an optimizer without it.
    with_skip = set() if newer else {older + len(SINCE_3_1_0)}
    return count in {len(inner), older - since, older, *with_skip}


class Renamed(tf.Variable):
    """A variable under another name. All else is the variable's own."""

    def __init__(self, variable: Variable, name: str) -> None:
        object.__getattribute__(self, "__dict__").update(renamed=variable, name=name)

    def __getattribute__(self, attribute: str) -> Any:
        held = object.__getattribute__(self, "__dict__")
        if attribute in {"__class__", "__dict__"}:
            return object.__getattribute__(self, attribute)
        return (
            held["name"] if attribute == "name" else getattr(held["renamed"], attribute)
        )

    # Python looks for these in the class.

    def __repr__(self) -> str:
        return repr(vars(self)["renamed"])

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.array(self.numpy(), *args, **kwargs)

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())


def _as_tensor(
    value: Any, dtype: Any = None, name: Any = None, as_ref: bool = False
) -> Any:
    del as_ref
    return tf.convert_to_tensor(value.value(), dtype=dtype, name=name)


tf.register_tensor_conversion_function(Renamed, _as_tensor, 0)


def holds(store: Any, name: str) -> bool:
    """Whether a file holds a value of this name, or of this path."""
    folder, _, path = name.partition("/")
    if folder not in store.keys():  # noqa: SIM118 - Keras 3.3's store has no `in`
        return False
    try:
        return not path or store[name] is not None
    except (KeyError, ValueError):  # ValueError: `folder` is a value
        return False


def fits(variable: Any, value: Any) -> bool:
    """Whether a variable can hold a value, and holds values of that kind."""
    held, tensor = tf.as_dtype(variable.dtype), tf.convert_to_tensor(value)
    if not tensor.shape.is_compatible_with(variable.shape):
        return False
    if held.is_floating:
        return bool(tensor.dtype.is_floating or tensor.dtype.is_integer)
    return bool(
        held.is_integer == tensor.dtype.is_integer
        and held.is_bool == tensor.dtype.is_bool
    )


def load_what_is_there(inner: Any, store: Any) -> None:
    """Is an optimizer's `load_own_variables` for one call: without a word if empty."""
    vars(inner).pop("load_own_variables", None)
    if store.keys():
        inner.load_own_variables(store)


def set_when_built(inner: Any, values: List[Any]) -> None:
    """Sets the values of an optimizer: its slots as soon as they are created."""
    now = inner.variables
    for variable, value in zip(now, values):
        variable.assign(value)
    slots = [np.array(value) for value in values[len(now) :]]  # the file is closed then
    if slots:
        vars(inner)["build"] = partial(_build_with, inner, slots)


def _build_with(inner: Any, values: List[Any], *args: Any, **kwargs: Any) -> None:
    """Is an optimizer's `build` for one call, and sets the slots that it creates."""
    vars(inner).pop("build", None)
    before = len(inner.variables)
    inner.build(*args, **kwargs)
    slots = inner.variables[before:]
    if len(slots) != len(values) or not all(map(fits, slots, values)):
        warn(_DO_NOT_FIT)
        return
    for slot, value in zip(slots, values):
        slot.assign(value)
