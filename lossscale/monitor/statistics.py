"""Puts back what the forward pass of a bad batch has left in a model.

A skipped step changes no weight, but its forward pass has updated BatchNormalization's
statistics and the like. If they are NaN once, no later step repairs them.

```
before each batch and each test, and at the end of an epoch:
  if all statistics are finite:
    if a step was applied since the copy was made: copy = statistics
  else if there is a copy: statistics = copy
```

All of it happens on the device. The host reads only how often, once per epoch.

Statistics are all floating-point variables that are not trained, on each replica of
this process. Those of metrics are left out, and those of frozen layers, which no
forward pass updates.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from lossscale.gradients.check import all_finite
from lossscale.runtime import kerases
from lossscale.runtime.aliases import Tensor, Variable

_RESTORED = """\
Variables that are not trained, as BatchNormalization's statistics, held inf or NaN \
after a batch, and were put back to their values from before it: {names}. The line at \
the end of training counts such batches."""


class Statistics:
    """A copy of a model's statistics during one training."""

    #: After how many batches they were put back, as `restored` found it.
    times = 0

    def __init__(self, model: Any, optimizers: Sequence[Any]) -> None:
        layers = kerases.layers_of(model)
        frozen = {id(v) for one in layers if not one.trainable for v in one.weights}
        found = kerases.statistics_of(model)
        self._variables = [v for v in found if id(v) not in frozen]
        # Plain variables, one on each replica, that any context may assign to.
        local = model.distribute_strategy.experimental_local_results
        parts = [local(kerases.tensor_of(each)) for each in self._variables]
        counts = [local(kerases.tensor_of(each.applied_steps)) for each in optimizers]
        # Those of one device and dtype are one tensor: a hundred small ones take longer
        # to hand over than to copy.
        groups: Dict[Any, List[Variable]] = {}
        for part in [part for each in parts for part in each]:
            groups.setdefault((part.device, part.dtype), []).append(part)

        def values() -> List[Tensor]:
            return [
                tf.concat([tf.reshape(part, [-1]) for part in group], 0)
                for group in groups.values()
            ]

        def steps() -> Tensor:
            return tf.add_n([tf.cast(each[0], tf.int64) for each in counts])

        def mend(
            copies: List[Tensor], applied: Tensor, times: Tensor
        ) -> Tuple[List[Tensor], Tensor, Tensor]:
            now, applied_now = values(), steps()
            is_finite = all_finite(now)
            is_newer = tf.logical_and(is_finite, tf.not_equal(applied_now, applied))

            def restore() -> Tensor:
                bad = [tf.logical_not(all_finite(list(each))) for each in parts]
                for group, copy in zip(groups.values(), copies):
                    sizes = [part.shape.num_elements() for part in group]
                    for part, value in zip(group, tf.split(copy, sizes)):
                        part.assign(tf.reshape(value, part.shape), read_value=False)
                return times + tf.cast(tf.stack([True, *bad]), tf.int64)

            restores = tf.logical_and(applied >= 0, tf.logical_not(is_finite))
            times = tf.cond(restores, restore, lambda: times)
            copies = tf.cond(is_newer, lambda: now, lambda: copies)
            applied = tf.where(is_newer, applied_now, applied)
            return copies, applied, times

        self._mend = tf.function(mend, autograph=False)
        # What is here before the first step is as good as after an applied one.
        now, none = values(), tf.zeros([1 + len(parts)], tf.int64)
        applied = tf.where(all_finite(now), steps(), -1)  # -1: there is no copy yet
        self._state = (now, applied, none)

    def mend(self) -> None:
        """Puts the copy back if the variables are not finite, or makes a new one."""
        if self._variables:
            self._state = self._mend(*self._state)

    def restored(self) -> Optional[str]:
        """Reads the device. Returns, once, the message about what was put back."""
        before = self.times
        self.times, *each = self._state[-1].numpy().tolist()
        if before or not self.times:
            return None
        changed = [v for v, count in zip(self._variables, each) if count]
        return _RESTORED.format(names=", ".join(map(kerases.variable_name, changed)))
