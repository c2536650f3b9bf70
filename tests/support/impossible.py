"""What TensorFlow or Keras itself cannot do, with its error.

test_impossible.py and test_processes.py hold each line of it against the real thing.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import NamedTuple


class Impossible(NamedTuple):
    """A combination that cannot work.

    Attributes:
      strategy: Its name, `*` for any.
      family: The kind of optimizer, as a pattern.
      entry: How training is entered, as a pattern.
      whose: "bare" if an optimizer without a wrapper fails too, "wrapper" if Keras
        refuses its own wrapper in the same words, "keras" if Keras has no such thing.
      error: What the error says, a regular expression.
    """

    strategy: str
    family: str
    entry: str
    whose: str
    error: str


_UNSUPPORTED = "Loss scaling is not supported with the tf.distribute.Strategy: {}"
TABLE = [
    Impossible("*", "keras3", "unaggregated", "keras", "unexpected keyword argument"),
    Impossible("mirrored", "*", "xla", "bare", "located in device .* from device"),
    Impossible("mirrored", "keras3", "steps_per_execution", "bare", "Placeholder"),
    *(
        Impossible(strategy, "keras2-*", entry, "wrapper", _UNSUPPORTED.format(name))
        for strategy, name in (
            ("central", "CentralStorageStrategy"),
            ("parameter-server", "ParameterServerStrategy"),
        )
        for entry in ("fit", "loop", "xla", "unaggregated")
    ),
    Impossible("multi-worker", "keras3", "fit", "bare", "PerReplica"),
    Impossible("parameter-server", "keras3", "fit", "bare", "create_per_worker"),
]


def why_not(strategy, family, entry):
    """Returns the error of a combination that is impossible, else None."""
    for line in TABLE:
        if all(map(fnmatch, (strategy, family, entry), line[:3])):
            return line.error
    return None
