"""`with_loss_scale`: another loss scale in the middle of a run. It is in `base.py`."""

import pytest
import tensorflow as tf
from exact import START, S, Trained, heard, warned
from limits import skip_without
from models import assert_same, compiled_by, data, regression, training_state
from strategies import agreed, last_replica_gets

from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScaleEngine,
    LossScaleOptimizer,
    SpikeGuard,
)

INF = float("inf")


def frozen(optimizer):
    """Returns a fixed loss scale with the value that an optimizer's has."""
    return FixedLossScale(float(optimizer.loss_scale), skip_nonfinite=True)


def replaced(trained, loss_scale, **guard):
    """Gives a `Trained` the optimizer with another loss scale. Returns the old one."""
    old = trained.optimizer
    trained.optimizer = old.with_loss_scale(loss_scale, **guard)
    return old


def take(trained, *factors):
    for factor in factors:
        trained.apply(trained.scaled(factor))


# In fit: a compiled model is compiled again with the optimizer that is returned.


def test_weights_slots_and_counts_are_as_if_nothing_had_happened(family, rng):
    """In powers of two, so that no loss scale changes a bit."""
    (x, y), eager, inner = data(rng, 16), compiled_by("eager"), family.optimizers.Adam
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    optimizer, left_alone = (
        LossScaleOptimizer(inner(0.05), 1024.0, name="mine") for _ in range(2)
    )
    model, other = (regression(family, o, **eager) for o in (optimizer, left_alone))
    headroom = HeadroomLossScale(2.0**4, headroom=2)
    for choose in (lambda _: headroom, frozen):
        model.fit(x, y, **fit)
        old = model.optimizer
        new = old.with_loss_scale(choose(old))
        assert (type(new), new.name) == (type(old), "mine")
        assert new.inner_optimizer is optimizer.inner_optimizer
        model.compile(new, "mse", **eager)
        assert model.optimizer is new
    model.fit(x, y, **fit)
    other.fit(x, y, epochs=3, **fit)
    assert int(model.optimizer.iterations.numpy()) == 6
    assert_same(training_state(model), training_state(other))


def test_a_model_that_was_not_compiled_again_says_so(family, rng):
    """If its step was traced before, it goes on as it was, and shows that."""
    x, y = data(rng, 16)
    models = [
        regression(family, LossScaleOptimizer(family.optimizers.SGD(0.05)))
        for _ in range(2)
    ]
    models[0].train_on_batch(x, y)
    for model in models:
        model.optimizer.with_loss_scale(8.0)
    models[0].train_on_batch(x, y)
    assert float(models[0].optimizer.loss_scale) == 2.0**15
    assert models[0].optimizer.loss_scale.good_steps.numpy() == 2
    with pytest.raises(
        RuntimeError, match=r"Use the optimizer that it returned: write model\.comp"
    ):
        models[1].train_on_batch(x, y)


# In loops: what is divided is what was multiplied, whichever function did it.


@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_of_a_function_that_was_traced(trained, unscales):
    """The old one has scaled them. The new one divides by that, and warns."""
    compute = tf.function(trained.unscaled if unscales else trained.scaled)
    factor = tf.constant(0.5)
    trained.apply(compute(factor))
    old = replaced(trained, FixedLossScale(2.0, True))
    apply = tf.function(trained.apply)
    with heard() as messages:
        apply(compute(factor))
    (message,) = messages
    assert ": The loss was never scaled" in message
    assert trained.subtracted() == 1.0
    old.loss_scale.current_loss_scale.assign(4.0)
    apply(compute(factor))
    assert trained.subtracted() == 1.5
    new = tf.function(trained.unscaled if unscales else trained.scaled)
    with warned(0):
        apply(new(factor))
    assert trained.subtracted() == 2.0


@pytest.mark.filterwarnings("ignore:.*The loss was never scaled")
def test_the_new_one_skips_and_moves_and_the_old_one_takes_no_step(trained):
    """Nor is an overflow forgotten that the old one has seen, and nobody counted."""
    grads = [tf.clip_by_value(g, -1.0, 1.0) for g in trained.unscaled(INF)]
    old = replaced(trained, DynamicLossScale(32.0))
    trained.apply(grads)
    assert (trained.subtracted(), trained.state()) == (0.0, (16.0, 0, 1))
    assert old.iterations is trained.optimizer.iterations
    for use in (
        lambda: old.scale_loss(tf.constant(1.0)),
        lambda: old.get_unscaled_gradients([tf.constant([1.0])]),
        lambda: old.apply_gradients([(tf.ones([4]), trained.variables[0])]),
        lambda: old.with_loss_scale(2.0),
    ):
        with pytest.raises(RuntimeError, match="must not take steps after `with_l"):
            use()
    replaced(trained, frozen(trained.optimizer))
    take(trained, 0.5, INF)
    assert (trained.subtracted(), float(trained.optimizer.loss_scale)) == (0.5, 16.0)
    assert [each.kind for each in trained.optimizer.nonfinite_gradients()] == ["inf"]
    assert float(old.loss_scale) == S


# What stands on a loss scale, or beside one.


