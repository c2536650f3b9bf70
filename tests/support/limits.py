"""What a version of TensorFlow or of Keras cannot do: the one place that knows."""

import pytest
import tensorflow as tf

TENSORFLOW = tuple(int(part) for part in tf.__version__.split(".")[:2])
#: Whether this is the newest version, the only one on which the slow tests run.
IS_NEWEST = TENSORFLOW >= (2, 21)


def is_older(family, version):
    """Tells whether a family is of a Keras 3 before a version."""
    if family.name != "keras3":
        return False  # its version is TensorFlow's
    return tuple(map(int, family.keras.__version__.split(".")[:2])) < version


def _is(*names):
    """Returns what tells whether a family has one of these names."""
    return lambda family: family.name in names


def _is_old_keras2(before):
    """Returns the same of legacy optimizers, and of new ones before a TensorFlow."""
    return IS_2 if before > TENSORFLOW else _is("keras2-legacy")


IS_3, IS_2 = _is("keras3"), _is("keras2-legacy", "keras2-new")
#: Feature -> (what cannot have it, why). A family is as in installed.py.
LIMITS = {
    "a tf.compat.v1 graph": (
        _is("keras3", "keras2-new"),
        "only legacy optimizers work in a tf.compat.v1 graph, and Keras 3 has none",
    ),
    "experimental_aggregate_gradients": (IS_3, "Keras 3 always aggregates"),
    "loss_scale_factor": (IS_2, "only Keras 3's optimizers have a loss_scale_factor"),
    "aggregation by argument": (
        _is("keras3", "keras2-new"),
        "only legacy optimizers have a gradient_aggregator",
    ),
    "aggregation by override": (
        IS_3,
        "Keras 3's optimizers have no method of their own for it",
    ),
    "use_ema": (_is("keras2-legacy"), "legacy optimizers have no moving average"),
    "gradient_accumulation_steps": (
        IS_2,
        "only Keras 3's optimizers accumulate gradients",
    ),
    "weight_decay": (
        _is_old_keras2((2, 11)),
        "legacy optimizers, and the experimental ones of 2.10, have no weight_decay",
    ),
    "gradient accumulation and EMA on replicas": (
        lambda family: family.name != "keras3" or is_older(family, (3, 15)),
        "Keras 2 accumulates nothing; older versions of Keras 3 fail otherwise",
    ),
    "convert_to_legacy_optimizer": (
        lambda family: family.name != "keras2-new" or TENSORFLOW < (2, 13),
        "only new optimizers of Keras 2 are converted; Keras 2.11's fails on wrappers",
    ),
    "copying": (IS_2, "Keras 2's optimizers cannot be copied"),
    "an optimizer in a .keras file": (
        _is_old_keras2((2, 11)),
        "a .keras file holds no state of legacy optimizers, nor of the experimental "
        "ones of 2.10, bare or wrapped",
    ),
    "an optimizer in a .weights.h5 file": (
        _is_old_keras2((2, 12)),
        "a .weights.h5 file holds no state of legacy optimizers, nor of any optimizer "
        "before Keras 2.12, bare or wrapped",
    ),
    "an optimizer in an .h5 file": (
        lambda family: family.name == "keras2-new" and TENSORFLOW < (2, 11),
        "the experimental optimizers of 2.10 lose their state: bare or wrapped",
    ),
    "weights in TensorFlow's format": (
        IS_3,
        "Keras 3 writes no weights in TensorFlow's format",
    ),
    "optimizers that hide the inner one": (
        IS_2,
        "in Keras 2's checkpoints a wrapper looks like the optimizer that it wraps",
    ),
    "adding up over replicas": (
        lambda family: getattr(family.keras, "__version__", "2").startswith("3.3."),
        "Keras 3.3 adds no gradients up over replicas: they drift apart, bare too",
    ),
    "fit over replicas": (
        lambda family: getattr(family.keras, "__version__", "2").startswith("3.6."),
        "Keras 3.6 divides no loss by the number of replicas: other weights, bare too",
    ),
    "the pages": (
        lambda family: family.name != "keras3" and TENSORFLOW < (2, 15),
        "the blocks of the README and docs/ are written for `import keras` of today",
    ),
    "attention with a dtype": (
        lambda _: TENSORFLOW < (2, 5),
        "Keras 2.4's MultiHeadAttention gives its own dtype to none of its layers",
    ),
    "acos in float16": (
        lambda _: TENSORFLOW < (2, 11),
        "acos, asin and atanh have no kernel for float16 in 2.4, and have in 2.11",
    ),
    "compile(jit_compile=...)": (
        lambda family: family.name != "keras3" and TENSORFLOW < (2, 9),
        "Keras 2 compiles no model with XLA before TensorFlow 2.9",
    ),
}


def skip_without(feature, family):
    """Skips the running test where a feature does not exist, and says why."""
    is_missing, why = LIMITS[feature]
    if is_missing(family):
        pytest.skip(why)
