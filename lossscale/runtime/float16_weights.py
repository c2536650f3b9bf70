"""Warns of variables that are trained in float16. No step depends on it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Dict, List, Sequence

import tensorflow as tf

from lossscale.runtime import keras_versions
from lossscale.runtime.aliases import Grads, Variable
from lossscale.runtime.loss_scale_warning import warn

#: What float16 variables do, and what to write. `find_nonfinite` says it, too.
IN_FLOAT16 = """\
Trainable variables are float16: {names}. In float16 a change smaller than a 4,096th \
of a weight is lost. The squares of small gradients that Adam keeps become 0, and its \
epsilon of 1e-7 is almost 0, so that steps can be far too large, or NaN. No loss \
scale can help. In place of set_floatx("float16") or the policy "float16" write the \
policy "mixed_float16", which computes in float16 and keeps the variables in float32:

    keras.mixed_precision.set_global_policy("mixed_float16")   # before you make layers
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
"""


def warn_of_float16(wrapper: Any, grads: Grads, variables: List[Variable]) -> None:
    """Warns once, after a wrapper's first step, if it trains float16 variables."""
    if "_lossscale_looked_for_float16" in vars(wrapper):
        return
    vars(wrapper)["_lossscale_looked_for_float16"] = True
    trained = [v for grad, v in zip(grads, variables) if grad is not None]
    names = float16_names(wrapper.inner_optimizer, trained, variables)
    if names:
        warn(IN_FLOAT16.format(names=names))


def float16_names(
    optimizer: Any, trained: List[Variable], variables: Sequence[Variable] = ()
) -> str:
    """Returns names of float16 variables that have no float32 copies, or nothing.

    `variables` are all of the optimizer's, in their order, of which some are trained.
    """
    dtype_of = keras_versions.stored_dtype
    narrow = [v for v in trained if dtype_of(v) == tf.float16]
    slots = _slots_by_variable(optimizer, variables or trained) if narrow else {}

    def is_copied(variable: Variable) -> bool:
        shape, own = tuple(variable.shape), slots.get(id(variable), [])
        return any(tuple(v.shape) == shape and dtype_of(v) == tf.float32 for v in own)

    narrow = [variable for variable in narrow if not is_copied(variable)]
    names = ", ".join(map(keras_versions.variable_name, narrow[:3]))
    return names + (f" and {len(narrow) - 3} more" if len(narrow) > 3 else "")


def _slots_by_variable(
    optimizer: Any, variables: Sequence[Variable]
) -> Dict[int, List[Variable]]:
    """Returns what an optimizer holds of each variable, by the variable's id.

    An optimizer holds its slots in lists, each in the order of its variables. Legacy
    optimizers of Keras 2 hold them by the variable's key.
    """
    slots: Dict[int, List[Variable]] = defaultdict(list)
    for part, thing in keras_versions.held_by(optimizer):
        held = thing.values() if isinstance(thing, dict) else thing
        # Keras 3 has the variables of each optimizer there.
        own = list(getattr(part, "_trainable_variables", None) or variables)
        if isinstance(thing, (dict, list, tuple)) and len(held) == len(own):
            for variable, slot in zip(own, held):
                if slot is not variable and hasattr(slot, "assign"):
                    slots[id(variable)].append(slot)
    for name in getattr(optimizer, "get_slot_names", list)():
        for variable in variables:
            slots[id(variable)].append(optimizer.get_slot(variable, name))
    return slots
