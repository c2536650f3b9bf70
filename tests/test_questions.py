"""Programs that answer a question, and that pages show only in part.

What a page shows of a program is taken from the page. What a program prints stands
behind a `print`.
"""

import copy
import pickle
import re
from textwrap import indent

import numpy as np
import pages
import pytest
from installed import families
from limits import TENSORFLOW, skip_without
from models import assert_same, data, inner_variables, regression
from pages import block_of
from processes import printed

import lossscale

REPEAT, EACH_LOSS, PENALTY, *_ = pages.blocks(pages.PAGES["recipes"])


def count(*variables):
    """Returns the numbers in variables of integers."""
    return [int(variable.numpy()) for variable in variables]


def inner_state(optimizer):
    return [np.array(each.numpy()) for each in inner_variables(optimizer)]


def state(model):
    """Returns what training has changed in a model and in its inner optimizer."""
    return [*model.get_weights(), *inner_state(model.optimizer)]


def is_same(one, other):
    """Tells whether two lists of arrays are equal, to the bit."""
    assert_same(one, other)
    return True


def are_finite(arrays):
    return all(np.isfinite(each.numpy()).all() for each in arrays)


#: What they begin with: a model of one layer, 128 rows, and how models are made.
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
QUIET = {"batch_size": 16, "verbose": 0}


def make_model():
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dense(1, dtype="float32")]
    return keras.Sequential([keras.Input((8,)), *layers])


def made(optimizer):
    model = make_model()
    model.compile(optimizer, loss="mse")
    # A bare legacy optimizer has no `build`, and needs none.
    getattr(optimizer, "build", len)(model.trainable_variables)
    return model


"""

UNSCALED = """\
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1e-2))
optimizer.build(weights)
scale = optimizer.loss_scale


def unscaled_gradients(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        scaled_loss = optimizer.scale_loss(loss)
    return optimizer.get_unscaled_gradients(tape.gradient(scaled_loss, weights))


"""

#: Question -> the program.
PROGRAMS = {
    "how is one of four batches left out": f"""\
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
print(float(good))  # 3.0
apply()
print(count(optimizer.applied_steps, scale.skipped_steps))  # [1, 1]
print(are_finite(weights), any(total.numpy().any() for total in totals))  # True False
""",
    "how is a large norm skipped by hand": f"""\
y[40], y[100] = 1e4, np.inf
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
{UNSCALED}
{block_of("custom-loops", "you skip it")}
print(count(optimizer.applied_steps, scale.skipped_steps))  # [2, 1]
""",
    "how are weights averaged": f"""\
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
print(count(optimizer.applied_steps, scale.skipped_steps, averaged))  # [3, 1, 3]
print(are_finite(averages), are_finite(weights))  # True True
""",
    "how is the training step of another library scaled": f"""\
class Model(keras.Sequential):
{indent(block_of("custom-loops", "def train_step(self, data):  # the l"), "    ")}


model = Model([keras.layers.Dense(1, dtype="float32")])
model.compile(lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
model.fit(x, x[:, :1], verbose=0)
scale = model.optimizer.loss_scale
print(scale.has_scaled, count(scale.skipped_steps))  # True [0]
""",
    "how do workers agree by hand": f"""\
scale, variables = lossscale.DynamicLossScale(), weights
optimizer = keras.optimizers.SGD(0.1)


def train_step(x, y, smallest_of_all_workers):
    with tf.GradientTape() as tape:
        scaled_loss = scale.scale(tf.reduce_mean((model(x) - y) ** 2))
{indent(block_of("replicas", "smallest_of_all_workers"), "    ")}


counted = scale.good_steps, scale.skipped_steps, optimizer.iterations
train_step(x, x[:, :1], lambda own: tf.minimum(own, 1.0))
print(count(*counted))  # [1, 0, 1]
train_step(x, x[:, :1], lambda own: tf.minimum(own, 0.0))  # another's are not finite
print(count(*counted))  # [0, 1, 1]
""",
    "how are several losses scaled": """\
scale_loss = lossscale.LossScaleOptimizer(keras.optimizers.SGD()).scale_loss
losses = {"main": tf.constant(1.0), "penalty": tf.constant(2.0)}
with pytest.raises(TypeError, match="`loss` must be a tensor.*got the dict"):
    scale_loss(losses)
print(np.array(scale_loss([*losses.values()])))  # [32768. 65536.]
""",
    "does training go on when layers are frozen and unfrozen": f"""\
model = make_model()
scale = lossscale.DynamicLossScale(16, increment_period=5)
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-2), scale)
optimizer.build(model.trainable_variables)  # before any is frozen
base = model.layers[0]
for is_trained in (False, True):
    base.trainable = is_trained
    before = model.get_weights()
    model.compile(optimizer, "mse")
    model.fit(x, x[:, :1], **QUIET)
