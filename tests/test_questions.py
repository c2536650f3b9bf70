"""Programs that answer a question, and that pages show only in part.

What a page shows of a program is taken from the page.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from textwrap import indent

import numpy as np
import pages
import pytest
import tensorflow as tf
from exact import gradients
from installed import families
from limits import TENSORFLOW, skip_without
from models import assert_same, inner_variables, variable_of
from pages import block_of
from processes import printed

import lossscale

REPEAT, EACH_LOSS, PENALTY, *_ = pages.blocks(pages.PAGES["recipes"])


def count(variable):
    return int(variable.numpy())


def values_of(optimizer):
    return [np.array(each.numpy()) for each in inner_variables(optimizer)]


#: What they begin with: a model of one layer, and 128 rows.
LOOP = """\
import numpy as np
import tensorflow as tf
import lossscale

keras.mixed_precision.set_global_policy("mixed_float16")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, dtype="float32")])
weights = model.trainable_variables
x = np.random.default_rng(0).normal(size=[128, 8]).astype("float32")
y = x[:, :1].copy()
y[40] = np.inf  # a bad row in the second of four batches
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
"""

UNSCALED = """\
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1e-2))
optimizer.build(weights)


def unscaled_gradients(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        scaled_loss = optimizer.scale_loss(loss)
    return optimizer.get_unscaled_gradients(tape.gradient(scaled_loss, weights))


"""

ONE_LEFT_OUT = f"""\
scale = lossscale.DynamicLossScale()
optimizer = lossscale.LossScaleOptimizer(
    keras.optimizers.Adam(1e-2), lossscale.FixedLossScale(1, skip_nonfinite=True)
)
totals = [tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in weights]
good = tf.Variable(0.0, trainable=False)
{block_of("custom-loops", "def add(x, y):  # at each batch")}
add, apply = tf.function(add), tf.function(apply)
for batch in dataset:
    add(*batch)
apply()
"""

SKIPPED_BY_HAND = UNSCALED + block_of("custom-loops", "you skip it").replace(
    "model.trainable_variables", "weights"
)

AVERAGES = f"""\
{UNSCALED}
averages = [tf.Variable(tf.convert_to_tensor(w), trainable=False) for w in weights]
averaged = tf.Variable(0, trainable=False)  # how many steps are in the averages


@tf.function
def train_step(x, y):
    grads = unscaled_gradients(x, y)
{indent(block_of("custom-loops", "was_applied = "), "    ")}
    averaged.assign_add(tf.cast(was_applied, tf.int32))


for batch in dataset:
    train_step(*batch)
"""

#: A program, what is changed in it, and how many steps are applied and skipped: by the
#: library, not by hand.
COUNTED = {
    "one of four batches is left out": (ONE_LEFT_OUT, [], 1, 1),
    "a large norm is skipped by hand": (
        SKIPPED_BY_HAND,
        [("y[40] = np.inf", "y[40], y[100] = 1e4, np.inf")],
        2,
        1,
    ),
    # An overflow that no apply has counted counts at the next one, of a good batch.
    "an overflow is skipped by hand": (
        SKIPPED_BY_HAND,
        [("np.isfinite(norm) and norm > 10.0", "not norm <= 10.0")],
        2,
        1,
    ),
    "averages of weights": (AVERAGES, [], 3, 1),
    "averages, bad losses skipped": (
        AVERAGES,
        [("SGD(1e-2))", 'SGD(1e-2), nonfinite_loss="skip")')],
        3,
        1,
    ),
    "averages, with a guard": (
        AVERAGES,
        [("SGD(1e-2))", "SGD(1e-2), guard=lossscale.SpikeGuard(window=2))")],
        3,
        1,
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_it_applies_and_skips_so_many_steps(run, name):
    program, changes, applied, skipped = COUNTED[name]
    program = LOOP + program
    for old, new in changes:
        assert old in program
        program = program.replace(old, new)
    found = run(program)
    scale = found.get("scale", found["optimizer"].loss_scale)
    assert count(found["optimizer"].applied_steps) == applied
    assert count(scale.skipped_steps) == skipped
    assert all(np.isfinite(w.numpy()).all() for w in found["weights"])
    if "averages" in found:
        assert count(found["averaged"]) == applied
        assert all(np.isfinite(each.numpy()).all() for each in found["averages"])
    assert not any(total.numpy().any() for total in found.get("totals", ()))


#: A library's training step, overridden, and its loop, whose loss is scaled.
LIBRARY = f"""\
class LibraryModel(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {{"loss": loss}}


class Model(LibraryModel):
{indent(block_of("custom-loops", "def train_step(self, data):  # the l"), "    ")}

def minimize(loss_fn, steps, optimizer, trainable_variables):
    losses = []
    for _ in range(steps):
        with tf.GradientTape() as tape:
            losses.append(loss_fn())
        grads = tape.gradient(losses[-1], trainable_variables)
        optimizer.apply_gradients(zip(grads, trainable_variables))
    return losses


model = Model([keras.layers.Dense(1, dtype="float32")])
model.compile(lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
model.fit(x, x[:, :1], verbose=0)
scale = lossscale.DynamicLossScale(2.0**15, 10)
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1), scale)
true_loss = tf.Variable(0.0, trainable=False)


def loss_fn():
    loss = tf.reduce_mean((model(x) - x[:, :1]) ** 2)
    true_loss.assign(loss)  # for your log
    return optimizer.scale_loss(loss)


losses = minimize(loss_fn, 10, optimizer, model.trainable_variables)
"""


def test_the_steps_of_another_library_are_scaled(run):
    found = run(LOOP + LIBRARY)
    losses = [float(loss) for loss in found["losses"]]
    assert losses[-1] < losses[0]
    for optimizer in (found["model"].optimizer, found["optimizer"]):
        assert optimizer.loss_scale.has_scaled
        assert count(optimizer.loss_scale.skipped_steps) == 0
    # The step has changed the loss scale: divided by it, the loss is not the true one.
    assert losses[-1] / float(found["true_loss"]) == pytest.approx(2.0**15)
    assert float(found["scale"]) == 2.0**16
    # Without the two lines it is warned.
    model = found["LibraryModel"](found["model"].layers)
    model.compile(found["optimizer"].with_loss_scale("dynamic"), run_eagerly=True)
    with pytest.warns(lossscale.LossScaleWarning, match="The loss was never scaled"):
        model.fit(found["x"], found["x"][:, :1], verbose=0)


def test_a_library_that_clips_moves_weights_only_if_the_optimizer_clips(family):
    def subtracted(by_library, **settings):
        inner = family.optimizers.SGD(1.0, **settings)
        optimizer = lossscale.LossScaleOptimizer(inner)
        weight = variable_of(family, np.full([4], 8.0, np.float32))
        optimizer.build([weight])
        (grad,) = gradients(optimizer.scale_loss, 10.0, [weight])  # of norm 20
        grad = tf.clip_by_norm(grad, 1.0) if by_library else grad
        optimizer.apply_gradients([(grad, weight)])
        return 8.0 - weight.numpy()

    np.testing.assert_allclose(subtracted(False, clipnorm=1.0), 0.5, rtol=1e-6)
    says = "`gradient_clipping`, turn"
    with pytest.warns(lossscale.LossScaleWarning, match=says) as said:
        assert subtracted(True).max() < 1e-4
    assert "clipnorm=1.0" in str(said[0].message)


WORKERS = f"""\
scale, variables = lossscale.DynamicLossScale(), weights
optimizer = keras.optimizers.SGD(0.1)


def train_step(x, y, smallest_of_all_workers):
    with tf.GradientTape() as tape:
        scaled_loss = scale.scale(tf.reduce_mean((model(x) - y) ** 2))
{indent(block_of("replicas", "smallest_of_all_workers"), "    ")}
"""


def test_workers_that_agree_by_hand_apply_or_skip_together(run):
    found = run(LOOP + WORKERS)
    scale, x = found["scale"], found["x"]
    for other, expected in ((1.0, [1, 0, 1]), (0.0, [0, 1, 1])):
        smallest = lambda own, other=other: tf.minimum(own, other)  # noqa: E731
        found["train_step"](x, x[:, :1], smallest)  # its own gradients are finite
        counts = (scale.good_steps, scale.skipped_steps, found["optimizer"].iterations)
        assert list(map(count, counts)) == expected


def test_several_losses_are_scaled_one_by_one_or_as_a_list(family):
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD())
    losses = {"main": tf.constant(1.0), "penalty": tf.constant(2.0)}
    with pytest.raises(TypeError, match=r"`loss` must be a tensor.*got the dict"):
        optimizer.scale_loss(losses)
    assert not optimizer.loss_scale.has_scaled
    two = optimizer.scale_loss([*losses.values()])
    np.testing.assert_array_equal(two, [2.0**15, 2.0**16])
    assert float(optimizer.scale_loss(sum(losses.values()))) == 3 * 2.0**15


FROZEN = """\
base = keras.layers.Dense(16, "relu")
model = keras.Sequential(
    [keras.Input((8,)), base, keras.layers.Dense(1, dtype="float32")]
)
scale = lossscale.DynamicLossScale(increment_period=5)
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-2), scale)
base.trainable = False
model.compile(optimizer, "mse")
model.fit(x, x[:, :1], 16, verbose=0)
"""


@pytest.mark.slow
def test_unfrozen_layers_are_trained_with_the_old_loss_scale(run):
    unfreeze = block_of("start", "base.trainable = True")
    found = run(LOOP + FROZEN + unfreeze + "model.fit(x, x[:, :1], 16, verbose=0)\n")
    model, scale = found["model"], found["scale"]
    assert model.optimizer.loss_scale is scale
    counted = count(model.optimizer.applied_steps) + count(scale.skipped_steps)
    assert 8 <= counted < 16  # the new optimizer's steps, and all skipped ones
    # Both phases counted: it doubles at each fifth good step, and is halved at a skip.
    grown = np.log2(float(scale) / 2.0**15) + count(scale.skipped_steps)
    assert 5 * grown + count(scale.good_steps) > 8


@pytest.mark.slow
@pytest.mark.parametrize("is_built", [True, False])
def test_the_old_optimizer_trains_them_if_it_was_built_before(run, family, is_built):
    build = "optimizer.build(model.trainable_variables)\nbase.trainable = False\n"
    program = FROZEN.replace("base.trainable = False\n", build) if is_built else FROZEN
    found = run(LOOP + program)
    model, x = found["model"], found["x"]
    found["base"].trainable = True
    model.compile(found["optimizer"], "mse")
    before = model.get_weights()
    if not is_built and family.name != "keras2-legacy":
        with pytest.raises((ValueError, KeyError)):  # without our wrapper, too
            model.fit(x, x[:, :1], verbose=0)
        return
    model.fit(x, x[:, :1], verbose=0)
    assert all((old != new).any() for old, new in zip(before, model.get_weights()))


FREEZE = f"""\
y = x[:, :1]
search = lossscale.DynamicLossScale(search_period=1)
model.compile(lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.1), search), "mse")
{block_of("setting", "frozen = lossscale.FixedLossScale(")}
"""


def test_a_frozen_loss_scale_stays_as_the_first_epoch_found_it(run):
    found = run(LOOP + FREEZE)
    optimizer = found["model"].optimizer
    assert float(optimizer.loss_scale) == float(found["search"]) > 2.0**15
    skipped = count(found["search"].skipped_steps)
    assert count(optimizer.iterations) == 4 * 4 - skipped


#: Models whose optimizers are built.
MAKE = """\
def make_model():
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dense(1, dtype="float32")]
    return keras.Sequential([keras.Input((8,)), *layers])


