"""The programs that answer a question do what the pages say."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import numpy as np
import pages
import programs
import pytest
import tensorflow as tf
from installed import families
from limits import TENSORFLOW, skip_without
from models import assert_same, inner_variables
from processes import printed

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
    found = run(programs.FLOAT32_TO_FLOAT16)
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
    found = run(programs.TFLITE)
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
    found = run(programs.ONE_LEFT_OUT)
    assert capsys.readouterr().out.split()[-1] == "3.0"
    assert count(found["scale"].skipped_steps) == 1
    assert count(found["optimizer"].applied_steps) == 1
    assert np.isfinite(np.hstack([w.numpy().ravel() for w in found["weights"]])).all()
    assert not any(total.numpy().any() for total in found["totals"])


@pytest.mark.slow
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
    found = run(programs.LIBRARY)
    losses = [float(loss) for loss in found["losses"]]
    assert losses[-1] < losses[0]
    for optimizer in (found["model"].optimizer, found["optimizer"]):
        assert optimizer.loss_scale.has_scaled
        assert count(optimizer.loss_scale.skipped_steps) == 0
    assert losses[0] > 2.0**10  # they are scaled ones
    # The true loss, as the page logs it, is of the weights before the last step: a
    # little more than that of the new ones.
    kernel, bias = found["model"].get_weights()
    x, true_loss = found["x"], float(found["true_loss"].numpy())
    assert losses[-1] / true_loss == pytest.approx(2.0**15)
    now = np.mean((x @ kernel + bias - x[:, :1]) ** 2)
    assert now < true_loss < 2 * now + 1e-3

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


@pytest.mark.slow
def test_the_batch_that_the_monitor_names_leads_to_the_layer(run, capsys):
    with pytest.warns(lossscale.LossScaleWarning, match="was NaN before it was scaled"):
        run(program("trouble", "except FloatingPointError"))
    assert 'dtype="float32", name=\'wide' in capsys.readouterr().out


def test_a_cross_entropy_of_logits_has_a_gradient_in_float16(run):
    found = run(programs.CROSS_ENTROPY)
    bad, good = (
        found["tape"].gradient(loss, found["logit"]).numpy().item()
        for loss in found["losses"]
    )
    assert bad == 0 or np.isnan(bad)
    assert good == 1


def test_masks_in_float16(run):
    found = run(programs.MASKS)
    logits = found["logits"]
    assert np.isnan(tf.nn.softmax(logits + found["infinite"]).numpy()).all()
    for each in (found["in_float32"], logits + found["finite"]):
        np.testing.assert_allclose(tf.nn.softmax(each).numpy(), 1 / 3, rtol=1e-3)


def attempt_again(found, optimizer):
    """Compiles the program's model again, and trains another epoch."""
    model, x = found["model"], found["x"]
    model.compile(optimizer, "mse")
    before = [np.array(w) for w in model.get_weights()]
    model.fit(x, x[:, :1], verbose=0)
    return [(a != b).any() for a, b in zip(before, model.get_weights())]


@pytest.mark.slow
def test_unfrozen_layers_are_trained_with_the_old_loss_scale(run, family):
    text = programs.UNFREEZE
    first, _ = text.split("base.trainable = True\n")
    found = run(text)
    model, scale = found["model"], found["scale"]
    assert model.optimizer.loss_scale is scale
    counted = count(model.optimizer.applied_steps) + count(scale.skipped_steps)
    assert 8 <= counted < 16  # the new optimizer's steps, and all skipped ones
    # Both phases counted: it doubles at each fifth good step, and is halved at a skip.
    grown = np.log2(float(scale) / 2.0**15) + count(scale.skipped_steps)
    assert 5 * grown + count(scale.good_steps) > 8
    # The same optimizer, as Keras has it.
    found = run(first + "base.trainable = True\n")
    if family.name != "keras2-legacy":
        with pytest.raises((ValueError, KeyError)):
            attempt_again(found, found["model"].optimizer)
        other = found["model"].optimizer.with_loss_scale("dynamic")
        with pytest.raises((ValueError, KeyError)):
            attempt_again(found, other)


