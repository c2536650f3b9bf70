"""What Keras's files and lists of weights hold of a wrapper.

Names and orders are file format: what 3.1.0 has written must load. A list without names
must have the length, shapes and dtypes of one that the wrapper knows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Iterable, List, Mapping, Sequence, Tuple

import numpy as np
import tensorflow as tf

from lossscale.runtime.aliases import Variable
from lossscale.runtime.loss_scale_warning import warn
from lossscale.scales.ignored_losses import IGNORED_STEPS, LEVEL, LEVEL_AT
from lossscale.scales.variables import HELD_ANOTHER

#: Lists hold these last, in this order.
LAST = (IGNORED_STEPS, LEVEL, LEVEL_AT)
#: Names that only a loss scale of 3.1.0 has in files that holds another one.
_OF_HOLDERS = {"guard_last_step_finite", "loss_scale"}

NOT_BUILT = """\
The optimizer was saved without its slots, such as Adam's moments. They were read from \
an .h5 file, and wait until the optimizer is built. Build it, and save again:

    model.optimizer.build(model.trainable_variables)
"""
_DO_NOT_FIT = """\
The slots that an .h5 file holds were not restored: they do not fit the variables that \
the optimizer trains. They begin with their first values.
"""


def check_names(variables: List[Variable]) -> None:
    """Raises if two variables have one name, of which a file would hold only one."""
    names = [plain_name(variable) for variable in variables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            "The variables of a loss scale and a guard must have different names, got "
            f"two called {twice[0]!r}. Files hold one of each name."
        )


def plain_name(variable: Variable) -> str:
    """Returns the name with which a variable was created."""
    return str(variable.name).split(":")[0]


def refuse_holder(names: Iterable[str], own: Mapping[str, Variable]) -> None:
    """Raises if a file is of a loss scale that held another one."""
    if _OF_HOLDERS & {*names} - {*own}:
        raise ValueError(HELD_ANOTHER)


def unnamed(variables: Iterable[Variable]) -> List[Tuple[str, Variable]]:
    """Returns variables as a part of a list, of which no file has a known name."""
    return [("", variable) for variable in variables]


def fit(listed: Sequence[Tuple[str, Variable]], values: Sequence[Any]) -> bool:
    """Whether a list of values is that of these variables, each after its name."""
    return len(values) == len(listed) and all(map(_fits, listed, values))


def _fits(listed: Tuple[str, Variable], value: Any) -> bool:
    name, variable = listed
    if name and is_of_h5(value) and _name_in_h5(value) != name:
        return False
    held, given = tf.as_dtype(variable.dtype), np.asarray(value).dtype.kind
    if not tf.TensorShape(np.shape(value)).is_compatible_with(variable.shape):
        return False
    if held.is_floating:  # NumPy has no kind for bfloat16
        return given in "fiuV"
    return given == "b" if held.is_bool else given in "iu"


def is_of_h5(value: Any) -> bool:
    """Whether Keras has read a value from an .h5 file. Only those have names."""
    return type(value).__module__.split(".")[0] == "h5py"


def _name_in_h5(value: Any) -> str:
    return str(value.name).split("/")[-1].split(":")[0]


def refuse(values: Sequence[Any], own: Mapping[str, Variable], inner: int) -> None:
    """Raises: a list of values is none that a wrapper knows."""
    read = [_name_in_h5(value) for value in values if is_of_h5(value)]
    flags = sum(np.asarray(value).dtype.kind == "b" for value in values)
    if flags > sum(tf.as_dtype(v.dtype).is_bool for v in own.values()):
        raise ValueError(HELD_ANOTHER)  # each loss scale of 3.1.0 has one
    listed = ", ".join(own)
    message = (
        f"`weights` must be the {len(own) + inner} values of `variables`, which are "
        f"{listed} and {inner} of the inner optimizer, or the {inner} of "
        f"`inner_optimizer.variables`, got {len(values)} values that are neither. Take "
        "them from an optimizer with the same arguments. Nothing has changed."
    )
    if read:  # Keras hides the error
        warn(message)
    raise ValueError(message)


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
    if not fit(unnamed(slots), values):
        warn(_DO_NOT_FIT)
        return
    for slot, value in zip(slots, values):
        slot.assign(value)
