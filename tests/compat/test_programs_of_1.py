"""Programs of TensorFlow 1 whose imports alone were changed, in a session."""

from __future__ import annotations

import numpy as np
import programs_of_1
import pytest
import tensorflow as tf
from version_1 import running, v1

pytestmark = pytest.mark.slow_on_the_newest

#: Powers of two: the loss scale is one, and what it multiplies keeps all its bits.
BATCHES = [
    (np.array([[1, 2, 0.5, -1], [3, -2, 1, 0.25]]) * 2.0**i, np.array([1.0, 0.0]))
    for i in range(-2, 3)
]
OVERFLOWS = (np.full([2, 4], np.inf), np.array([1.0, 0.0]))


def trained(program, mixed, dtype, batches):
    """Runs a program. Returns what its variables hold, by their names, at each step."""
    with running("session-of-1") as run:
        steps = program(mixed, dtype)
        run.session.run(v1.global_variables_initializer())
        history = []
        for batch in batches:
            for step in steps:
                step(run.session, batch)
            variables = v1.global_variables()
            values = run.session.run(variables)
            history.append({v.name: value for v, value in zip(variables, values)})
    return history


def by_name(history, names):
    return [{name: values[name] for name in names} for values in history]


@pytest.mark.parametrize("program", programs_of_1.PROGRAMS)
def test_it_trains_as_without_loss_scaling_and_skips_an_overflow(program):
    bare = trained(program, False, tf.float32, BATCHES)
    batches = [*BATCHES[:2], OVERFLOWS, *BATCHES[2:]]
    mixed = trained(program, True, tf.float32, batches)
    skipped = mixed.pop(2)
    assert max(v for k, v in skipped.items() if k.startswith("skipped_steps")) == 1
    np.testing.assert_equal(*by_name([skipped, mixed[1]], bare[0]))
    assert any((bare[0][name] != bare[-1][name]).any() for name in bare[0])
    np.testing.assert_equal(by_name(mixed, bare[0]), bare)


@pytest.mark.parametrize("program", programs_of_1.PROGRAMS)
def test_it_trains_in_float16(program):
    history = trained(program, True, tf.float16, BATCHES * 40)
    last = history[-1]
    assert all(np.isfinite(value).all() for value in last.values())
    assert last["skipped_steps:0"] < len(history)
    kernel = next(name for name in last if name.endswith("kernel:0"))
    assert (last[kernel] != history[0][kernel]).any()
    if program is programs_of_1.ncf:  # 2**32 is too much for float16
        scale = next(value for name, value in last.items() if "current" in name)
        assert last["skipped_steps:0"] > 0
        assert 1.0 < scale < 2.0**32