@pytest.mark.slow
def test_an_optimizer_that_is_built_before_freezing_trains_both_phases(run):
    first, _ = programs.UNFREEZE.split("base.trainable = True\n")
    fit = "model.fit(x, x[:, :1], verbose=0)\n"
    compiled, _ = first.split(fit)
    build = (
        "base.trainable = True\n"
        "model.optimizer.build(model.trainable_variables)\n"
        "base.trainable = False\n"
    )
    found = run(compiled + build + fit + "base.trainable = True\n")
    optimizer = found["model"].optimizer
    before = count(optimizer.applied_steps)
    assert all(attempt_again(found, optimizer))
    assert count(optimizer.applied_steps) > before > 0


@pytest.mark.slow
def test_the_scaled_loss_over_the_new_loss_scale_is_not_the_true_loss(run):
    text = programs.LIBRARY
    old = "optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1))\n"
    assert old in text
    new = old.replace("(0.1))", "(0.1), lossscale.DynamicLossScale(2.0**15, 10))")
    found = run(text.replace(old, new))
    scaled, true_loss = float(found["losses"][-1]), float(found["true_loss"].numpy())
    assert scaled / float(found["optimizer"].loss_scale) == pytest.approx(true_loss / 2)
    assert scaled / 2.0**15 == pytest.approx(true_loss)


def test_a_library_that_clips_moves_weights_only_if_the_optimizer_clips(run):
    found = run(programs.AGENT)
    keras, model, x = found["keras"], found["model"], found["x"]
    sgd, wrapped = type(found["inner"]), lossscale.LossScaleOptimizer
    start = [np.zeros_like(weight) for weight in model.get_weights()]

    def trained(agent_class, optimizer, clipping=None):
        model.set_weights(start)
        if keras is not None and hasattr(optimizer, "build"):
            optimizer.build(model.trainable_variables)
        agent = agent_class(model, optimizer, clipping)
        for _ in range(10):
            agent.train(x, 10.0 * x[:, :1])
        return model.get_weights()

    bare = trained(found["LibraryAgent"], sgd(0.1), 1.0)
    ours = trained(found["Agent"], wrapped(sgd(0.1, clipnorm=1.0)))
    for one, other in zip(bare, ours):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    with pytest.warns(
        lossscale.LossScaleWarning, match="`gradient_clipping`, turn"
    ) as said:
        lost = trained(found["Agent"], wrapped(sgd(0.1)), 1.0)
    assert "clipnorm=1.0" in str(said[0].message)
    assert np.abs(lost[0]).max() < 1e-3 * np.abs(bare[0]).max()


def test_a_step_with_a_large_norm_may_be_skipped_by_hand(run):
    text = programs.SKIPPED_BY_HAND
    found = run(text)
    optimizer = found["optimizer"]
    assert count(optimizer.iterations) == 2
    assert count(optimizer.loss_scale.skipped_steps) == 1
    ours = found["model"].get_weights()
    # An optimizer without a wrapper that takes the two good steps.
    bare = text.replace(
        "lossscale.LossScaleOptimizer(keras.optimizers.SGD(1e-2))",
        "keras.optimizers.SGD(1e-2)",
    )
    bare = bare.replace("optimizer.scale_loss(loss)", "loss * 32768.0")
    bare = bare.replace(
        "optimizer.get_unscaled_gradients(grads)", "[g / 32768.0 for g in grads]"
    )
    bare = bare.replace("np.isfinite(norm) and norm", "not norm <= 10.0 or norm")
    if "keras2-legacy" in str(type(optimizer)):
        bare = bare.replace("optimizer.build(", "optimizer._create_all_weights(")
    assert_same(ours, run(bare)["model"].get_weights())