def made(optimizer):
    model = make_model()
    model.compile(optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    return model


"""


@pytest.mark.slow
def test_float16_goes_on_from_float32_and_back(run):
    start = """\
keras.mixed_precision.set_global_policy("float32")
model = before = make_model()
model.compile(keras.optimizers.Adam(1e-2), loss="mse")
model.fit(x, x[:, :1], 16, verbose=0)
path = "checkpoint"
"""
    back = """\
restored = values_of(optimizer), model.get_weights()
model.compile(optimizer, loss="mse")
model.fit(x, x[:, :1], 16, verbose=0)
state = tf.train.Checkpoint(weights=model.weights, optimizer=optimizer.inner_optimizer)
path = state.write("checkpoint16")
keras.mixed_precision.set_global_policy("float32")
after = make_model()
after.compile(keras.optimizers.Adam(1e-2), loss="mse")
after.fit(x, x[:, :1], 16, verbose=0)  # makes its slots
state = tf.train.Checkpoint(weights=after.weights, optimizer=after.optimizer)
state.read(path).expect_partial()
"""
    there = block_of("saving", "model = make_model()")
    found = run(LOOP + MAKE + start + there + back, values_of=values_of)
    before, model, after = (found[name] for name in ("before", "model", "after"))
    restored, weights = found["restored"]
    assert_same(values_of(before.optimizer), restored)
    assert_same(before.get_weights(), weights)
    assert_same(values_of(model.optimizer), values_of(after.optimizer))
    assert_same(model.get_weights(), after.get_weights())
    iterations = [each.optimizer.iterations for each in (before, model)]
    assert list(map(count, iterations)) == [8, 16]
    assert model.layers[0].compute_dtype == "float16"
    assert {tf.as_dtype(each.dtype) for each in model.weights} == {tf.float32}


COPY = f"""\
model, again = [
    made(lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.1), scale))
    for scale in (lossscale.DynamicLossScale(increment_period=2) for _ in "ab")
]
model.fit(x, x[:, :1], 16, verbose=0)
{block_of("saving", "again.set_weights(")}
"""


def test_set_weights_copies_the_loss_scale_too(run, family):
    copied = COPY
    if family.name == "keras2-legacy":
        copied = COPY.replace("optimizer.variables]", "optimizer.variables()]")
    found = run(LOOP + MAKE + copied)
    model, again = found["model"], found["again"]
    assert_same(model.get_weights(), again.get_weights())
    assert_same(values_of(model.optimizer), values_of(again.optimizer))
    counts = [count(each.optimizer.iterations) for each in (model, again)]
    assert counts[0] == counts[1] > 0
    ours, copied = model.optimizer.loss_scale, again.optimizer.loss_scale
    assert float(ours) == float(copied) > 2.0**15
    assert ours is not copied


BARE_CHECKPOINT = f"""\
bare = made(keras.optimizers.Adam(0.1))
bare.fit(x, x[:, :1], verbose=0)
path = tf.train.Checkpoint(model=bare, optimizer=bare.optimizer).write("bare")
model = made(lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.1)))
{block_of("saving", "inner = model.optimizer.inner_optimizer")}
"""


def test_a_bare_checkpoint_is_restored_into_the_inner_optimizer(run, family):
    # A bare legacy optimizer has no `build`, and needs none.
    no_build = "getattr(optimizer, 'build', len)(model.trainable_variables)"
    make = MAKE.replace("optimizer.build(model.trainable_variables)", no_build)
    # Under mixed_float16 Keras would put its own wrapper around the bare one.
    in_float32 = LOOP.replace("mixed_float16", "float32")
    found = run(in_float32 + make + BARE_CHECKPOINT)
    model = found["model"]
    assert count(model.optimizer.iterations) == 4
    assert_same(values_of(found["bare"].optimizer), values_of(model.optimizer))
    if family.name == "keras3":  # the error that the page names
        own = family.keras.optimizers.LossScaleOptimizer(family.optimizers.Adam(0.1))
        other = found["made"](own)
        checkpoint = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match="expected dtype int64 does not equal original dtype float",
        ):
            checkpoint.read(found["path"])


TFLITE = """\
trained = make_model()
keras.mixed_precision.set_global_policy("float32")
model = make_model()
model.set_weights(trained.get_weights())
converter = tf.lite.TFLiteConverter.from_keras_model(model)
converter.optimizations = [tf.lite.Optimize.DEFAULT]  # these two lines for int8
converter.representative_dataset = lambda: ([row[None]] for row in x)
converted = converter.convert()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    (2, 15) < TENSORFLOW < (2, 21), reason="TFLite ends the process with Keras 3.3"
)
def test_a_model_of_float16_becomes_int8(run):
    found = run(LOOP + MAKE + TFLITE)
    x, model = found["x"][:32], found["model"]
    interpreter = tf.lite.Interpreter(model_content=found["converted"])
    interpreter.allocate_tensors()
    (given,) = interpreter.get_input_details()
    (output,) = interpreter.get_output_details()
    answers = []
    for row in x:
        interpreter.set_tensor(given["index"], row[None])
        interpreter.invoke()
        answers.append(interpreter.get_tensor(output["index"])[0])
    exact = model.predict(x, verbose=0)
    np.testing.assert_allclose(answers, exact, atol=0.1 * np.abs(exact).max())
    dtypes = {each["dtype"] for each in interpreter.get_tensor_details()}
    assert np.int8 in dtypes
    in_float16 = found["trained"].predict(x, verbose=0)
    np.testing.assert_allclose(exact, in_float16, atol=1e-2)


