"""Warns of variables that are trained in float16. No step depends on it."""

from __future__ import annotations

from typing import Any, Iterator, List, Set

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
    names = float16_names(wrapper.inner_optimizer, trained)
    if names:
        warn(IN_FLOAT16.format(names=names))


def float16_names(optimizer: Any, trained: List[Variable]) -> str:
    """Returns names of float16 variables that have no float32 copies, or nothing."""
    dtype_of = keras_versions.stored_dtype
    narrow = [v for v in trained if dtype_of(v) == tf.float16]
    if not narrow or _has_float32_copies(optimizer, narrow, trained):
        return ""
    names = ", ".join(map(keras_versions.variable_name, narrow[:3]))
    return names + (f" and {len(narrow) - 3} more" if len(narrow) > 3 else "")


def _has_float32_copies(
    optimizer: Any, narrow: List[Variable], trained: List[Variable]
) -> bool:
    """Whether an optimizer holds float32 variables for those in float16.

    An ordinary slot has its variable's dtype. So, of one shape, an optimizer without
    copies holds as many float32 slots for a float32 variable as float16 ones for a
    float16 variable. Scalars tell nothing: a learning rate is one.
    """
    ids = {id(variable) for variable in trained}
    held = {id(v): v for v in _variables_in(optimizer) if id(v) not in ids}

    def count(variables: Any, shape: Any, dtype: tf.DType) -> int:
        of_shape = [v for v in variables if tuple(v.shape) == shape]
        return sum(keras_versions.stored_dtype(v) == dtype for v in of_shape)

    def is_copied(shape: Any) -> bool:
        wide, short = (count(trained, shape, d) for d in (tf.float32, tf.float16))
        wide_held, short_held = (
            count(held.values(), shape, d) for d in (tf.float32, tf.float16)
        )
        return wide_held * short > short_held * wide

    shapes = {tuple(variable.shape) for variable in narrow} - {()}
    return any(map(is_copied, shapes))


def _variables_in(optimizer: Any) -> Iterator[Variable]:
    seen: Set[int] = set()
    waiting = [optimizer]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if hasattr(thing, "assign") and hasattr(thing, "shape"):
            yield thing
        elif isinstance(thing, dict):
            waiting.extend(thing.values())
        elif isinstance(thing, (list, tuple)):
            waiting.extend(thing)
        elif hasattr(thing, "apply_gradients"):
            # Keras 3 lists the model's own variables there.
            held = dict(vars(thing))
            held.pop("_trainable_variables", None)
            waiting.append(held)
