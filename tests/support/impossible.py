"""What TensorFlow or Keras itself cannot do, with its error.

test_processes.py holds those of several processes against the real thing.
"""

from fnmatch import fnmatch

_UNSUPPORTED = "Loss scaling is not supported with the tf.distribute.Strategy: {}"
#: A strategy, a kind of optimizer and how training is entered, as patterns; and what
#: the error says.
TABLE = [
    # Keras has no such thing.
    ("*", "keras3", "unaggregated", "unexpected keyword argument"),
    # An optimizer without a wrapper fails, too.
    ("mirrored", "*", "xla", "located in device .* from device"),
    ("mirrored", "keras3", "steps_per_execution", "Placeholder"),
    ("multi-worker", "keras3", "fit", "PerReplica"),
    ("parameter-server", "keras3", "fit", "create_per_worker"),
    # Keras refuses its own wrapper in the same words.
    *(
        (strategy, "keras2-*", entry, _UNSUPPORTED.format(name))
        for strategy, name in (
            ("central", "CentralStorageStrategy"),
            ("parameter-server", "ParameterServerStrategy"),
        )
        for entry in ("fit", "loop", "xla", "unaggregated")
    ),
]


def why_not(strategy, family, entry):
    """Returns the error of a combination that is impossible, else None."""
    for *patterns, error in TABLE:
        if all(map(fnmatch, (strategy, family, entry), patterns)):
            return error
    return None