@pytest.mark.slow
def test_a_skipped_overflow_costs_the_next_good_batch(run):
    text = programs.SKIPPED_BY_HAND
    never = text.replace("np.isfinite(norm) and norm", "not norm <= 10.0 or norm")
    never = never.replace("y[40] = 1e4", "y[40] = np.inf")
    never = never.replace("y[100] = np.inf", "pass")
    found = run(never)  # good, infinite, good, good
    assert count(found["optimizer"].iterations) == 2  # of three good ones
    assert count(found["optimizer"].loss_scale.skipped_steps) == 1
    assert float(found["optimizer"].loss_scale) == 2.0**14
    right = never.replace("not norm <= 10.0 or norm", "np.isfinite(norm) and norm")
    assert count(run(right)["optimizer"].iterations) == 3


@pytest.mark.parametrize(
    "others",
    [
        "",
        pytest.param('nonfinite_loss="skip"', marks=pytest.mark.slow),
        pytest.param("lossscale.SpikeGuard(window=2)", marks=pytest.mark.slow),
    ],
)
def test_an_average_of_ones_own_leaves_out_skipped_steps(run, others):
    text = programs.AVERAGES
    assert "SGD(1e-2))" in text
    text = text.replace("SGD(1e-2))", f"SGD(1e-2), {others})")
    found = run(text)
    assert count(found["averaged"]) == count(found["optimizer"].applied_steps) == 3
    assert all(np.isfinite(each.numpy()).all() for each in found["averages"])
    last_finite = bool(found["optimizer"].loss_scale.last_step_finite)
    x = tf.constant(found["x"][:32])
    before = [each.numpy() for each in found["averages"]]
    is_spike = "SpikeGuard" in others
    found["train_step"](x, x[:, :1] + 1e6 if is_spike else x[:, :1] * np.nan)
    assert_same(before, [each.numpy() for each in found["averages"]])
    assert last_finite
    assert bool(found["optimizer"].loss_scale.last_step_finite) == is_spike


def test_several_losses_are_scaled_as_a_sum_a_list_or_each(run):
    found = run(programs.LOSSES)
    assert found["found"] == [5.0, 5.0, 5.0]
    optimizer = found["optimizer"]
    losses = {"main": tf.constant(1.0)}
    before = optimizer.loss_scale.has_scaled
    with pytest.raises(TypeError, match=r"`loss` must be a tensor.*got the dict"):
        optimizer.scale_loss(losses)
    assert optimizer.loss_scale.has_scaled == before
    two = optimizer.scale_loss([tf.constant(1.0), tf.constant(2.0)])
    np.testing.assert_array_equal(two, [2.0**15, 2.0**16])


@pytest.mark.slow
def test_a_frozen_loss_scale_stays_as_the_first_epoch_found_it(run):
    found = run(programs.FREEZE)
    optimizer = found["model"].optimizer
    assert float(optimizer.loss_scale) == found["found"] > 2.0**15
    skipped = count(found["search"].skipped_steps)
    assert count(optimizer.iterations) == 24 - skipped


def test_workers_that_agree_by_hand_apply_or_skip_together(run):
    found = run(programs.OWN_ENGINE)
    scale, optimizer = found["scale"], found["optimizer"]
    assert [count(scale.good_steps), count(optimizer.iterations)] == [1, 1]
    found["train_step"](found["x"] * np.inf, found["y"])
    assert [count(scale.skipped_steps), count(optimizer.iterations)] == [1, 1]


def values_of(optimizer):
    found = optimizer.variables
    return [each.numpy() for each in (found() if callable(found) else found)]


def compiled(family, wraps):
    """Returns a model after four steps, with an optimizer that is wrapped or bare."""
    keras = family.keras
    optimizer = family.optimizers.Adam(0.1)
    if wraps:
        scale = lossscale.DynamicLossScale(2.0**10, 3)
        optimizer = lossscale.LossScaleOptimizer(optimizer, scale)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", run_eagerly=True)
    x = np.ones([32, 4], "float32")
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    return model


