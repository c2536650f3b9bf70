"""Steps on replicas, of which some are not finite, and what one replica makes of them.

All numbers are small powers of two or few bits more, so that every sum is exact in any
order: what two replicas compute must equal what one does to the last bit.
"""

from contextlib import nullcontext

import numpy as np
import tensorflow as tf
from models import assert_same, inner_variables, policy_of, variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime.keras_versions import tensor_of

#: Where a step is not finite, and what is there instead.
RUN = [
    ("none", None),
    ("last", np.inf),
    ("none", None),
    ("first", np.nan),
    ("none", None),
    ("all", -np.inf),
    ("last", np.nan),
    ("none", None),
    ("none", None),
]
#: The same in brief, for eager steps on replicas.
SHORT_RUN = RUN[:4]
#: Rows of a global batch: it divides by every number of replicas here.
ROWS = 8
SCALE = {"initial_loss_scale": 2.0**6, "increment_period": 2}


def applied(run):
    """Returns whether each step is applied."""
    return [place == "none" for place, _ in run]


def at(place, special, parts):
    """Returns `float32` of shape `[parts]`: `special` in some, and 0 in the others."""
    added = np.zeros([parts], np.float32)
    if place != "none":
        where = {"first": slice(0, 1), "last": slice(-1, None), "all": slice(None)}
        added[where[place]] = special
    return added


def rule(flags):
    """Returns scale, good steps and skipped steps after each step, in plain Python."""
    scale, good, skipped, seen = SCALE["initial_loss_scale"], 0, 0, []
    for is_finite in flags:
        if is_finite:
            good += 1
            if good >= SCALE["increment_period"]:
                good, scale = 0, scale * 2.0
        else:
            good, skipped, scale = 0, skipped + 1, max(scale / 2.0, 1.0)
        seen.append((scale, good, skipped, is_finite))
    return seen


def scope_of(strategy):
    """Returns the scope of `strategy`, if there is one."""
    return nullcontext() if strategy is None else strategy.scope()


def replica():
    """Returns this replica's number, 0 without a strategy."""
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def last_replica_gets(special, ordinary):
    """Returns `special` on the last replica and `ordinary` on the others."""
    last = tf.distribute.get_replica_context().num_replicas_in_sync - 1
    # In a session `==` would compare objects.
    return tf.where(tf.equal(replica(), last), special, ordinary)


def agreed(strategy, variable):
    """Returns a variable's value. All its copies must have it, to the last bit."""
    copies = strategy.experimental_local_results(tensor_of(variable))
    first, *others = (copy.numpy() for copy in copies)
    for other in others:
        np.testing.assert_array_equal(first, other)
    return first


def assert_bit_equal(strategy, variables):
    for variable in variables:
        agreed(strategy, variable)


def momentum(family):
    """Returns an optimizer with a slot that is exact in powers of two."""
    return family.optimizers.SGD(0.25, momentum=0.5)


def slots(optimizer):
    """Returns the variables that an optimizer keeps for each weight."""
    return [variable for variable in inner_variables(optimizer) if len(variable.shape)]


class Seen:
    """What is seen after each step: `weights` and slots, `states`, `iterations`."""

    def __init__(self):
        self.weights, self.states, self.iterations = [], [], []

    def look(self, strategy, optimizer, weights):
        scale, trained = optimizer.loss_scale, [*weights, *slots(optimizer)]
        state = (scale.current_loss_scale, scale.good_steps, scale.skipped_steps)
        state = (*state, scale.last_step_finite)
        self.weights.append([agreed(strategy, each) for each in trained])
        self.states.append(tuple(agreed(strategy, each).item() for each in state))
        self.iterations.append(int(optimizer.iterations.numpy()))


def assert_right(seen, run, weights):
    """Checks that all of a run is as by the rule, with these weights and slots."""
    assert seen.states == rule(applied(run))
    assert seen.iterations == list(np.cumsum(applied(run)))
    assert len(seen.weights) == len(run)
    for ours, theirs in zip(seen.weights, weights):
        assert_same(ours, theirs)


def on_one(run, optimizer, weights, train):
    """Returns what a bare run comes to that has none of the bad steps."""
    seen = []
    for number, is_finite in enumerate(applied(run)):
        if is_finite:
            train(number)
        seen.append([each.numpy() for each in (*weights, *slots(optimizer))])
    return seen


# `fit`


