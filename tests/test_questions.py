"""Programs that answer a question, and that pages show only in part."""

from __future__ import annotations

import copy
import pickle

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

REPEAT, EACH_LOSS, PENALTY, *_ = pages.blocks(pages.PAGES["recipes"])


def count(variable):
    return int(variable.numpy())


#: A program, what is changed in it, and how many steps are applied and skipped: by the
#: library, not by hand.
COUNTED = {
    "one of four batches is left out": (programs.ONE_LEFT_OUT, [], 1, 1),
    "a large norm is skipped by hand": (programs.SKIPPED_BY_HAND, [], 2, 1),
    # An overflow that no apply has counted counts at the next one, of a good batch.
    "an overflow is skipped by hand": (
        programs.SKIPPED_BY_HAND,
        [
            ("np.isfinite(norm) and norm > 10.0", "not norm <= 10.0"),
            ("y[40], y[100] = 1e4, np.inf", "y[40] = np.inf"),
        ],
        2,
        1,
    ),
    "averages of weights": (programs.AVERAGES, [], 3, 1),
    "averages, bad losses skipped": (
        programs.AVERAGES,
        [("SGD(1e-2))", 'SGD(1e-2), nonfinite_loss="skip")')],
        3,
        1,
    ),
    "averages, with a guard": (
        programs.AVERAGES,
        [("SGD(1e-2))", "SGD(1e-2), guard=lossscale.SpikeGuard(window=2))")],
        3,
        1,
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_it_applies_and_skips_so_many_steps(run, name):
    program, changes, applied, skipped = COUNTED[name]
    for old, new in changes:
        assert old in program
        program = program.replace(old, new)
    found = run(programs.LOOP + program)
    scale = found.get("scale", found["optimizer"].loss_scale)
    assert count(found["optimizer"].applied_steps) == applied
    assert count(scale.skipped_steps) == skipped
    assert all(np.isfinite(w.numpy()).all() for w in found["weights"])
    if "averages" in found:
        assert count(found["averaged"]) == applied
        assert all(np.isfinite(each.numpy()).all() for each in found["averages"])
    assert not any(total.numpy().any() for total in found.get("totals", ()))


def test_the_steps_of_another_library_are_scaled(run):
    found = run(programs.LIBRARY)
    losses = [float(loss) for loss in found["losses"]]
    assert losses[-1] < losses[0]
    assert losses[0] > 2.0**10  # they are scaled ones
    for optimizer in (found["model"].optimizer, found["optimizer"]):
        assert optimizer.loss_scale.has_scaled
        assert count(optimizer.loss_scale.skipped_steps) == 0
    assert losses[-1] / float(found["true_loss"]) == pytest.approx(2.0**15)
    # Without the two lines it is warned.
    model = found["LibraryModel"](found["model"].layers)
    model.loss_of = lambda data: found["Model"].loss_of(model, data)
    model.compile(found["optimizer"].with_loss_scale("dynamic"), run_eagerly=True)
    with pytest.warns(lossscale.LossScaleWarning, match="The loss was never scaled"):
        model.fit(found["x"], found["x"][:, :1], verbose=0)


def test_several_losses_are_scaled_one_by_one_or_as_a_list(family):
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD())
    losses = {"main": tf.constant(1.0), "penalty": tf.constant(2.0)}
    with pytest.raises(TypeError, match=r"`loss` must be a tensor.*got the dict"):
        optimizer.scale_loss(losses)
    assert not optimizer.loss_scale.has_scaled
    two = optimizer.scale_loss([*losses.values()])
    np.testing.assert_array_equal(two, [2.0**15, 2.0**16])
    assert float(optimizer.scale_loss(sum(losses.values()))) == 3 * 2.0**15


@pytest.mark.slow
def test_unfrozen_layers_are_trained_with_the_old_loss_scale(run):
    found = run(programs.LOOP + programs.UNFREEZE)
    model, scale = found["model"], found["scale"]
    assert model.optimizer.loss_scale is scale
    counted = count(model.optimizer.applied_steps) + count(scale.skipped_steps)
    assert 8 <= counted < 16  # the new optimizer's steps, and all skipped ones
    # Both phases counted: it doubles at each fifth good step, and is halved at a skip.
    grown = np.log2(float(scale) / 2.0**15) + count(scale.skipped_steps)
    assert 5 * grown + count(scale.good_steps) > 8


def test_a_bare_checkpoint_is_restored_into_the_inner_optimizer(run, family):
    found = run(programs.BARE_CHECKPOINT)
    model = found["model"]
    assert count(model.optimizer.iterations) == 2
    both = [inner_variables(each.optimizer) for each in (found["bare"], model)]
    assert_same(*[[np.array(v.numpy()) for v in each] for each in both])
    if family.name == "keras3":  # the error that the page names
        own = family.keras.optimizers.LossScaleOptimizer(family.optimizers.Adam(0.1))
        other = found["make"](own)
        checkpoint = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match="expected dtype int64 does not equal original dtype float",
        ):
            checkpoint.read(found["path"])


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