print(all((old != new).any() for old, new in zip(before, model.get_weights())))  # True
{block_of("start", "base.trainable = True")}
model.fit(x, x[:, :1], **QUIET)
print(count(model.optimizer.applied_steps, scale.good_steps))  # [8, 4]
print(float(scale))  # 256.0
""",
    "how is a loss scale frozen": f"""\
y = x[:, :1]
search = lossscale.DynamicLossScale(search_period=1)
model.compile(lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.1), search), "mse")
{block_of("setting", "frozen = lossscale.FixedLossScale(")}
optimizer = model.optimizer
print(float(optimizer.loss_scale) == float(search) > 2.0**15)  # True
print(sum(count(optimizer.iterations, search.skipped_steps)))  # 16
""",
    "does float16 go on from float32, and back": f"""\
keras.mixed_precision.set_global_policy("float32")
model = before = made(keras.optimizers.Adam(1e-2))
model.fit(x, x[:, :1], **QUIET)
path = "checkpoint"
{block_of("saving", "model = make_model()")}
model.compile(optimizer, loss="mse")
print(is_same(state(before), state(model)))  # True
print(model.layers[0].compute_dtype)  # float16
model.fit(x, x[:, :1], **QUIET)
inner = optimizer.inner_optimizer
path = tf.train.Checkpoint(weights=model.weights, optimizer=inner).write("checkpoint16")
keras.mixed_precision.set_global_policy("float32")
after = made(keras.optimizers.Adam(1e-2))
after.fit(x, x[:, :1], **QUIET)  # makes its slots
state_after = tf.train.Checkpoint(weights=after.weights, optimizer=after.optimizer)
state_after.read(path).expect_partial()
print(is_same(state(model), state(after)))  # True
""",
    "how is a model copied with its loss scale": f"""\
model, again = [
    made(lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.1), scale))
    for scale in (lossscale.DynamicLossScale(increment_period=2) for _ in "ab")
]
model.fit(x, x[:, :1], **QUIET)
{block_of("saving", "again.set_weights(")}
one, other = model.optimizer, again.optimizer
print(count(one.iterations) > [0], is_same(state(model), state(again)))  # True True
print(float(one.loss_scale) == float(other.loss_scale) > 2.0**15)  # True
""",
    "how is a bare optimizer's checkpoint restored": f"""\
keras.mixed_precision.set_global_policy("float32")
bare = made(keras.optimizers.Adam(0.1))
bare.fit(x, x[:, :1], **QUIET)
path = tf.train.Checkpoint(model=bare, optimizer=bare.optimizer).write("bare")
model = made(lossscale.LossScaleOptimizer(keras.optimizers.Adam(0.1)))
{block_of("saving", "inner = model.optimizer.inner_optimizer")}
print(count(model.optimizer.iterations), is_same(state(bare), state(model)))  # [8] True
if hasattr(keras, "ops"):  # what Keras 3's own wrapper does, as the page says
    other = made(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)))
    checkpoint = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    says = "expected dtype int64 does not equal original dtype float"
    with pytest.raises(tf.errors.InvalidArgumentError, match=says):
        checkpoint.read(path)
""",
    "what is a sure answer's gradient in float16": """\
logit = tf.constant([[20.0]], tf.float16)  # surely 1
label, crossentropy = tf.constant([[0.0]]), keras.losses.BinaryCrossentropy
with tf.GradientTape(persistent=True) as tape:
    tape.watch(logit)
    bad = crossentropy()(label, tf.sigmoid(logit))
    good = crossentropy(from_logits=True)(label, logit)
bad, good = [tape.gradient(each, logit).numpy().item() for each in (bad, good)]
print(abs(bad) > 0.0, good)  # False 1.0
""",
    "what becomes of a row that is masked as a whole": """\
logits, masked = tf.zeros([1, 3], tf.float16), tf.constant([[True] * 3])
infinite = tf.cast(tf.where(masked, -1e9, 0.0), tf.float16)
in_float32 = tf.cast(logits, tf.float32) + tf.where(masked, -1e9, 0.0)
finite = tf.cast(tf.where(masked, tf.float16.min / 2, 0.0), tf.float16)
first = [tf.nn.softmax(sums)[0, 0] for sums in (logits + infinite, logits + finite)]
first.append(tf.nn.softmax(in_float32)[0, 0])
print([round(float(each), 2) for each in first])  # [nan, 0.33, 0.33]
""",
    "how is a batch given up that always overflows": REPEAT.replace(
        "model(x)  #", "x[:32] = np.nan; model(x)  #"
    )
    + "print(count(scale.skipped_steps) == [TRIES])  # True\n"
    + "print(count(optimizer.applied_steps))  # [7]\n",  # of 8 batches
    "is the norm of the gradients a metric, and in TensorBoard": f"""\
{block_of("watching", "WithNorm")}
norms = history.history["gradient_norm"]
print(count(scale.skipped_steps) > [0], bool(np.isfinite(norms).all()))  # True True
print(0 < norms[0] < 100)  # True
paths = tf.io.gfile.glob(folder + "/train/events*")
events = [e for p in paths for e in tf.compat.v1.train.summary_iterator(p)]
tags = {{value.tag for event in events for value in event.summary.value}}
print({{"epoch_gradient_norm", "epoch_loss_scale"}} <= tags)  # True
""",
    "does an overflow of one loss lower its own scale": f"""\
{EACH_LOSS}
batch, before, held = (x[:32], x[:32, :1]), model.get_weights(), []
for scale, other in (scales, scales[::-1]):
    kept = scale.numpy(), other.numpy()
    scale.current_loss_scale.assign(2.0**100)
    train_step(*map(tf.constant, batch))
    held += [float(scale) == 2.0**99, bool(other.numpy() == kept[1])]
    scale.current_loss_scale.assign(kept[0])
