"""Puts back what the forward pass of a bad batch has left in a model.

A skipped step changes no weight, but its forward pass has updated BatchNormalization's
statistics and the like. If they are NaN once, no later step repairs them.

```
before each batch and each test, and at the end of an epoch:
  if a step was applied since the copy was made:
    copy = statistics, but for numbers that are not finite
  if a statistic is not finite: statistics = copy
```

All of it happens on the device. Statistics are all floating-point variables that are
not trained, on each replica of this process, but for those of metrics, of frozen
layers, which no forward pass updates, and those that are not finite as this begins.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import tensorflow as tf

from lossscale.gradients.check import all_finite
from lossscale.monitor.model import untrained
from lossscale.runtime import keras_versions
from lossscale.runtime.aliases import Tensor, Variable


class Statistics:
    """A copy of a model's statistics during one training."""

    def __init__(self, model: Any, optimizers: Sequence[Any]) -> None:
        # Plain variables, one on each replica, that any context may assign to.
        local = model.distribute_strategy.experimental_local_results
        found = untrained(model, of_frozen=False)
        pairs = [(v, local(keras_versions.tensor_of(v))) for v in found]
        pairs = [pair for pair in pairs if all(map(all_finite, pair[1]))]
        self._variables, parts = [v for v, _ in pairs], [part for _, part in pairs]
        applied = [keras_versions.tensor_of(o.applied_steps) for o in optimizers]
        counts = [local(count) for count in applied]
        self._records = [optimizer.engine.record for optimizer in optimizers]
        # Those of one device and dtype are one tensor: a hundred small ones take longer
        # to hand over than to copy.
        groups: Dict[Any, List[Variable]] = {}
        for part in [part for mirrored in parts for part in mirrored]:
            groups.setdefault((part.device, part.dtype), []).append(part)

        def values() -> List[Tensor]:
            return [
                tf.concat([tf.reshape(part, [-1]) for part in group], 0)
                for group in groups.values()
            ]

        def steps() -> Tensor:
            return tf.add_n([tf.cast(count[0], tf.int64) for count in counts])

        def mend(
            copies: List[Tensor],
            applied: Tensor,
            skipped: List[Tensor],
            times: Tensor,
            skipped_now: List[Tensor],
        ) -> Tuple[List[Tensor], Tensor, List[Tensor], Tensor]:
            now, applied_now = values(), steps()
            # Some inner optimizers (larq's CaseOptimizer) never count their steps.
            is_skipped = tf.reduce_any(tf.stack(skipped_now) != tf.stack(skipped))
            is_uncounted = tf.logical_and(applied_now < 1, tf.logical_not(is_skipped))
            is_newer = tf.logical_or(applied_now != applied, is_uncounted)

            def keep() -> Tuple[List[Tensor], Tensor]:
                return tf.cond(is_newer, lambda: now, lambda: copies), times

            def restore() -> Tuple[List[Tensor], Tensor]:
                bad = [tf.logical_not(all_finite(list(mirrored))) for mirrored in parts]
                kept = [
                    tf.where(tf.logical_and(is_newer, tf.math.is_finite(new)), new, old)
                    for new, old in zip(now, copies)
                ]
                for group, copy in zip(groups.values(), kept):
                    sizes = [part.shape.num_elements() for part in group]
                    for part, value in zip(group, tf.split(copy, sizes)):
                        part.assign(tf.reshape(value, part.shape), read_value=False)
                return kept, times + tf.cast(tf.stack([True, *bad]), tf.int64)

            copies, times = tf.cond(all_finite(now), keep, restore)
            return copies, applied_now, skipped_now, times

        self._mend = tf.function(mend, autograph=False)
        # What is here before the first step is as good as after an applied one.
        times = tf.zeros([1 + len(parts)], tf.int64)
        self._state = (values(), steps(), self._skipped(), times)

    def _skipped(self) -> List[Tensor]:
        return [record.counts() for record in self._records]

    def mend(self) -> None:
        """Puts the copy back where the variables are not finite, or makes a new one."""
        if self._variables:
            self._state = self._mend(*self._state, self._skipped())

    def read(self) -> Tuple[int, List[str]]:
        """Reads after how many batches some were put back, and the names of these."""
        times, *counts = self._state[-1].numpy().tolist()
        changed = [v for v, count in zip(self._variables, counts) if count]
        return times, [keras_versions.variable_name(v) for v in changed]
