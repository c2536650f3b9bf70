"""What Keras's files and lists of weights hold of a wrapper.

Names and orders are file format: files of all releases since 0.1.0 must load.
"""

from __future__ import annotations

from functools import partial
from typing import Any, List

import numpy as np
import tensorflow as tf

from lossscale.runtime.aliases import Variable
from lossscale.runtime.loss_scale_warning import warn
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


def in_order(variables: List[Variable]) -> List[Variable]:
    """Returns a wrapper's own variables in the order of Keras 2's files."""
    places = {name: place for place, name in enumerate(_NEWER)}
    return sorted(variables, key=lambda v: places.get(plain_name(v), -1))


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
