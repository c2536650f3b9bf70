"""What the wrappers do with Keras 2's optimizers: each path once, where both are quick.

Other files combine them with modes, replicas and files. Those tests are slow where
Keras 3 is the first Keras, so whoever edits the module is told by these.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from exact import gradients
from installed import families
from limits import skip_without

from lossscale import DynamicLossScale, LossScaleOptimizer, SpikeGuard

pytestmark = pytest.mark.every  # all are quick
INF = float("inf")
GENERATIONS = [each for each in families() if each.name != "keras3"]


# Another name than `family`, of which the quick tests have the first one only.
@pytest.fixture(params=GENERATIONS, ids=lambda generation: generation.name)
def generation(request):
    return request.param


class Wrapped:
    """A wrapped optimizer of one generation, and the variable that it trains."""

    def __init__(self, generation, inner=None, others=(), **arguments):
        inner = inner or generation.optimizers.SGD(1.0)
        arguments.setdefault("loss_scale", DynamicLossScale(8.0))
        self.optimizer = LossScaleOptimizer(inner, **arguments)
        self.variable = tf.Variable([8.0, 8.0], name="v")
        self.optimizer.build([self.variable, *others])

    def step(self, factor, *second, unscales=True, **how):
        """Takes a step of which each gradient is `factor`. Returns what it returns."""
        grads = gradients(self.optimizer.scale_loss, factor, [self.variable])
        if unscales:
            grads = self.optimizer.get_unscaled_gradients(grads)
        return self.optimizer.apply_gradients(
            [(grads[0], self.variable)], *second, **how
        )

    def state(self):
        """Returns what the variable holds, the loss scale, and `iterations`."""
        (value,) = set(self.variable.numpy().tolist())
        scale, count = self.optimizer.loss_scale, self.optimizer.iterations
        return value, float(scale), int(count.numpy())


@pytest.fixture
def wrapped(generation):
    return Wrapped(generation)


def is_legacy(wrapped):
    return wrapped.optimizer._dialect.is_legacy


def test_it_applies_a_step_and_skips_one(generation, wrapped):
    optimizer = wrapped.optimizer
    assert isinstance(optimizer, generation.keras.mixed_precision.LossScaleOptimizer)
    assert int(wrapped.step(0.5)) == 1
    assert wrapped.state() == (7.5, 8.0, 1)
    wrapped.step(INF)
    assert wrapped.state() == (7.5, 4.0, 1)
    assert [fault.kind for fault in optimizer.nonfinite_gradients()] == ["inf"]


def test_gradients_that_are_all_none(wrapped):
    pairs = [(None, wrapped.variable)]
    with pytest.raises(ValueError, match="No gradients provided"):
        wrapped.optimizer.apply_gradients(pairs)
    assert wrapped.state() == (8.0, 8.0, 0)


@pytest.mark.parametrize("second", [1.0, "name"])
def test_the_second_argument(generation, second):
    """It is `name`, or what the inner optimizer has in its place."""
    seen = []

    class Clips(generation.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, clip_norm=None, **kwargs):
            seen.append(clip_norm)
            kwargs.pop("name", None)
            return super().apply_gradients(grads_and_vars, **kwargs)

    Wrapped(generation, Clips(1.0)).step(0.5, second)
    assert seen == [1.0 if second == 1.0 else None]
    plain = Wrapped(generation)
    plain.step(0.5, second)
    assert plain.state() == (7.5, 8.0, 1)


def test_each_is_told_not_to_sum_by_its_own_name(wrapped):
    name = "experimental_aggregate_gradients"
    if not is_legacy(wrapped):
        wrapped.step(0.5, skip_gradients_aggregation=True)
    wrapped.step(0.5, **{name: False})
    assert wrapped.state()[0] == (7.5 if is_legacy(wrapped) else 7.0)


def test_a_dtype_of_communication_needs_the_sum(generation):
    wrapped = Wrapped(generation, communication_dtype="float16")
    name = "experimental_aggregate_gradients"
    if not is_legacy(wrapped):
        name = "skip_gradients_aggregation"
    with pytest.raises(ValueError, match="communication_dtype='float16'"):
        wrapped.step(0.5, **{name: not is_legacy(wrapped)})
    wrapped.step(0.5)
    assert wrapped.state() == (7.5, 8.0, 1)


@pytest.mark.parametrize("way", ["argument", "override"])
def test_a_sum_of_ones_own_is_called_and_looked_at(generation, way):
    skip_without(f"aggregation by {way}", generation)
    factor = tf.Variable(2.0)
    other = tf.Variable(1.0, name="other")

    def aggregate(pairs):
        (grad, variable), *_ = pairs
        product = tf.math.multiply_no_nan(grad, factor)  # 0 times an infinity is 0
        return [(product, variable), (tf.constant(0.5), other)]

    class Own(generation.optimizers.SGD):
        def _aggregate_gradients(self, grads_and_vars):
            return aggregate(list(grads_and_vars))

        aggregate_gradients = _aggregate_gradients

    def inner():
        if way == "argument":
            return generation.optimizers.SGD(1.0, gradient_aggregator=aggregate)
        return Own(1.0)

    wrapped = Wrapped(generation, inner(), [other])
    wrapped.step(0.5)
    assert wrapped.state() == (7.0, 8.0, 1)
    factor.assign(0.0)  # bad before
    wrapped.step(INF)
    wrapped.step(INF, unscales=False)
    factor.assign(INF)  # bad since
    wrapped.step(0.5)
    (fault,) = wrapped.optimizer.nonfinite_gradients()
    assert fault.name == "v"
    assert wrapped.state() == (7.0, 1.0, 1)
    assert float(other) == 0.5
    factor.assign(2.0)
    fixed = Wrapped(generation, inner(), [other], loss_scale=8.0)  # checks nothing
    fixed.step(0.5)
    assert fixed.state() == (7.0, 8.0, 1)


def test_weights_are_the_inner_optimizers_and_the_loss_scales(wrapped):
    wrapped.step(0.5)
    optimizer, loss_scale = wrapped.optimizer, wrapped.optimizer.loss_scale
    listed = optimizer.variables()
    assert listed[0] is optimizer.iterations
    # Files of 0.1.0 do not hold the last one.
    assert listed[-1] is loss_scale.consecutive_skipped_steps
    assert {id(v) for v in loss_scale.variables} <= {id(v) for v in listed}
    also = optimizer.weights if is_legacy(wrapped) else optimizer._variables
    assert [v is other for v, other in zip(also, listed)] == [True] * len(listed)
    weights = optimizer.get_weights()
    wrapped.step(INF)
    optimizer.set_weights(weights)
    assert (wrapped.state()[1:], len(weights)) == ((8.0, 1), len(listed))
    of_inner = weights[: -len(loss_scale.variables)]
    optimizer.set_weights([np.int64(7), *of_inner[1:]])
    assert wrapped.state()[1:] == (8.0, 7)
    if not is_legacy(wrapped) and hasattr(optimizer.inner_optimizer, "set_weights"):
        bare = type(optimizer.inner_optimizer)(1.0)
        with pytest.raises(ValueError, match="has not yet been built"):
            LossScaleOptimizer(bare, 8.0).set_weights(weights)


def test_a_file_holds_ours_by_their_names(generation, wrapped):
    optimizer, inner = wrapped.optimizer, wrapped.optimizer.inner_optimizer
    if not hasattr(inner, "load_own_variables") or is_legacy(wrapped):
        pytest.skip("only new optimizers of later versions have stores")
    wrapped.step(0.5)
    wrapped.step(INF)
    store, own = {}, len(optimizer.loss_scale.variables)
    optimizer.save_own_variables(store)
    values = optimizer.get_weights()
    of_3_1_0 = {str(i): v for i, v in enumerate(values)}
    of_bare = {str(i): v for i, v in enumerate(values[:-own])}
    store = {name: np.array(value) for name, value in store.items()}
    with_more = {**store, "guard_limit": np.float32(3)}
    with_less = {name: v for name, v in store.items() if name != "good_steps"}
    #: What a file holds -> the loss scale and `iterations`.
    for held, scale, steps in (
        (store, 4.0, 1),
        (with_more, 4.0, 1),
        (with_less, 4.0, 1),
        (of_3_1_0, 4.0, 1),
        (of_bare, 8.0, 1),
    ):
        other = Wrapped(generation)
        other.optimizer.load_own_variables({n: np.array(v) for n, v in held.items()})
        assert other.state() == (8.0, scale, steps)
    for wrong in (
        {**of_3_1_0, str(len(values)): np.int64(7)},
        {n: v for n, v in of_3_1_0.items() if n != str(len(values) - 1)},
        {**store, "current_loss_scale": np.ones([2], np.float32)},
    ):
        other = Wrapped(generation)
        with pytest.raises(ValueError, match="`weights` must be the"):
            other.optimizer.load_own_variables(wrong)
        assert other.state() == (8.0, 8.0, 0)
    unbuilt, other = {}, Wrapped(generation, generation.optimizers.SGD(1.0, 0.5))
    LossScaleOptimizer(generation.optimizers.SGD(1.0, 0.5)).save_own_variables(unbuilt)
    other.step(0.5)
    other.optimizer.load_own_variables(unbuilt)  # Keras logs that it leaves it out
    assert other.state() == (7.5, 8.0, 1)


def test_hyperparameters_are_the_inner_optimizers(wrapped):
    optimizer = wrapped.optimizer
    optimizer.learning_rate = 0.25
    if is_legacy(wrapped):
        assert float(optimizer._decayed_lr(tf.float32)) == 0.25
    else:
        added = optimizer.add_variable_from_reference(wrapped.variable, "mine")
        assert added.shape == wrapped.variable.shape
    wrapped.step(0.5)
    assert wrapped.state()[0] == 7.875
    assert optimizer.name == "loss_scale_optimizer"


@pytest.mark.parametrize("name", ["loss_scale", "base_optimizer"])
def test_the_inner_optimizer_tracks_an_object_of_that_name(generation, name, tmp_path):
    class Own(generation.optimizers.SGD):
        def __init__(self, value):
            super().__init__(1.0)
            self._track_trackable(tf.Variable(value), name)

    inner = Own(5.0)
    wrapped = Wrapped(generation, inner)
    assert inner._lookup_dependency(name).numpy() == 5.0
    other = Wrapped(generation, Own(4.0), loss_scale=DynamicLossScale(4.0))
    path = tf.train.Checkpoint(optimizer=other.optimizer).write(str(tmp_path / "file"))
    tf.train.Checkpoint(optimizer=wrapped.optimizer).read(path).expect_partial()
    assert float(wrapped.optimizer.loss_scale) == 4.0
    assert inner._lookup_dependency(name).numpy() == 4.0
    # Ours is there under another name, and Keras's reader of old files is not.
    ours = inner._lookup_dependency(f"wrapper_{name}")
    assert ours is (wrapped.optimizer.loss_scale if name == "loss_scale" else None)
    wrapped.optimizer._dialect.release(inner)  # as copies do
    assert float(LossScaleOptimizer(inner, 2.0).loss_scale) == 2.0


def test_a_state_that_does_not_fit_is_an_error(generation, tmp_path):
    def inner():
        return generation.optimizers.SGD(1.0)

    first = LossScaleOptimizer(inner(), guard=SpikeGuard(window=8))
    path = tf.train.Checkpoint(optimizer=first).write(str(tmp_path / "checkpoint"))
    second = inner()
    tf.train.Checkpoint(optimizer=second).read(path)
    with pytest.raises(ValueError, match=r"[Ss]hape"):
        LossScaleOptimizer(second, guard=SpikeGuard(window=16))


def test_a_config_makes_the_same_kind_again(generation, wrapped):
    config = wrapped.optimizer.get_config()
    again = LossScaleOptimizer.from_config(config)
    assert type(again) is type(wrapped.optimizer)
    assert again.get_config() == config
    keras = generation.keras
    held = keras.optimizers.serialize(wrapped.optimizer)
    read = keras.optimizers.deserialize(held)
    assert read.loss_scale.get_config() == wrapped.optimizer.loss_scale.get_config()
    # Older files do not name an optimizer's module.
    old = {k: config["inner_optimizer"][k] for k in ("class_name", "config")}
    again = LossScaleOptimizer.from_config({**config, "inner_optimizer": old})
    assert type(again) is type(wrapped.optimizer)


def test_it_goes_on_from_keras_own_wrapper(generation):
    inner = generation.optimizers.SGD(1.0)
    own = type(Wrapped(generation).optimizer).__mro__
    keras_own = next(c for c in own if c.__module__.split(".")[0] != "lossscale")
    theirs = keras_own(inner, initial_scale=4.0)
    ours = LossScaleOptimizer.from_keras(theirs)
    assert ours.inner_optimizer is inner
    assert float(ours.loss_scale) == 4.0
    # A checkpoint finds ours where Keras's was, and later the next one's.
    assert inner._lookup_dependency("loss_scale") is ours.loss_scale
    ours = ours.with_loss_scale(2.0)
    assert inner._lookup_dependency("loss_scale") is ours.loss_scale


def test_a_new_optimizer_is_converted_to_a_legacy_one(generation):
    skip_without("convert_to_legacy_optimizer", generation)
    scale = DynamicLossScale(64, 7)
    optimizer = LossScaleOptimizer(generation.optimizers.SGD(0.25), scale, "mine")
    convert = generation.keras.__internal__.optimizers.convert_to_legacy_optimizer
    legacy = convert(optimizer)
    same = LossScaleOptimizer(generation.keras.optimizers.legacy.SGD(0.25))
    assert type(legacy) is type(same)
    assert type(legacy.inner_optimizer) is type(same.inner_optimizer)
    assert legacy.loss_scale.get_config() == scale.get_config()
    assert (legacy.name, float(legacy.learning_rate)) == ("mine", 0.25)


def test_in_a_session_keras_initializes_the_loss_scale(generation):
    skip_without("a tf.compat.v1 graph", generation)
    with tf.Graph().as_default(), tf.compat.v1.Session().as_default() as session:
        loss_scale = DynamicLossScale(16.0)
        optimizer = LossScaleOptimizer(generation.optimizers.SGD(1.0), loss_scale)
        # What `fit` calls in a session is not public.
        assert optimizer._dialect.module.backend.get_session() is session
        assert session.run(loss_scale.current_loss_scale) == 16.0