def test_a_cross_entropy_of_logits_has_a_gradient_in_float16(family):
    logit = tf.constant([[20.0]], tf.float16)  # surely 1
    label, crossentropy = tf.constant([[0.0]]), family.keras.losses.BinaryCrossentropy
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(logit)
        bad = crossentropy()(label, tf.sigmoid(logit))
        good = crossentropy(from_logits=True)(label, logit)
    assert not abs(tape.gradient(bad, logit).numpy().item()) > 0.0  # 0 or NaN
    assert tape.gradient(good, logit).numpy().item() == 1.0


def test_a_row_that_is_masked_as_a_whole_in_float16():
    logits, masked = tf.zeros([1, 3], tf.float16), tf.constant([[True] * 3])
    infinite = tf.cast(tf.where(masked, -1e9, 0.0), tf.float16)
    assert np.isnan(tf.nn.softmax(logits + infinite).numpy()).all()
    in_float32 = tf.cast(logits, tf.float32) + tf.where(masked, -1e9, 0.0)
    finite = tf.cast(tf.where(masked, tf.float16.min / 2, 0.0), tf.float16)
    for each in (in_float32, logits + finite):
        np.testing.assert_allclose(tf.nn.softmax(each).numpy(), 1 / 3, rtol=1e-3)


@pytest.mark.slow
def test_the_norm_of_the_gradients_is_a_metric_and_in_tensorboard(run):
    found = run(block_of("watching", "WithNorm"))
    assert count(found["scale"].skipped_steps) > 0
    norms = found["history"].history["gradient_norm"]
    assert np.isfinite(norms).all()
    assert 0 < norms[0] < 100  # not a scaled one
    paths = Path(found["folder"]).rglob("events*")
    events = [e for p in paths for e in tf.compat.v1.train.summary_iterator(str(p))]
    tags = {value.tag for event in events for value in event.summary.value}
    assert {"epoch_gradient_norm", "epoch_loss_scale"} <= tags