def test_a_guard_is_handed_on_with_its_state(family):
    trained = Trained(family, DynamicLossScale(64.0, 3))
    take(trained, 0.5, INF, 0.5, 0.5)
    scale, guard = trained.optimizer.loss_scale, SpikeGuard(window=2)
    replaced(trained, scale, guard=guard)
    take(trained, 0.5, 0.5, 2.0**9)
    assert float(scale) == 64.0  # 32, and the third good step in a row
    assert trained.subtracted() == 2.5
    assert trained.optimizer.last_spike().largest == 2.0**9
    replaced(trained, 8.0, guard=None)  # a number, which checks nothing
    take(trained, 2.0**9)
    assert trained.subtracted() == 2.5 + 2.0**9
    replaced(trained, DynamicLossScale(16.0), guard=guard)
    replaced(trained, scale)
    assert trained.optimizer.guard is guard
    take(trained, 2.0**9)  # the second spike in a row
    assert int(guard.above_in_a_row.numpy()) == 2
    assert trained.subtracted() == 2.5 + 2.0**9


def test_a_new_guard_begins_in_its_initial_state_whatever_was_read(family, tmp_path):
    """And after guard=None no file has one."""

    def written(optimizer):
        path = str(tmp_path / "checkpoint")
        return tf.train.Checkpoint(optimizer=optimizer).write(path)

    used = LossScaleOptimizer(family.optimizers.SGD(1.0), guard=SpikeGuard(window=2))
    used.guard.spikes.assign(7)
    path, optimizer = written(used), LossScaleOptimizer(family.optimizers.SGD(1.0))
    tf.train.Checkpoint(optimizer=optimizer).read(path).expect_partial()
    for window in (2, 3):
        guard = SpikeGuard(window=window)
        optimizer = optimizer.with_loss_scale(DynamicLossScale(), guard=guard)
        assert int(optimizer.guard.spikes.numpy()) == 0
    optimizer = optimizer.with_loss_scale("dynamic", guard=None)
    names = [name for name, _ in tf.train.list_variables(written(optimizer))]
    assert not [name for name in names if "guard" in name or "spikes" in name]
    assert any("loss_scale/skipped_steps" in name for name in names)


class Narrow(LossScaleOptimizer):
    """As programs derive from Keras 2's wrapper."""

    def __init__(self, inner_optimizer, dynamic=True, initial_scale=None):
        super().__init__(inner_optimizer, dynamic, initial_scale)


def test_a_class_that_hands_no_arguments_on_is_told_what_to_write(family):
    optimizer = Narrow(family.optimizers.SGD(1.0))
    told = r"`__init__` of Narrow must take `guard`.*\*\*kwargs\)"
    with pytest.raises(TypeError, match=told):
        optimizer.with_loss_scale("dynamic", guard=SpikeGuard())
    config = {**optimizer.get_config(), "guard": SpikeGuard()}
    with pytest.raises(TypeError, match=told):
        Narrow.from_config(config)
    optimizer.loss_scale.skipped_steps.assign(3)
    scale = DynamicLossScale()  # what was refused has changed nothing
    scale.good_steps.assign(5)
    other = optimizer.with_loss_scale(scale)
    assert (type(other), int(other.dynamic_counter)) == (type(optimizer), 5)


def test_on_two_replicas_outside_of_the_scope(family, mirrored):
    skip_without("adding up over replicas", family)
    with mirrored.scope():
        trained = Trained(family, DynamicLossScale(S), communication_dtype="float16")

    def on_each(factor):
        take(trained, last_replica_gets(factor, 0.5))

    def run(factor):
        tf.function(lambda factor: mirrored.run(on_each, (factor,)))(factor)
        return START - float(agreed(mirrored, trained.variables[0])[0])

    count = mirrored.num_replicas_in_sync
    assert run(0.5) == 0.5 * count
    replaced(trained, DynamicLossScale(64.0))
    assert trained.optimizer.communication_dtype == "float16"
    assert run(0.5) == 1.0 * count  # added up once
    assert run(INF) == 1.0 * count
    assert trained.state() == (32.0, 0, 1)
    assert agreed(mirrored, trained.optimizer.loss_scale.current_loss_scale) == 32.0
    assert len(trained.optimizer.nonfinite_gradients()) == 1


# What is refused changes nothing: the old one goes on.


def test_what_is_refused_changes_nothing(trained):
    """What is no loss scale is in test_bad_input.py."""
    with pytest.raises(ValueError, match="`loss_scale` must be the name of a preset"):
        trained.optimizer.with_loss_scale("never")
    take(trained, 0.5)
    with pytest.raises(ValueError, match=r"twice.*optimizer\.with_loss_scale"):
        LossScaleOptimizer(trained.optimizer.inner_optimizer)
    replace = tf.function(lambda: trained.optimizer.with_loss_scale(2.0) and None)
    with pytest.raises(RuntimeError, match="`with_loss_scale` must be called eag"):
        replace()
    take(trained, 0.5)
    assert trained.subtracted() == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_scale", "dynamic"),
        ("guard", SpikeGuard()),
        ("communication_dtype", "float16"),
        ("nonfinite_loss", "skip"),
    ],
    ids=str,
)
def test_an_argument_that_is_set_as_an_attribute(trained, name, value):
    """What was forgotten is named: an argument, or the call of `super().__init__`."""
    optimizer, engine = trained.optimizer, LossScaleEngine()
    before, inner = getattr(optimizer, name), type(optimizer.inner_optimizer)
    told = (
        rf"`{name}` must be an argument.*Write {name}=.*, in a subclass super\(\)\.__"
    )
    told += r".*optimizer\.with_loss_scale\(" if name in ("loss_scale", "guard") else ""

    class Early(LossScaleOptimizer):
        def __init__(self, _):
            setattr(self, name, value)

    for act in (
        lambda: setattr(optimizer, name, value),
        lambda: Early(inner(1.0)),
        lambda: type("Of", (LossScaleOptimizer,), {name: value}),
        lambda: setattr(engine, name, value),
    ):
        with pytest.raises(AttributeError, match=told):
            act()
    assert getattr(optimizer, name) == before
