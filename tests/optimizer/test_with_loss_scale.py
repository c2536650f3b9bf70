"""`with_loss_scale`: another loss scale in the middle of a run. It is in `base.py`."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from exact import START, S, Trained, heard, warned
from limits import skip_without
from models import (
    assert_same,
    compiled,
    compiled_by,
    data,
    regression,
    scale_state,
    training_state,
    with_infinity,
)
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
MODES = ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)]
EAGER_AND_XLA = [pytest.param(m, marks=pytest.mark.slow) for m in ("eager", "xla")]


def frozen(optimizer):
    """Returns a fixed loss scale with the value that an optimizer's has."""
    return FixedLossScale(float(optimizer.loss_scale), skip_nonfinite=True)


def replaced(trained, loss_scale, **guard):
    """Gives a `Trained` the optimizer with another loss scale. Returns the old one."""
    old = trained.optimizer
    trained.optimizer = old.with_loss_scale(loss_scale, **guard)
    return old


def train_step(trained):
    trained.apply(trained.scaled(0.5))


# In fit: a compiled model is compiled again with the optimizer that is returned.


@pytest.mark.parametrize("mode", ["graph", *EAGER_AND_XLA])
def test_weights_slots_and_counts_are_as_if_nothing_had_happened(family, rng, mode):
    """In powers of two, so that no loss scale changes a bit."""
    x, y = data(rng, 16)
    compiled_so = compiled_by(mode)

    def run(model, replaces):
        headroom = HeadroomLossScale(2.0**4, headroom=2)
        choices = [None, lambda _: headroom, frozen]
        for number, choose in enumerate(choices):
            if replaces and choose is not None:
                old = model.optimizer
                new = old.with_loss_scale(choose(old))
                assert type(new) is type(old)
                assert new.name == old.name == "mine"
                assert new.inner_optimizer is old.inner_optimizer
                assert float(new.learning_rate.numpy()) == np.float32(0.05)
                model.compile(new, "mse", **compiled_so)
                assert model.optimizer is new
            model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
            assert int(model.optimizer.iterations.numpy()) == 4 * (number + 1)
        return training_state(model)

    optimizers = [
        LossScaleOptimizer(family.optimizers.Adam(0.05), 1024.0, name="mine")
        for _ in range(2)
    ]
    models = [regression(family, each, **compiled_so) for each in optimizers]
    states = [run(model, replaces) for model, replaces in zip(models, [0, 1])]
    assert_same(*states)


def test_the_new_one_skips_and_moves_and_the_old_one_does_not(family, rng):
    x, y = data(rng, 16)
    old = LossScaleOptimizer(family.optimizers.Adam(0.05), DynamicLossScale(64.0))
    model = regression(family, old, run_eagerly=True)
    model.train_on_batch(with_infinity(x), y)
    model.train_on_batch(x, y)
    assert float(old.loss_scale) == 32.0
    fixed = old.with_loss_scale(frozen(old))
    model.compile(fixed, "mse", run_eagerly=True)
    before = training_state(model)
    model.train_on_batch(with_infinity(x), y)
    assert_same(training_state(model), before)
    assert float(fixed.loss_scale) == 32.0
    assert int(fixed.loss_scale.skipped_steps.numpy()) == 1
    assert [each.kind for each in fixed.nonfinite_gradients()]
    assert scale_state(old)["skipped_steps"] == 1  # the search's own
    dynamic = fixed.with_loss_scale(DynamicLossScale(8.0, 1))
    model.compile(dynamic, "mse", run_eagerly=True)
    model.train_on_batch(x, y)
    assert float(dynamic.loss_scale) == 16.0
    assert int(dynamic.iterations.numpy()) == 2


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("unscales", [False, True])
def test_a_new_function_uses_the_new_one(trained, mode, unscales):
    for number, scale in enumerate([None, FixedLossScale(8.0, True), 2.0, S]):
        if scale is not None:
            replaced(trained, scale)

        def step():
            trained.apply(trained.unscaled(0.5) if unscales else trained.scaled(0.5))

        with warned(0):
            compiled(step, mode)()
        assert trained.subtracted() == 0.5 * (number + 1)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("later", ["eager", "graph"])