ROUTES = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model.optimizer)),  # noqa: S301
    "deepcopy": lambda model: copy.deepcopy(model.optimizer),
    "pickled model": lambda model: pickle.loads(pickle.dumps(model)).optimizer,  # noqa: S301
    "copied model": lambda model: copy.deepcopy(model).optimizer,
}
SLOW_ROUTES = ("deepcopy", "copied model")
#: What a route keeps: of the inner optimizer, and of the loss scale. None: an error.
KEPT = {
    "keras3": {
        **dict.fromkeys(["pickle", "deepcopy"], (False, True)),
        **dict.fromkeys(["pickled model", "copied model"], (True, True)),
    },
    "keras2-new": {
        **dict.fromkeys(["pickle", "deepcopy"], None),
        **dict.fromkeys(["pickled model", "copied model"], (True, True)),
    },
    "keras2-legacy": {
        "pickle": None,
        "deepcopy": (True, True),
        **dict.fromkeys(["pickled model", "copied model"], (False, False)),
    },
}


@pytest.mark.skipif(TENSORFLOW < (2, 15), reason="Keras changed what it copies")
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize(
    "route",
    [pytest.param(r, marks=[pytest.mark.slow] * (r in SLOW_ROUTES)) for r in ROUTES],
)
def test_pickle_and_copies_keep_what_they_keep_of_a_bare_optimizer(family, route):
    kept = KEPT[family.name][route]
    for wraps in (False, True):
        model = compiled(family, wraps)
        before = values_of(model.optimizer)
        if kept is None:
            with pytest.raises(Exception):  # noqa: B017, PT011 - Python's or Keras's
                ROUTES[route](model)
            continue
        found = ROUTES[route](model)
        of_inner, of_scale = kept
        assert count(found.iterations) == (4 if of_inner else 0)
        if of_inner and (of_scale or not wraps):
            assert_same(before, values_of(found))
        if wraps:
            assert float(found.loss_scale) == (2.0**11 if of_scale else 2.0**10)
            assert found.loss_scale is not model.optimizer.loss_scale


def test_the_program_with_set_weights_keeps_the_loss_scale(run):
    found = run(programs.SET_WEIGHTS)
    model, again = found["model"], found["again"]
    assert count(again.optimizer.iterations) == 2
    assert_same(state(model), state(again))
    assert count(again.optimizer.loss_scale.good_steps) == 2


def test_a_bare_checkpoint_is_restored_into_the_inner_optimizer(run, family):
    found = run(programs.BARE_CHECKPOINT)
    model = found["model"]
    assert count(model.optimizer.iterations) == 2
    bare = [np.array(v.numpy()) for v in inner_variables(found["bare"].optimizer)]
    ours = [np.array(v.numpy()) for v in inner_variables(model.optimizer)]
    assert_same(bare, ours)
    if family.name == "keras3":  # the error that the page names
        own = family.keras.optimizers.LossScaleOptimizer(family.optimizers.Adam(0.1))
        other = found["make"](own)
        checkpoint = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match="expected dtype int64 does not equal original dtype float",
        ):
            checkpoint.read(found["path"])


@pytest.mark.slow
def test_mixed_float16_has_float32_weights(run):
    found = run(program("start", "np.ones([256, 8])"))
    dtypes = {tf.as_dtype(weight.dtype).name for weight in found["model"].weights}
    assert dtypes == {"float32"}


@pytest.mark.slow
def test_a_trained_model_needs_no_lossscale_to_predict(tmp_path):
    skip_without("the pages", families()[0])
    keras = families()[0].keras
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.1)), "mse")
    model.fit(np.ones([8, 4]), np.ones([8, 1]), verbose=0)
    model.save(tmp_path / "model.keras")
    program = tmp_path / "predict.py"
    program.write_text(
        "import sys\n"
        "import keras\n"
        "import numpy as np\n"
        f"path = {str(tmp_path / 'model.keras')!r}\n"
        "model = keras.models.load_model(path, compile=False)\n"
        "print(model.predict(np.ones([1, 4]), verbose=0).item())\n"
        "assert 'lossscale' not in sys.modules\n"
    )
    last = printed(program).splitlines()[-1]
    assert float(last) == pytest.approx(float(model(np.ones([1, 4]))[0, 0]), rel=1e-6)
