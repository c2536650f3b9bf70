"""What only the optimizers of Keras 2 have. Both generations are quick here.

What holds for every Keras is in the other files, where a mark says which tests are
quick with Keras 2, too: `each_keras`.
"""

import numpy as np
import pytest
import tensorflow as tf
from exact import Trained
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


def wrap(generation, inner=None, **options):
    """Returns a wrapped optimizer with its variable, of a loss scale of 8."""
    options.setdefault("loss_scale", DynamicLossScale(8.0))
    trained = Trained(generation, **options)
    if inner is not None:
        trained.optimizer = LossScaleOptimizer(inner, **options)
    return trained


def step(trained, factor, **how):
    """Takes a step of which each gradient is `factor`."""
    pairs = list(zip(trained.scaled(factor), trained.variables))
    trained.optimizer.apply_gradients(pairs, **how)


def state(trained):
    """Returns what was subtracted, the loss scale, and `iterations`."""
    optimizer = trained.optimizer
    steps = int(optimizer.iterations.numpy())
    return trained.subtracted(), float(optimizer.loss_scale), steps


@pytest.fixture
def wrapped(generation):
    return wrap(generation)


def is_legacy(wrapped):
    return wrapped.optimizer._dialect.is_legacy


def test_each_is_told_not_to_sum_by_its_own_name(generation, wrapped):
    told = {"experimental_aggregate_gradients": False}
    step(wrapped, 0.5, **told)
    if not is_legacy(wrapped):
        told = {"skip_gradients_aggregation": True}
        step(wrapped, 0.0, **told)
    assert state(wrapped)[0] == 0.5
    in_float16 = wrap(generation, communication_dtype="float16")  # needs the sum
    words = "`skip_gradients_aggregation` must be False.*communication_dtype='float16'"
    with pytest.raises(ValueError, match=words):
        step(in_float16, 0.5, **told)
    step(in_float16, 0.5)
    assert state(in_float16) == (0.5, 8.0, 1)


def test_lists_begin_with_iterations_and_end_with_the_loss_scale(wrapped):
    step(wrapped, 0.5)
    optimizer, loss_scale = wrapped.optimizer, wrapped.optimizer.loss_scale
    listed = optimizer.variables()
    assert listed[0] is optimizer.iterations
    assert listed[-1] is loss_scale.consecutive_skipped_steps  # as in files of 3.1.0
    also = optimizer.weights if is_legacy(wrapped) else optimizer._variables
    assert [v is other for v, other in zip(also, listed)] == [True] * len(listed)
    if not is_legacy(wrapped) and hasattr(optimizer.inner_optimizer, "set_weights"):
        bare = type(optimizer.inner_optimizer)(1.0)
        with pytest.raises(ValueError, match="has not yet been built"):
            LossScaleOptimizer(bare, 8.0).set_weights(optimizer.get_weights())


def test_a_file_holds_ours_by_their_names(generation, wrapped):
    optimizer, inner = wrapped.optimizer, wrapped.optimizer.inner_optimizer
    if not hasattr(inner, "load_own_variables") or is_legacy(wrapped):
        pytest.skip("only new optimizers of later versions have stores")
    step(wrapped, 0.5)
    step(wrapped, INF)
    store, values = {}, optimizer.get_weights()
    optimizer.save_own_variables(store)
    numbered = dict(zip(map(str, range(99)), values))  # as in a file of 3.1.0
    of_bare = dict([*numbered.items()][: -len(optimizer.loss_scale.variables)])
    with_more = {**store, "guard_limit": np.float32(3)}
    with_less = {name: v for name, v in store.items() if name != "good_steps"}
    for held in (store, with_more, with_less, numbered, of_bare):
        other = wrap(generation)
        other.optimizer.load_own_variables({n: np.array(v) for n, v in held.items()})
        assert state(other) == (0.0, 8.0 if held is of_bare else 4.0, 1)
    for wrong in (
        {**numbered, str(len(values)): np.int64(7)},
        dict([*numbered.items()][:-1]),
        {**store, "current_loss_scale": np.ones([2], np.float32)},
    ):
        other = wrap(generation)
        with pytest.raises(ValueError, match="`weights` must be the"):
            other.optimizer.load_own_variables(wrong)
        assert state(other) == (0.0, 8.0, 0)
    unbuilt, other = {}, wrap(generation, generation.optimizers.SGD(1.0, 0.5))
    LossScaleOptimizer(generation.optimizers.SGD(1.0, 0.5)).save_own_variables(unbuilt)
    step(other, 0.5)
    other.optimizer.load_own_variables(unbuilt)  # Keras logs that it leaves it out
    assert state(other) == (0.5, 8.0, 1)


@pytest.mark.parametrize("name", ["loss_scale", "base_optimizer"])
def test_the_inner_optimizer_tracks_an_object_of_that_name(generation, name, tmp_path):
    class Own(generation.optimizers.SGD):
        def __init__(self, value):
            super().__init__(1.0)
            self._track_trackable(tf.Variable(value), name)

    inner = Own(5.0)
    wrapped = wrap(generation, inner)
    assert inner._lookup_dependency(name).numpy() == 5.0
    other = wrap(generation, Own(4.0), loss_scale=DynamicLossScale(4.0))
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