def test_gradients_of_a_function_that_was_traced(trained, unscales, later):
    """The old one has scaled them. The new one divides by that, and warns."""
    compute = tf.function(trained.unscaled if unscales else trained.scaled)
    factor = tf.constant(0.5)
    trained.apply(compute(factor))
    old = replaced(trained, FixedLossScale(2.0, True))
    apply = compiled(trained.apply, later)
    with heard() as messages:
        apply(compute(factor))
    (message,) = messages
    assert ": The loss was never scaled" in message
    assert trained.subtracted() == 1.0
    old.loss_scale.current_loss_scale.assign(4.0)
    apply(compute(factor))
    assert trained.subtracted() == 1.5


@pytest.mark.filterwarnings("ignore:.*The loss was never scaled")
def test_an_overflow_that_was_seen_is_not_forgotten(trained):
    grads = [tf.clip_by_value(g, -1.0, 1.0) for g in trained.unscaled(INF)]
    replaced(trained, DynamicLossScale(32.0))
    trained.apply(grads)
    assert trained.subtracted() == 0.0
    assert trained.state() == (16.0, 0, 1)


def test_the_old_one_takes_no_step(trained):
    old = replaced(trained, 4.0)
    assert old.iterations is trained.optimizer.iterations
    for use in (
        lambda: old.scale_loss(tf.constant(1.0)),
        lambda: old.get_unscaled_gradients([tf.constant([1.0])]),
        lambda: old.apply_gradients([(tf.ones([4]), trained.variables[0])]),
        lambda: old.with_loss_scale(2.0),
    ):
        with pytest.raises(RuntimeError, match="must not take steps after `with_l"):
            use()
    assert trained.subtracted() == 0.0
    train_step(trained)
    assert trained.subtracted() == 0.5


# What stands on a loss scale, or beside one.


def test_a_guard_is_handed_on_with_its_state(family):
    trained = Trained(family, DynamicLossScale(64.0, 3))
    for factor in (0.5, INF, 0.5, 0.5):
        trained.apply(trained.scaled(factor))
    scale, guard = trained.optimizer.loss_scale, SpikeGuard(window=2)
    replaced(trained, scale, guard=guard)
    for factor in (0.5, 0.5, 2.0**9):
        trained.apply(trained.scaled(factor))
    assert float(scale) == 64.0  # 32, and the third good step in a row
    assert trained.subtracted() == 2.5
    assert trained.optimizer.last_spike().largest == 2.0**9
    replaced(trained, 8.0, guard=None)  # a number, which checks nothing
    trained.apply(trained.scaled(2.0**9))
    assert trained.subtracted() == 2.5 + 2.0**9
    replaced(trained, DynamicLossScale(16.0), guard=guard)
    replaced(trained, scale)
    assert trained.optimizer.guard is guard
    trained.apply(trained.scaled(2.0**9))  # the second spike in a row
    assert int(guard.above_in_a_row.numpy()) == 2
    assert trained.subtracted() == 2.5 + 2.0**9


@pytest.mark.every
def test_a_new_guard_begins_in_its_initial_state_whatever_was_read(family, tmp_path):
    """And after guard=None no file has one."""

    def made(guard):
        inner = family.optimizers.SGD(1.0)
        return LossScaleOptimizer(inner, DynamicLossScale(8.0), guard=guard)

    def written(optimizer):
        path = str(tmp_path / "checkpoint")
        return tf.train.Checkpoint(optimizer=optimizer).write(path)

    used = made(SpikeGuard(window=2))
    used.guard.spikes.assign(7)
    path, optimizer = written(used), made(None)
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
    """Hands on no other arguments."""

    def __init__(self, inner_optimizer, loss_scale="dynamic", name=None):
        super().__init__(inner_optimizer, loss_scale, name)


