"""Puts back what the forward pass of a bad batch has left in a model.

A skipped step changes no weight, but its forward pass has updated BatchNormalization's
statistics and the like. If they are NaN once, no later step repairs them.

```
before each batch and each test, and at the end of an epoch:
  if all statistics are finite: copy = statistics
  else: statistics = copy
```

All of it happens on the device. Statistics are all floating-point variables that are
not trained, on each replica of this process, but for those of metrics, of frozen
layers, which no forward pass updates, and those that are not finite as this begins.
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import tensorflow as tf

from lossscale.gradients.check import all_finite
from lossscale.monitor.model import untrained
from lossscale.runtime import keras_versions
from lossscale.runtime.aliases import Tensor, Variable


class Statistics:
    """A copy of a model's statistics during one training."""

    def __init__(self, model: Any) -> None:
        # Plain variables, one on each replica, that any context may assign to. Those of
        # one device and dtype are one tensor: a hundred small ones take longer to hand
        # over than to copy.
        groups: Dict[Any, List[Variable]] = {}
        for variable in untrained(model, of_frozen=False):
            tensor = keras_versions.tensor_of(variable)
            parts = model.distribute_strategy.experimental_local_results(tensor)
            for part in parts if all(map(all_finite, parts)) else ():
                groups.setdefault((part.device, part.dtype), []).append(part)

        def values() -> List[Tensor]:
            return [
                tf.concat([tf.reshape(part, [-1]) for part in group], 0)
                for group in groups.values()
            ]

        def mend(copies: List[Tensor], times: Tensor) -> Any:
            now = values()

            def restore() -> Tuple[List[Tensor], Tensor]:
                for group, copy in zip(groups.values(), copies):
                    sizes = [part.shape.num_elements() for part in group]
                    for part, value in zip(group, tf.split(copy, sizes)):
                        part.assign(tf.reshape(value, part.shape), read_value=False)
                return copies, times + 1

            return tf.cond(all_finite(now), lambda: (now, times), restore)

        self._mend = tf.function(mend, autograph=False)
        self._copies, self._times = values(), tf.constant(0, tf.int64)

    def mend(self) -> None:
        """Makes a new copy, or puts the copy back if a variable is not finite."""
        if self._copies:
            self._copies, self._times = self._mend(self._copies, self._times)

    def times(self) -> int:
        """Reads after how many batches they were put back."""
        return int(self._times.numpy())