def test_a_loop_gives_up_a_batch_that_always_overflows(run):
    found = run(REPEAT.replace("model(x)  #", "x[:32] = np.nan; model(x)  #"))
    assert count(found["scale"].skipped_steps) == found["TRIES"]
    assert count(found["optimizer"].applied_steps) == 7  # of 8 batches


@pytest.mark.slow
def test_an_overflow_of_either_loss_lowers_its_own_scale_and_skips_the_step(run):
    found = run(EACH_LOSS)
    model, scales, x = (found[name] for name in ("model", "scales", "x"))
    applied, before = count(found["optimizer"].applied_steps), model.get_weights()
    for scale in scales:
        kept, others = scale.numpy(), [float(each) for each in scales]
        scale.current_loss_scale.assign(2.0**100)
        found["train_step"](tf.constant(x[:32]), tf.constant(x[:32, :1]))
        assert float(scale) == 2.0**99
        scale.current_loss_scale.assign(kept)
        assert [float(each) for each in scales] == others
        assert count(found["optimizer"].applied_steps) == applied
        assert_same(before, model.get_weights())


@pytest.mark.slow
def test_a_penalty_on_gradients_is_that_of_float32(run, capsys):
    def losses(program):
        run(program)
        lines = capsys.readouterr().out.strip().split("\n")[-3:]
        return np.array([float(line.split()[0]) for line in lines])

    in_float32 = losses(PENALTY.replace("mixed_float16", "float32"))
    np.testing.assert_allclose(losses(PENALTY), in_float32, rtol=1e-2)
    assert in_float32[-1] < in_float32[0]