def rows(run):
    """Returns inputs and targets of a run, a batch of `ROWS` for each step."""
    x = np.arange(2 * ROWS * len(run), dtype=np.float32).reshape(-1, 2) % 5 - 2
    y = np.arange(ROWS * len(run), dtype=np.float32).reshape(-1, 1) % 3 - 1
    for step, (place, special) in enumerate(run):
        x[step * ROWS : (step + 1) * ROWS, 0] += at(place, special, ROWS)
    return x, y


def linear(family, optimizer, policy, **compile_arguments):
    """Returns a model whose gradients do not depend on its weights, so stay exact."""
    keras = family.keras
    with policy_of(keras, policy):
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((2,)), layer])
    model.compile(optimizer, loss=_product, **compile_arguments)
    return model


def _product(y_true, y_pred):
    return tf.reduce_mean(tf.cast(y_true, y_pred.dtype) * y_pred, axis=-1)


def fit(strategy, family, run, data=None, **compiles):
    """Fits a model to a run, or to a dataset that has one, and returns what is seen."""
    with strategy.scope():
        optimizer = LossScaleOptimizer(momentum(family), DynamicLossScale(**SCALE))
        model = linear(family, optimizer, "mixed_float16", **compiles)
        optimizer.build(model.trainable_variables)
    seen = Seen()
    look = lambda *_, **__: seen.look(strategy, optimizer, model.weights)  # noqa: E731
    recorder = family.keras.callbacks.LambdaCallback(on_train_batch_end=look)
    quiet = {"verbose": 0, "shuffle": False, "callbacks": [recorder]}
    if data is None:
        model.fit(*rows(run), batch_size=ROWS, **quiet)
    else:
        model.fit(data, steps_per_epoch=len(run), **quiet)
    return seen


def fit_on_one(family, run):
    optimizer, (x, y) = momentum(family), rows(run)
    model = linear(family, optimizer, "float32")

    def train(step):
        part = slice(step * ROWS, (step + 1) * ROWS)
        model.train_on_batch(x[part], y[part])

    return on_one(run, optimizer, model.weights, train)


# `strategy.run`


def gradient(number, added):
    """Returns a gradient for replica `number`, of which one element is special."""
    share = tf.cast(number + 1, tf.float32)
    return tf.stack([share * 0.5 + added, share * -0.25])


class Loop:
    """An optimizer in a custom loop, and what is `seen` after each step."""

    def __init__(
        self, strategy, family, way="keras3", arguments=None, how=tf.function, **options
    ):
        """Builds an optimizer with the wrapper's `options`, and a variable.

        The way "keras2" unscales and then applies, with a loss scale that is made
        outside of the strategy's scope. The `arguments` are for `apply_gradients`, so
        that it does not add the gradients up: all replicas have the same ones then, but
        for the infinities. `how` makes something of the step.
        """
        outside = DynamicLossScale(**SCALE) if way == "keras2" else None
        self.strategy, self.seen = strategy, Seen()
        with strategy.scope():
            self.variable = variable_of(family, [1.0, 2.0])
            loss_scale = outside or DynamicLossScale(**SCALE)
            optimizer = LossScaleOptimizer(momentum(family), loss_scale, **options)
            optimizer.build([self.variable])
        self.optimizer = optimizer

        def each(added):
            number = replica()
            grad = gradient(0 if arguments else number, tf.gather(added, number))
            grads = [grad * optimizer.scale_loss(tf.constant(1.0))]
            if way == "keras2":
                grads = optimizer.get_unscaled_gradients(grads)
            pairs = list(zip(grads, [self.variable]))
            optimizer.apply_gradients(pairs, **(arguments or {}))

        self.step = how(lambda added: strategy.run(each, (added,)))

    def steps(self, run, first=0):
        """Takes the steps of a run from one on, and yields their numbers."""
        parts = self.strategy.num_replicas_in_sync
        for number, (place, special) in enumerate(run[first:], first):
            self.step(tf.constant(at(place, special, parts)))
            self.seen.look(self.strategy, self.optimizer, [self.variable])
            yield number


def loop(strategy, family, run, **arguments):
    """Drives an optimizer in a `Loop`, and returns what is seen."""
    loop = Loop(strategy, family, **arguments)
    assert len(list(loop.steps(run))) == len(run)
    return loop.seen


def loop_on_one(family, run, replicas):
    variable, optimizer = variable_of(family, [1.0, 2.0]), momentum(family)
    total = sum(gradient(number, 0.0) for number in range(replicas))
    return on_one(
        run,
        optimizer,
        [variable],
        lambda _: optimizer.apply_gradients([(total, variable)]),
    )
