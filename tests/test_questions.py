"""docs/questions.md: the programs that answer a question do what the answer says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pages
import pytest
import tensorflow as tf
from limits import TENSORFLOW
from models import assert_same, inner_variables

import lossscale


def program(page, holds):
    """Returns the one program of a page that holds some text."""
    (found,) = [each for each in pages.blocks(pages.PAGES[page]) if holds in each]
    return found


def count(variable):
    return int(variable.numpy())


def state(model):
    """Returns a model's weights, and the variables of the optimizer that trains it."""
    variables = [*model.weights, *inner_variables(model.optimizer)]
    return [np.array(variable.numpy()) for variable in variables]


@pytest.mark.slow
def test_float16_goes_on_from_float32_and_back(run):
    found = run(program("saving", "state_of"))
    before, model, after = (found[name] for name in ("before", "model", "after"))
    assert [count(each.optimizer.iterations) for each in (before, model)] == [8, 16]
    assert model.layers[0].compute_dtype == "float16"
    again = found["make"](
        "mixed_float16", lossscale.LossScaleOptimizer(type(before.optimizer)(1e-2))
    )
    path = found["state_of"](before).write("again")
    found["state_of"](again).read(path).expect_partial()
    for one, other in ((before, again), (model, after)):
        assert_same(state(one), state(other))
    assert len(state(model)) == len(state(after)) > 12  # moments, too


@pytest.mark.slow
@pytest.mark.skipif(
    (2, 15) < TENSORFLOW < (2, 21), reason="TFLite ends the process with Keras 3.3"
)
def test_a_model_trained_in_float16_becomes_int8(run):
    found = run(program("saving", "TFLite"))
    x, model = found["x"], found["model"]
    interpreter = tf.lite.Interpreter(model_content=found["converted"])
    interpreter.allocate_tensors()
    (given,) = interpreter.get_input_details()
    (output,) = interpreter.get_output_details()
    answers = []
    for row in x[:32]:
        interpreter.set_tensor(given["index"], row[None])
        interpreter.invoke()
        answers.append(interpreter.get_tensor(output["index"])[0])
    exact = model.predict(x[:32], verbose=0)
    np.testing.assert_allclose(answers, exact, atol=0.1 * np.abs(exact).max())
    dtypes = {each["dtype"] for each in interpreter.get_tensor_details()}
    assert np.int8 in dtypes
    trained = found["trained"].predict(x[:32], verbose=0)
    np.testing.assert_allclose(exact, trained, atol=1e-2)


def test_one_bad_batch_of_several_is_left_out(run, capsys):
    found = run(program("custom-loops", "good.assign_add"))
    assert capsys.readouterr().out.split()[-1] == "3.0"
    assert count(found["scale"].skipped_steps) == 1
    assert count(found["optimizer"].applied_steps) == 1
    assert np.isfinite(np.hstack([w.numpy().ravel() for w in found["weights"]])).all()
    assert not any(total.numpy().any() for total in found["totals"])


def test_gradients_are_added_up_on_several_replicas(run, mirrored):
    text = program("custom-loops", "add_on_all")
    text = text.replace("strategy = tf.distribute.MirroredStrategy()\n", "")
    found = run(text, strategy=mirrored)
    optimizer, weights = found["optimizer"], found["weights"]
    assert count(optimizer.applied_steps) == 4

    def inputs(context):
        is_last = context.replica_id_in_sync_group == mirrored.num_replicas_in_sync - 1
        return tf.fill([4, 8], np.inf if is_last else 1.0)

    place = mirrored.experimental_distribute_values_from_function
    before = [weight.numpy() for weight in weights]
    found["add_on_all"](place(inputs), place(lambda _: tf.ones([4, 1])))
    found["apply_on_all"]()
    assert count(optimizer.applied_steps) == 4
    assert count(optimizer.loss_scale.skipped_steps) == 1
    assert_same(before, [weight.numpy() for weight in weights])
    assert not any(total.numpy().any() for total in found["totals"])