@pytest.mark.slow
def test_gradients_are_added_up_on_several_replicas(run, mirrored):
    text = pages.block_of("custom-loops", "add_on_all")
    text = text.replace("strategy = tf.distribute.MirroredStrategy()\n", "")
    found = run(text, strategy=mirrored)
    optimizer, weights = found["optimizer"], found["weights"]
    applied = count(optimizer.applied_steps)
    last = mirrored.num_replicas_in_sync - 1

    def inputs(context):
        is_last = context.replica_id_in_sync_group == last
        return tf.fill([4, 8], np.inf if is_last else 1.0)

    place = mirrored.experimental_distribute_values_from_function
    before = [weight.numpy() for weight in weights]
    found["add_on_all"](place(inputs), place(lambda _: tf.ones([4, 1])))
    found["apply_on_all"]()
    assert count(optimizer.applied_steps) == applied
    assert count(optimizer.loss_scale.skipped_steps) == 1
    assert_same(before, [weight.numpy() for weight in weights])
    assert not any(total.numpy().any() for total in found["totals"])


#: How a copy is made, and what it has of the inner optimizer and of the loss scale, as
#: without a wrapper: of Keras 3's, Keras 2's new and its legacy optimizers. None: an
#: error of Python's or Keras's.
COPIES = {
    "pickle": (
        lambda model: pickle.loads(pickle.dumps(model.optimizer)),  # noqa: S301
        {"keras3": (False, True), "keras2-new": None, "keras2-legacy": None},
    ),
    "deepcopy": (
        lambda model: copy.deepcopy(model.optimizer),
        {"keras3": (False, True), "keras2-new": None, "keras2-legacy": (True, True)},
    ),
    "copied model": (
        lambda model: copy.deepcopy(model).optimizer,
        {
            "keras3": (True, True),
            "keras2-new": (True, True),
            "keras2-legacy": (False, False),
        },
    ),
}


