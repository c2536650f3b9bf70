"""Gradients that cross the replicas in float16 or bfloat16, while they are scaled.

Of small powers of two float16 holds every sum, so that weights must equal those of one
replica without a wrapper to the last bit. Where it does not, the error is bounded.
"""

import numpy as np
import pytest
import strategies
import tensorflow as tf
from exact import clip
from installed import DEVICES
from models import variable_of
from strategies import RUN, agreed, assert_right, last_replica_gets

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime import replicas

REPLICAS = len(DEVICES)
#: A run that begins at the loss scale 2**6. Scaled, two steps are finite in float32 and
#: not in float16: one on the last replica, the other on none of them, but added up.
TOO_LARGE = [
    ("none", None),
    ("last", np.float32(2**12)),
    ("none", None),
    ("all", np.float32(1.2 * 65504 / 32 / REPLICAS)),
    ("none", None),
]


#: Not every TensorFlow's collectives add up bfloat16.
each_dtype = pytest.mark.parametrize(
    "dtype", [each for each in ("float16", "bfloat16") if replicas.can_sum(each)]
)


def wrapped(family, dtype="float16", inner=None):
    """Returns an optimizer of learning rate 1 whose gradients cross in `dtype`."""
    inner, scale = inner or family.optimizers.SGD(1.0), DynamicLossScale(2.0**6)
    return LossScaleOptimizer(inner, scale, communication_dtype=dtype)


class Replicas:
    """Such an optimizer on replicas, and variables that begin with these values."""

    def __init__(self, strategy, family, *starts, dtypes=("float32",) * 4, **options):
        with strategy.scope():
            pairs = zip(starts, dtypes)
            self.variables = [variable_of(family, *each) for each in pairs]
            self.optimizer = wrapped(family, **options)
            self.optimizer.build(self.variables)
        self.strategy = strategy

    def step(self, gradients, unscale=None):
        """Returns a step.

        `gradients` is called with the number of the replica and the loss scale, and
        returns scaled gradients. `unscale` changes them once they are unscaled. None:
        they are applied as they are.
        """

        def each():
            scale = self.optimizer.scale_loss(tf.constant(1.0))
            grads = gradients(strategies.replica(), scale)
            if unscale is not None:
                grads = unscale(self.optimizer.get_unscaled_gradients(grads))
            self.optimizer.apply_gradients(list(zip(grads, self.variables)))

        return tf.function(lambda: self.strategy.run(each), autograph=False)

    def values(self):
        return [agreed(self.strategy, each).tolist() for each in self.variables]


def equal(*each):
    """Returns what makes the same gradients on all replicas, from their values."""
    return lambda _, scale: [tf.constant(one, tf.float32) * scale for one in each]


# Right, and agreed


@pytest.mark.smoke
@pytest.mark.parametrize("way", ["keras2", "keras3"])
def test_a_loop(mirrored, family, way):
    run, options = [*TOO_LARGE, *RUN], {"communication_dtype": "float16"}
    seen = strategies.loop(mirrored, family, run, way=way, **options)
    assert_right(seen, run, strategies.loop_on_one(family, run, REPLICAS))


@pytest.mark.parametrize(
    ("special", "unscale"),
    [(np.inf, clip), (2.0**11, None)],
    ids=["clipped away", "beyond float16"],
)
def test_an_overflow_is_seen_on_all_and_named(mirrored, family, special, unscale):
    ours = Replicas(mirrored, family, [1.0, 2.0], [3.0])

    def gradients(_, scale):
        bad = scale * last_replica_gets(special, 1.0)
        return [tf.stack([scale, scale]), tf.reshape(bad, [1])]

    ours.step(gradients, unscale)()
    assert ours.values() == [[1.0, 2.0], [3.0]]
    assert int(ours.optimizer.loss_scale.skipped_steps.numpy()) == 1
    (fault,) = ours.optimizer.nonfinite_gradients()
    assert fault.kind == "inf"
    assert fault.variable is ours.variables[1]


@pytest.mark.parametrize("unscale", [None, list], ids=["scaled", "unscaled"])
@each_dtype
def test_sparse_none_and_other_dtypes(mirrored, family, unscale, dtype):
    ones, dtypes = [np.ones([3, 2])] * 4, ["float32", "float64", "float16", "float32"]
    ours = Replicas(mirrored, family, *ones, dtypes=dtypes, dtype=dtype)

    def gradients(number, scale):
        rows = tf.IndexedSlices(
            0.25 * scale * tf.ones([2, 2]), tf.stack([number, 2]), tf.constant([3, 2])
        )
        dense = tf.ones([3, 2]) * scale * tf.cast(number + 1, tf.float32)
        return [rows, tf.cast(dense, tf.float64), tf.cast(dense, tf.float16), None]

    ours.step(gradients, unscale)()
    rows, moved = np.ones([3, 2]), sum(range(1, REPLICAS + 1))
    np.subtract.at(rows, [*range(REPLICAS), *[2] * REPLICAS], 0.25)
    dense = np.full([3, 2], 1.0 - moved)
    np.testing.assert_array_equal(ours.values(), [rows, dense, dense, np.ones([3, 2])])


