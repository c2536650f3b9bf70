"""Steps on replicas, of which some are not finite, and what one replica makes of them.

All numbers are small powers of two or few bits more, so that every sum is exact in any
order: what two replicas compute must equal what one does to the last bit.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import tensorflow as tf
from models import policy_of, variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer

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


def rule(flags, good=0, scale=SCALE["initial_loss_scale"]):
    """Returns scale, good steps and skipped steps after each step, in plain Python."""
    skipped, seen = 0, []
    for is_finite in flags:
        if is_finite:
            good += 1
            if good >= SCALE["increment_period"]:
                good, scale = 0, scale * 2.0
        else:
            good, skipped, scale = 0, skipped + 1, max(scale / 2.0, 1.0)
        seen.append((scale, good, skipped, is_finite))
    return seen


@contextmanager
def scope_of(strategy):
    """Enters the scope of `strategy`, if there is one."""
    if strategy is None:
        yield
    else:
        with strategy.scope():
            yield


def count(strategy):
    return 1 if strategy is None else strategy.num_replicas_in_sync


def replica():
    """Returns this replica's number, 0 without a strategy."""
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def last_replica_gets(special, ordinary):
    """Returns `special` on the last replica and `ordinary` on the others."""
    context = tf.distribute.get_replica_context()
    last = context.replica_id_in_sync_group == context.num_replicas_in_sync - 1
    return tf.where(last, special, ordinary)


def run_on(strategy, function, *args):
    """Calls `function` on every replica."""
    return function(*args) if strategy is None else strategy.run(function, args)


def copies(strategy, variable):
    """Returns every copy of a TensorFlow or Keras 3 variable."""
    variable = variable if isinstance(variable, tf.Variable) else variable.value
    if strategy is None:
        return [variable.numpy()]
    return [c.numpy() for c in strategy.experimental_local_results(variable)]


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


class Uninterrupted:
    """A run that begins at the beginning and is not looked at."""

    def begin(self, **trackables):
        """Returns the first step to run, given what a checkpoint would hold."""
        del trackables
        return 0

    def after(self, step):
        """Is called after each step."""


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
    strategy,
    family,
    run,
    hook=None,
    data=None,
    communication_dtype=None,
    **compile_arguments,
):
    """Fits a model to a run.

    Args:
      strategy: The strategy, or None.
      family: The Keras.
      run: The steps.
      hook: What is told of the steps.
      data: Called with the first step, returns the dataset. None: arrays.
      communication_dtype: The optimizer's.
      **compile_arguments: For `compile`.

    Returns:
      What is seen after each step: `weights` and slots, `states`, `iterations`.
    """
    hook = hook or Uninterrupted()
    with scope_of(strategy):
        loss_scale = DynamicLossScale(**SCALE)
        optimizer = LossScaleOptimizer(
            momentum(family), loss_scale, communication_dtype=communication_dtype
        )
        model = linear(family, optimizer, "mixed_float16", **compile_arguments)
        optimizer.build(model.trainable_variables)
    seen = SimpleNamespace(weights=[], states=[], iterations=[])
    first = hook.begin(model=model, optimizer=optimizer)

    class Recorder(family.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002 - Keras's names
            trained = [*model.weights, *slots(optimizer.inner_optimizer)]
            seen.weights.append([agreed(strategy, each) for each in trained])
            seen.states.append(state_of(strategy, loss_scale))
            seen.iterations.append(int(optimizer.iterations.numpy()))
            hook.after(first + batch)

    quiet = {"verbose": 0, "shuffle": False, "callbacks": [Recorder()]}
    if data is None:
        model.fit(*rows(run), batch_size=ROWS, **quiet)
    else:
        model.fit(data(first), steps_per_epoch=len(run) - first, **quiet)
    return seen


def slots(optimizer):
    """Returns the variables that an inner optimizer keeps for each weight."""
    found = optimizer.variables
    found = list(found() if callable(found) else found)
    return [variable for variable in found if len(variable.shape)]


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
    aggregate=True,
    hook=None,
    communication_dtype=None,
    **options,
):
    """Drives an optimizer in a custom loop.

    Args:
      strategy: The strategy, or None.
      family: The Keras.
      run: The steps.
      way: "keras2" unscales and then applies, "keras3" applies.
      inside: Whether the loss scale is made inside the strategy's scope.
      aggregate: Whether the optimizer adds the gradients up. If not, all replicas have
        the same ones, but for the infinities.
      hook: What is told of the steps.
      communication_dtype: The optimizer's.
      **options: of `tf.function`; or `eagerly`, without one.

    Returns:
      What is seen after each step: `weights` and slots, `states`, `iterations`.
    """
    hook = hook or Uninterrupted()
    loss_scale = None if inside else DynamicLossScale(**SCALE)
    with scope_of(strategy):
        variable = variable_of(family, [1.0, 2.0])
        loss_scale = loss_scale or DynamicLossScale(**SCALE)
        optimizer = LossScaleOptimizer(
            momentum(family), loss_scale, communication_dtype=communication_dtype
        )
        optimizer.build([variable])
    arguments = {} if aggregate else {"experimental_aggregate_gradients": False}

    def each(added):
        number = replica()
        grad = gradient(number if aggregate else 0, tf.gather(added, number))
        grads = [grad * optimizer.scale_loss(tf.constant(1.0))]
        if way == "keras2":
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(list(zip(grads, [variable])), **arguments)

    def step(added):
        run_on(strategy, each, added)

    if not options.pop("eagerly", False):
        step = tf.function(step, **options)
    seen = SimpleNamespace(weights=[], states=[], iterations=[])
    plain = variable if isinstance(variable, tf.Variable) else variable.value
    first = hook.begin(variable=plain, optimizer=optimizer)
    for number, (place, special) in enumerate(run[first:], first):
        step(tf.constant(at(place, special, count(strategy))))
        trained = [variable, *slots(optimizer.inner_optimizer)]
        seen.weights.append([agreed(strategy, each) for each in trained])
        seen.states.append(state_of(strategy, loss_scale))
        seen.iterations.append(int(optimizer.iterations.numpy()))
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


# `LossScale.update`


def update(strategy, run, context, eagerly=False):
    """Drives a loss scale alone, in "replica" or "cross-replica" context.

    Returns:
      What is seen after each step: `answers` and `states`.
    """
    with scope_of(strategy):
        loss_scale = DynamicLossScale(**SCALE)

    def grads(added):
        return [gradient(replica(), tf.gather(added, replica())), None]

    def step(added):
        if context == "replica":
            return run_on(strategy, lambda a: loss_scale.update(grads(a))[1], added)
        per_replica = run_on(strategy, grads, added)
        with scope_of(strategy):
            return loss_scale.update(per_replica)[1]

    step = step if eagerly else tf.function(step)
    seen = SimpleNamespace(answers=[], states=[])
    for place, special in run:
        answer = step(tf.constant(at(place, special, count(strategy))))
        local = (
            [answer]
            if strategy is None
            else strategy.experimental_local_results(answer)
        )
        seen.answers.append({bool(one) for one in local})
        seen.states.append(state_of(strategy, loss_scale))
    return seen