@pytest.mark.skipif(TENSORFLOW < (2, 15), reason="Keras changed what it copies")
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize("route", COPIES)
def test_pickle_and_copies_keep_what_they_keep_of_a_bare_optimizer(family, route):
    make, kept = COPIES[route]
    keras, x = family.keras, np.ones([32, 4], "float32")
    scale = lossscale.DynamicLossScale(2.0**10, 3)
    for wrap in (lambda inner: inner, lossscale.LossScaleOptimizer):
        arguments = [scale] if wrap is lossscale.LossScaleOptimizer else []
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = wrap(family.optimizers.Adam(0.1), *arguments)
        model.compile(optimizer, "mse", run_eagerly=True)
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        if kept[family.name] is None:
            with pytest.raises(Exception):  # noqa: B017, PT011 - Python's or Keras's
                make(model)
            continue
        found, (of_inner, of_scale) = make(model), kept[family.name]
        assert count(found.iterations) == (4 if of_inner else 0)
        if of_inner:
            assert_same(*[inner_variables(each) for each in (optimizer, found)])
        if arguments:
            assert float(found.loss_scale) == (2.0**11 if of_scale else 2.0**10)
            assert found.loss_scale is not scale


@pytest.mark.slow
def test_a_trained_model_needs_no_lossscale_to_predict(tmp_path):
    skip_without("the pages", families()[0])
    keras, path = families()[0].keras, tmp_path / "model.keras"
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.1)), "mse")
    model.fit(np.ones([8, 4]), np.ones([8, 1]), verbose=0)
    model.save(path)
    program = (
        "import sys, keras, numpy as np\n"
        f"model = keras.models.load_model({str(path)!r}, compile=False)\n"
        "print(model.predict(np.ones([1, 4]), verbose=0).item())\n"
        "assert 'lossscale' not in sys.modules\n"
    )
    last = printed("-c", program).splitlines()[-1]
    assert float(last) == pytest.approx(float(model(np.ones([1, 4]))[0, 0]), rel=1e-6)