print(held, is_same(before, model.get_weights()))  # [True, True, True, True] True
print(count(optimizer.applied_steps))  # [8]
""",
    "does a trained model become int8": """\
trained = make_model()
keras.mixed_precision.set_global_policy("float32")
model = make_model()
model.set_weights(trained.get_weights())
converter = tf.lite.TFLiteConverter.from_keras_model(model)
converter.optimizations = [tf.lite.Optimize.DEFAULT]  # these two lines for int8
converter.representative_dataset = lambda: ([row[None]] for row in x)
interpreter = tf.lite.Interpreter(model_content=converter.convert())
print(np.int8 in {each["dtype"] for each in interpreter.get_tensor_details()})  # True
exact, in_float16 = (each.predict(x, verbose=0) for each in (model, trained))
print(np.allclose(exact, in_float16, atol=1e-2))  # True
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("question", PROGRAMS)
def test_a_program_prints_the_answer(run, family, question, capsys):
    if "int8" in question and (2, 15) < TENSORFLOW < (2, 21):
        pytest.skip("TFLite ends the process with Keras 3.3")
    program = PROGRAMS[question]
    if "import lossscale" not in program:
        program = LOOP + program
    if family.name == "keras2-legacy":
        program = program.replace("optimizer.variables]", "optimizer.variables()]")
    answers = re.findall(r"(?m)^ *print\(.*\)  # (.*)$", program)
    names = (pytest, count, state, is_same, are_finite)
    run(program, **{each.__name__: each for each in names})
    out = capsys.readouterr().out
    lines = iter(out.splitlines())
    for answer in answers:  # in this order
        assert answer in lines, out


@pytest.mark.slow
def test_a_penalty_on_gradients_is_that_of_float32(run, capsys):
    def losses(program):
        run(program)
        lines = capsys.readouterr().out.strip().split("\n")[-3:]
        return np.array([float(line.split()[0]) for line in lines])

    in_float32 = losses(PENALTY.replace("mixed_float16", "float32"))
    np.testing.assert_allclose(losses(PENALTY), in_float32, rtol=1e-2)
    assert in_float32[-1] < in_float32[0]


#: How a copy of a model's optimizer is made, and what it has of the inner optimizer and
#: of the loss scale, as without a wrapper: of Keras 3's, Keras 2's new and its legacy
#: optimizers. None: an error of Python's or Keras's.
COPIES = {
    "pickle.loads(pickle.dumps(model.optimizer))": [(False, True), None, None],
    "copy.deepcopy(model.optimizer)": [(False, True), None, (True, True)],
    "copy.deepcopy(model).optimizer": [(True, True), (True, True), (False, False)],
}


@pytest.mark.skipif(TENSORFLOW < (2, 15), reason="Keras changed what it copies")
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_pickle_and_copies_keep_what_they_keep_of_a_bare_optimizer(family, rng):
    number = ["keras3", "keras2-new", "keras2-legacy"].index(family.name)
    adam, scale = family.optimizers.Adam, lossscale.DynamicLossScale(2.0**10, 3)
    for optimizer in (adam(0.1), lossscale.LossScaleOptimizer(adam(0.1), scale)):
        model = regression(family, optimizer, run_eagerly=True)
        model.fit(*data(rng), batch_size=16, verbose=0)
        names = {"model": model, "copy": copy, "pickle": pickle}
        for route, kept in COPIES.items():
            if kept[number] is None:
                with pytest.raises(Exception):  # noqa: B017, PT011 - Python's or Keras's
                    eval(route, names)  # noqa: S307 - our own
                continue
            copied, (of_inner, of_scale) = eval(route, names), kept[number]  # noqa: S307
            assert count(copied.iterations) == [4 if of_inner else 0]
            if of_inner:
                assert_same(*map(inner_state, (optimizer, copied)))
            if hasattr(copied, "loss_scale"):
                assert float(copied.loss_scale) == 2.0 ** (11 if of_scale else 10)
                assert copied.loss_scale is not scale


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
