"""docs/recipes.md: its programs on each Keras, and what they do with an overflow."""

from __future__ import annotations

import numpy as np
import pages
import pytest
import tensorflow as tf

#: Its programs, in the order of the page.
REPEAT, EACH_LOSS, PENALTY, *_ = pages.blocks(pages.PAGES["recipes"])
BATCHES = 8


def count(variable):
    return int(variable.numpy())


@pytest.mark.slow
def test_an_overflowed_batch_is_repeated_and_counted_once(run):
    found = run(REPEAT)
    scale, mean_loss = found["scale"], found["mean_loss"]
    assert count(scale.skipped_steps) > 2
    assert count(found["optimizer"].applied_steps) == BATCHES
    assert float(tf.convert_to_tensor(mean_loss.count)) == BATCHES
    assert bool(scale.last_step_finite)


def test_a_loop_gives_up_a_batch_that_always_overflows(run):
    program = REPEAT.replace("model(x)  #", "x[:32] = np.nan; model(x)  #")
    found = run(program)
    assert count(found["scale"].skipped_steps) == found["TRIES"]
    assert count(found["optimizer"].applied_steps) == BATCHES - 1


@pytest.mark.slow
def test_an_overflow_of_either_loss_lowers_its_own_scale_and_skips_the_step(run):
    found = run(EACH_LOSS)
    model, scales, x = (found[name] for name in ("model", "scales", "x"))
    optimizer = found["optimizer"]
    assert count(optimizer.applied_steps) == BATCHES
    assert [float(scale) for scale in scales] == [2.0**15, 2.0**25]

    before = model.get_weights()
    batch = tf.constant(x[:32]), tf.constant(x[:32, :1])
    for scale in scales:
        kept = scale.numpy()
        scale.current_loss_scale.assign(2.0**100)
        found["train_step"](*batch)
        assert float(scale) == 2.0**99
        scale.current_loss_scale.assign(kept)
        assert [float(each) for each in scales] == [2.0**15, 2.0**25]
        assert count(optimizer.applied_steps) == BATCHES
        for old, new in zip(before, model.get_weights()):
            np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_a_penalty_on_gradients_is_that_of_float32(run, capsys):
    def printed_losses(program):
        run(program)
        lines = capsys.readouterr().out.strip().split("\n")[-3:]
        return np.array([float(line.split()[0]) for line in lines])

    in_float16 = printed_losses(PENALTY)
    in_float32 = printed_losses(PENALTY.replace("mixed_float16", "float32"))
    np.testing.assert_allclose(in_float16, in_float32, rtol=1e-2)
    assert in_float32[-1] < in_float32[0]