def test_small_gradients_are_scaled_again_for_the_way(mirrored, family):
    """2**-26 is zero in float16, and is not once it is multiplied by 2**6."""
    ours = Replicas(mirrored, family, [0.0])
    for unscale in (None, list):
        ours.step(equal([2.0**-26]), unscale)()
    assert ours.values() == [[-2.0 * REPLICAS * 2.0**-26]]


def test_the_error_is_float16s(mirrored, family, rng):
    grads = rng.normal(size=[REPLICAS, 1000]).astype(np.float32)
    ours = Replicas(mirrored, family, np.zeros(1000, np.float32))
    ours.step(lambda number, scale: [tf.gather(grads, number) * scale])()
    found = -np.array(ours.values()[0])
    exact = grads.astype(np.float64).sum(0)
    bound = (REPLICAS + 1) * 2.0**-11 * np.abs(grads).sum(0)
    assert (np.abs(found - exact) <= bound).all()
    assert (found != exact).any()


@each_dtype
def test_all_crosses_in_its_dtype_and_no_flag_for_itself(mirrored, family, dtype):
    ones = np.ones([2, 2])
    step = Replicas(mirrored, family, ones, ones, dtype=dtype).step(equal(ones, ones))
    # In a branch, skipped steps tell which gradients were at fault.
    outside_of_branches = step.get_concrete_function().graph.as_graph_def().node
    assert {dtype} == {
        tf.as_dtype(node.attr["T"].type).name
        for node in outside_of_branches
        if (node.op.startswith("Collective") and "T" in node.attr)
        or (node.op == "AddN" and "replica" in "".join(node.input))
    }


# What is refused


@pytest.mark.parametrize(
    ("dtype", "where", "message"),
    [
        (tf.float32, None, "one of 'float16', 'bfloat16'"),
        ("float16", ("train_apart", True), "None under ParameterServerStrategy"),
        ("bfloat16", ("can_sum", False), "'float16' or None with this TensorFlow"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(family, monkeypatch, dtype, where, message):
    if where:
        name, answer = where
        monkeypatch.setattr(replicas, name, lambda *_: answer)
    with pytest.raises(ValueError, match=f"`communication_dtype` must be .*{message}"):
        wrapped(family, dtype=dtype)


def test_an_inner_optimizer_that_adds_up_its_own_way_is_refused(family):
    names = {
        "keras3": "_all_reduce_sum_gradients",
        "keras2-new": "aggregate_gradients",
        "keras2-legacy": "_aggregate_gradients",
    }
    base = family.optimizers.SGD
    own = type("Own", (base,), {names[family.name]: lambda _, pairs: pairs})
    with pytest.raises(ValueError, match="in its own way, got 'float16'"):
        wrapped(family, inner=own())
    if family.name == "keras3":
        accumulates = base(1.0, gradient_accumulation_steps=2)
        with pytest.raises(ValueError, match="has gradient_accumulation_steps=2"):
            wrapped(family, inner=accumulates)


def test_one_that_never_asks_for_the_sum_is_refused(mirrored, family):
    if family.name != "keras3":
        pytest.skip("the test below is of Keras 2")

    class Some(family.optimizers.SGD):
        """It leaves only some of the gradients to Keras."""

        def apply(self, grads, trainable_variables=None):
            super().apply(grads[1:], trainable_variables[1:])

        def build(self, variables):
            super().build(variables[1:])

    ours = Replicas(mirrored, family, [1.0], [1.0], inner=Some(1.0))
    with pytest.raises(ValueError, match="in its own way, got"):
        ours.step(equal([2.0**-9], [2.0**-9]))()


def test_what_an_inner_optimizer_clips_is_the_sum(mirrored, family):
    sgd = family.optimizers.SGD
    inners = [(sgd(1.0, clipnorm=1.0), 1.0)]
    if family.name != "keras3":
        inners += [(drops(sgd)(1.0), REPLICAS), (clips(sgd)(1.0), 0.25)]
    for inner, moved in inners:
        ours = Replicas(mirrored, family, [0.0], inner=inner)
        ours.step(equal([1.0]))()
        assert ours.values() == [[-moved]]


def drops(base):
    class Drops(base):
        """Drops Keras 2's arguments: it adds up once all the same."""

        def apply_gradients(self, grads_and_vars, name=None, **_):
            return super().apply_gradients(list(grads_and_vars), name=name)

    return Drops


def clips(base):
    class Clips(base):
        """Clips what it adds up, as the Model Garden's `AdamWeightDecay`."""

        def apply_gradients(
            self, grads_and_vars, name=None, experimental_aggregate_gradients=True, **_
        ):
            pairs = list(grads_and_vars)
            if experimental_aggregate_gradients:
                grads, variables = zip(*pairs)
                pairs = zip(tf.clip_by_global_norm(grads, 0.25)[0], variables)
            return super().apply_gradients(list(pairs), name=name)

    return Clips
