"""Steps on replicas, of which some are not finite, and what one replica makes of them.

All numbers are small powers of two or few bits more, so that every sum is exact in any
order: what two replicas compute must equal what one does to the last bit.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import tensorflow as tf
from models import assert_same, inner_variables, policy_of, variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime import keras_versions

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
    """Returns which of `parts` are `special` in a step, the others being 0.

    Returns:
      A `float32` array of shape `[parts]`, to be added.
    """
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


def count(strategy):
    return 1 if strategy is None else strategy.num_replicas_in_sync


def replica():
    """Returns this replica's number, 0 without a strategy."""
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def last_replica_gets(special, ordinary):
    """Returns `special` on the last replica and `ordinary` on the others."""
    context = tf.distribute.get_replica_context()
    last = context.num_replicas_in_sync - 1
    # In a session `==` would compare objects.
    is_last = tf.equal(context.replica_id_in_sync_group, last)
    return tf.where(is_last, special, ordinary)


def run_on(strategy, function, *args):
    """Calls `function` on every replica."""
    return function(*args) if strategy is None else strategy.run(function, args)


def copies(strategy, variable):
    """Returns every copy of a TensorFlow or Keras 3 variable."""
    variable = keras_versions.tensor_of(variable)
    if strategy is None:
        return [variable.numpy()]
    return [copy.numpy() for copy in strategy.experimental_local_results(variable)]


def agreed(strategy, variable):
    """Returns a variable's value. All its copies must have it, to the last bit."""
    first, *others = copies(strategy, variable)
    for other in others:
        np.testing.assert_array_equal(first, other)
    return first


def assert_bit_equal(strategy, variables):
    for variable in variables:
        agreed(strategy, variable)


def state_of(strategy, loss_scale):
    """Returns what `rule` returns for a step."""
    return tuple(
        agreed(strategy, variable).item()
        for variable in (
            loss_scale.current_loss_scale,
            loss_scale.good_steps,
            loss_scale.skipped_steps,
            loss_scale.last_step_finite,
        )
    )


def momentum(family):
    """Returns an optimizer with a slot that is exact in powers of two."""
    return family.optimizers.SGD(0.25, momentum=0.5)


class Seen:
    """What is seen after each step: `weights` and slots, `states`, `iterations`."""

    def __init__(self):
        self.weights, self.states, self.iterations = [], [], []

    def look(self, strategy, optimizer, weights):
        trained = [*weights, *slots(optimizer)]
        self.weights.append([agreed(strategy, each) for each in trained])
        self.states.append(state_of(strategy, optimizer.loss_scale))
        self.iterations.append(int(optimizer.iterations.numpy()))


def assert_right(seen, run, weights):
    """Checks that all of a run is as by the rule, with these weights and slots."""
    assert seen.states == rule(applied(run))
    assert seen.iterations == list(np.cumsum(applied(run)))
    assert len(seen.weights) == len(run)
    for ours, theirs in zip(seen.weights, weights):
        assert_same(ours, theirs)


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


def fit(
    strategy, family, run, data=None, communication_dtype=None, **compile_arguments
):
    """Fits a model to a run, or to a dataset that has one, and returns what is seen."""
    with scope_of(strategy):
        optimizer = LossScaleOptimizer(
            momentum(family),
            DynamicLossScale(**SCALE),
            communication_dtype=communication_dtype,
        )
        model = linear(family, optimizer, "mixed_float16", **compile_arguments)
        optimizer.build(model.trainable_variables)
    seen = Seen()

    class Recorder(family.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002 - Keras's names
            seen.look(strategy, optimizer, model.weights)

    quiet = {"verbose": 0, "shuffle": False, "callbacks": [Recorder()]}
    if data is None:
        model.fit(*rows(run), batch_size=ROWS, **quiet)
    else:
        model.fit(data, steps_per_epoch=len(run), **quiet)
    return seen


def slots(optimizer):
    """Returns the variables that an optimizer keeps for each weight."""
    return [variable for variable in inner_variables(optimizer) if len(variable.shape)]


def fit_on_one(family, run):
    """Returns what a bare float32 run comes to that has none of the bad steps."""
    optimizer = momentum(family)
    model = linear(family, optimizer, "float32")
    x, y = rows(run)
    seen = []
    for step, is_finite in enumerate(applied(run)):
        if is_finite:
            part = slice(step * ROWS, (step + 1) * ROWS)
            model.train_on_batch(x[part], y[part])
        trained = [*model.weights, *slots(optimizer)]
        seen.append([each.numpy() for each in trained])
    return seen


# `strategy.run`


def gradient(number, added):
    """Returns a gradient for replica `number`, of which one element is special."""
    share = tf.cast(number + 1, tf.float32)
    return tf.stack([share * 0.5 + added, share * -0.25])


def loop(
    strategy,
    family,
    run,
    way="keras3",
    inside=True,
    arguments=None,
    hook=None,
    communication_dtype=None,
    eagerly=False,
    **options,
):
    """Drives an optimizer in a custom loop, and returns what is seen.

    Args:
      strategy: The strategy, or None.
      family: The Keras.
      run: The steps.
      way: "keras2" unscales and then applies, "keras3" applies.
      inside: Whether the loss scale is made inside the strategy's scope.
      arguments: For `apply_gradients`, so that it does not add the gradients up: all
        replicas have the same ones then, but for the infinities.
      hook: Told of the beginning, where it returns the first step, and of each step.
      communication_dtype: The optimizer's.
      eagerly: Whether the step is no `tf.function`.
      **options: of `tf.function`.
    """
    loss_scale = None if inside else DynamicLossScale(**SCALE)
    with scope_of(strategy):
        variable = variable_of(family, [1.0, 2.0])
        loss_scale = loss_scale or DynamicLossScale(**SCALE)
        optimizer = LossScaleOptimizer(
            momentum(family), loss_scale, communication_dtype=communication_dtype
        )
        optimizer.build([variable])

    def each(added):
        number = replica()
        grad = gradient(0 if arguments else number, tf.gather(added, number))
        grads = [grad * optimizer.scale_loss(tf.constant(1.0))]
        if way == "keras2":
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(list(zip(grads, [variable])), **(arguments or {}))

    def step(added):
        run_on(strategy, each, added)

    step = step if eagerly else tf.function(step, **options)
    first = 0
    if hook:
        first = hook.begin(
            variable=keras_versions.tensor_of(variable), optimizer=optimizer
        )
    seen = Seen()
    for number, (place, special) in enumerate(run[first:], first):
        step(tf.constant(at(place, special, count(strategy))))
        seen.look(strategy, optimizer, [variable])
        if hook:
            hook.after(number)
    return seen


def loop_on_one(family, run, replicas):
    """Returns what a bare optimizer comes to that is given none of the bad steps."""
    variable = variable_of(family, [1.0, 2.0])
    optimizer = momentum(family)
    total = sum(gradient(number, 0.0) for number in range(replicas))
    seen = []
    for is_finite in applied(run):
        if is_finite:
            optimizer.apply_gradients([(total, variable)])
        trained = [variable, *slots(optimizer)]
        seen.append([each.numpy() for each in trained])
    return seen