class NarrowOfKeras2(LossScaleOptimizer):
    """As programs derive from Keras 2's wrapper."""

    def __init__(self, inner_optimizer, dynamic=True, initial_scale=None):
        super().__init__(inner_optimizer, dynamic, initial_scale)


@pytest.mark.every
@pytest.mark.parametrize("cls", [Narrow, NarrowOfKeras2])
def test_a_class_that_hands_no_arguments_on_is_told_what_to_write(family, cls):
    optimizer = cls(family.optimizers.SGD(1.0))
    told = rf"`__init__` of {cls.__name__} must take `guard`.*\*\*kwargs\)"
    with pytest.raises(TypeError, match=told):
        optimizer.with_loss_scale("dynamic", guard=SpikeGuard())
    config = {**optimizer.get_config(), "guard": SpikeGuard()}
    with pytest.raises(TypeError, match=told):
        cls.from_config(config)
    optimizer.loss_scale.skipped_steps.assign(3)
    scale = DynamicLossScale()  # what was refused has changed nothing
    scale.good_steps.assign(5)
    other = optimizer.with_loss_scale(scale)
    assert (type(other), int(other.dynamic_counter)) == (type(optimizer), 5)


@pytest.mark.parametrize(("mode", "dtype"), [("eager", None), ("graph", "float16")])
def test_on_two_replicas_outside_of_the_scope(family, mirrored, mode, dtype):
    skip_without("adding up over replicas", family)
    with mirrored.scope():
        trained = Trained(family)
        trained.optimizer = LossScaleOptimizer(
            family.optimizers.SGD(1.0), DynamicLossScale(S), communication_dtype=dtype
        )
        trained.build()

    def on_each(factor):
        trained.apply(trained.scaled(last_replica_gets(factor, 0.5)))

    def run(factor):
        compiled(lambda factor: mirrored.run(on_each, (factor,)), mode)(factor)
        return START - float(agreed(mirrored, trained.variables[0])[0])

    count = mirrored.num_replicas_in_sync
    assert run(0.5) == 0.5 * count
    replaced(trained, DynamicLossScale(64.0))
    assert trained.optimizer.communication_dtype == dtype
    assert run(0.5) == 1.0 * count  # added up once
    assert run(INF) == 1.0 * count
    assert trained.state() == (32.0, 0, 1)
    assert agreed(mirrored, trained.optimizer.loss_scale.current_loss_scale) == 32.0
    assert len(trained.optimizer.nonfinite_gradients()) == 1


# What is refused changes nothing: the old one goes on.


@pytest.mark.parametrize(
    ("loss_scale", "error", "message"),
    [
        (None, TypeError, "`loss_scale` must not be None"),
        ("never", ValueError, "`loss_scale` must be the name of a preset"),
        (-1.0, ValueError, "`loss_scale` must be positive"),
        ([], TypeError, "`loss_scale` must be a number"),
    ],
    ids=str,
)
def test_what_is_no_loss_scale(trained, loss_scale, error, message):
    train_step(trained)
    with pytest.raises(error, match=message):
        trained.optimizer.with_loss_scale(loss_scale)
    train_step(trained)
    assert trained.subtracted() == 1.0
    with pytest.raises(ValueError, match=r"twice.*optimizer\.with_loss_scale"):
        LossScaleOptimizer(trained.optimizer.inner_optimizer)


def test_in_a_graph(trained):
    replace = tf.function(lambda: trained.optimizer.with_loss_scale(2.0) and None)
    with pytest.raises(RuntimeError, match="`with_loss_scale` must be called eag"):
        replace()
    train_step(trained)
    assert trained.subtracted() == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_scale", "dynamic"),
        ("loss_scale", FixedLossScale(8.0)),
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