def test_the_steps_of_another_library_are_scaled(run):
    found = run(program("custom-loops", "LibraryModel"))
    losses = [float(loss) for loss in found["losses"]]
    assert losses[-1] < losses[0]
    for optimizer in (found["model"].optimizer, found["optimizer"]):
        assert optimizer.loss_scale.has_scaled
        assert count(optimizer.loss_scale.skipped_steps) == 0
    assert losses[0] > 2.0**10  # they are scaled ones

    def loss_of(self, data):
        return found["Model"].loss_of(self, data)

    unscaled = type("Unscaled", (found["LibraryModel"],), {"loss_of": loss_of})
    model = unscaled(found["model"].layers)
    inner = type(found["optimizer"].inner_optimizer)(0.1)
    model.compile(lossscale.LossScaleOptimizer(inner), run_eagerly=True)
    with pytest.warns(lossscale.LossScaleWarning, match="The loss was never scaled"):
        model.fit(found["x"], found["x"][:, :1], verbose=0)


@pytest.mark.slow
def test_the_norm_of_the_gradients_is_a_metric_and_in_tensorboard(run):
    found = run(program("watching", "WithNorm"))
    logs = found["history"].history
    assert count(found["scale"].skipped_steps) > 0
    assert np.isfinite(logs["gradient_norm"]).all()
    assert 0 < logs["gradient_norm"][0] < 100  # not a scaled one
    paths = Path(found["folder"]).rglob("events*")
    events = [e for p in paths for e in tf.compat.v1.train.summary_iterator(str(p))]
    tags = {value.tag for event in events for value in event.summary.value}
    assert {"epoch_gradient_norm", "epoch_loss_scale"} <= tags


def test_a_skipped_step_leads_to_the_batch_and_to_its_row(run, capsys):
    run(program("trouble", "def note"))
    skipped, told = capsys.readouterr().out.strip().split("\n")[-2:]
    assert re.match(r"\[2\] (sequential\w*/)?dense\w*/kernel$", skipped)
    assert re.match(r"77 forward dense\w*$", told)


def test_the_batch_that_the_monitor_names_leads_to_the_layer(run, capsys):
    with pytest.warns(lossscale.LossScaleWarning, match="was NaN before it was scaled"):
        run(program("watching", "find_nonfinite"))
    assert 'dtype="float32", name=\'wide' in capsys.readouterr().out


def test_a_cross_entropy_of_logits_has_a_gradient_in_float16(run):
    found = run(program("trouble", "BinaryCross"))
    bad, good = (
        found["tape"].gradient(loss, found["logit"]).numpy().item()
        for loss in found["losses"]
    )
    assert bad == 0 or np.isnan(bad)
    assert good == 1


def test_masks_in_float16(run):
    found = run(program("trouble", "infinite ="))
    logits = found["logits"]
    assert np.isnan(tf.nn.softmax(logits + found["infinite"]).numpy()).all()
    for each in (found["in_float32"], logits + found["finite"]):
        np.testing.assert_allclose(tf.nn.softmax(each).numpy(), 1 / 3, rtol=1e-3)


@pytest.mark.slow
def test_a_loss_scale_below_1_trains_what_overflows_at_1(run):
    found = run(program("trouble", "min_loss_scale"))
    assert 2.0**-20 < float(found["scale"]) < 1
    assert count(found["optimizer"].applied_steps) > 16
    assert count(found["scale"].skipped_steps) > 1


@pytest.mark.slow
def test_a_skipped_step_does_not_move_the_learning_rate(run):
    found = run(program("recipes", "ExponentialDecay"))
    assert found["skipped"] > 1
    assert found["skipped"] + found["applied"] == 32
    learning_rate = found["optimizer"].inner_optimizer.learning_rate
    assert float(tf.convert_to_tensor(learning_rate)) == pytest.approx(0.025)
