"""A coordinator with two workers and a parameter server, all in this process.

    python parameter_server.py

Prints what came of each case, as JSON: `"right"` if the weights are those that float64
arithmetic in one process comes to, and the loss scale is as by the rule, or what was
raised. test_processes.py starts it.
"""

from __future__ import annotations

import json
import os
from functools import partial

import installed
import numpy as np
import strategies
import tensorflow as tf
from processes import free_ports
from trained import RATE, START, ByEngine, ByKeras

from lossscale import DynamicLossScale, LossScaleOptimizer

INF = float("inf")


def cluster():
    """Starts the servers, and returns the strategy over them."""
    jobs = ["worker", "worker", "ps"]
    addresses = [f"localhost:{port}" for port in free_ports(len(jobs))]
    spec = tf.train.ClusterSpec({"worker": addresses[:2], "ps": addresses[2:]})
    # On two cores the servers have too few threads to wait for each other, and hang.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=len(jobs) + 1)
    for job, index in (("worker", 0), ("worker", 1), ("ps", 0)):
        tf.distribute.Server(spec, job, index, protocol="grpc", config=config)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, rpc_layer="grpc"
    )
    return tf.distribute.experimental.ParameterServerStrategy(resolver)


# The programs: what a worker runs. `x` is the true gradient. After `wait` another
# worker may have changed the loss scale.


def gradient(ours, x, wait, loss=None):
    with tf.GradientTape() as tape:
        scaled = ours.scale(loss() if loss else tf.reduce_sum(ours.weight * x))
    return wait(tape.gradient(scaled, [ours.weight]))


def scale_apply(ours, x, wait):
    ours.apply(gradient(ours, x, wait))


def scale_unscale_apply(ours, x, wait):
    ours.apply(ours.unscale(gradient(ours, x, wait)))


def unscale_wait_apply(ours, x, wait):
    ours.apply(wait(ours.unscale(gradient(ours, x, list))))


def clip(ours, x, wait):
    grads = ours.unscale(gradient(ours, x, wait))
    ours.apply([tf.clip_by_value(grad, -1.0, 1.0) for grad in grads])


def loss_in_a_function(ours, x, wait):
    loss = tf.function(lambda: tf.reduce_sum(ours.weight * x))
    ours.apply(gradient(ours, x, wait, loss))


def clip_in_a_function(ours, x, wait):
    limit = tf.function(lambda grad: tf.clip_by_value(grad, -1.0, 1.0))
    ours.apply(list(map(limit, ours.unscale(gradient(ours, x, wait)))))


def sparse(ours, x, wait):
    with tf.GradientTape() as tape:
        rows = tf.gather(ours.weight, [0, 1])
        scaled = ours.scale(tf.reduce_sum(rows * x))
    ours.apply(wait([tf.convert_to_tensor(tape.gradient(scaled, ours.weight))]))


def all_in_a_function(ours, x, wait):
    tf.function(partial(scale_unscale_apply, ours, x, wait))()


def all_in_a_branch(ours, x, wait):
    def step():
        scale_apply(ours, x, wait)
        return 0

    tf.cond(tf.reduce_sum(ours.weight) > -1e9, step, lambda: 0)


def all_in_a_loop(ours, x, wait):
    def turn(i):
        scale_unscale_apply(ours, x, wait)
        return [i + 1]

    tf.while_loop(lambda i: i < 1, turn, [0])


def apply_in_a_branch(ours, x, wait):
    grads = gradient(ours, x, wait)

    def apply():
        ours.apply(grads)
        return 0

    tf.cond(tf.reduce_sum(ours.weight) > -1e9, apply, lambda: 0)


def apply_in_a_function(ours, x, wait):
    grads = gradient(ours, x, wait)
    tf.function(lambda: ours.apply(grads))()


def clipped_applied_in_a_function(ours, x, wait):
    grads = ours.unscale(gradient(ours, x, wait))
    grads = [tf.clip_by_value(grad, -1.0, 1.0) for grad in grads]
    tf.function(lambda: ours.apply(grads))()


def gradients_from_a_function(ours, x, wait):
    ours.apply(wait(tf.function(lambda: gradient(ours, x, list))()))


def unscaled_in_a_function(ours, x, wait):
    ours.apply(wait(tf.function(lambda: ours.unscale(gradient(ours, x, list)))()))


def from_a_function_unscaled_outside(ours, x, wait):
    grads = wait(tf.function(lambda: gradient(ours, x, list))())
    ours.apply(ours.unscale(grads))


def gradients_from_a_loop(ours, x, wait):
    def turn(i, _):
        return [i + 1, *gradient(ours, x, list)]

    _, grad = tf.while_loop(lambda i, _: i < 1, turn, [0, tf.zeros([2])])
    ours.apply(wait([grad]))


def gradients_from_a_branch(ours, x, wait):
    is_true = tf.reduce_sum(ours.weight) > -1e9
    ours.apply(wait([tf.cond(is_true, lambda: gradient(ours, x, list)[0], lambda: x)]))


def gradients_as_arguments(ours, x, wait):
    ours.apply(wait([x * 64.0]))


def through_a_variable(ours, x, wait):
    with tf.init_scope():
        kept = tf.Variable([0.0, 0.0])
    kept.assign(ours.unscale(gradient(ours, x, list))[0])
    ours.apply(wait([kept.read_value()]))


def two_losses(ours, x, wait):
    with tf.GradientTape() as tape:
        first = wait([ours.scale(tf.reduce_sum(ours.weight * x) / 2.0)])
        scaled = first[0] + ours.scale(tf.reduce_sum(ours.weight * x) / 2.0)
    ours.apply(tape.gradient(scaled, [ours.weight]))


RIGHT = (
    *(scale_apply, scale_unscale_apply, unscale_wait_apply, clip, loss_in_a_function),
    *(clip_in_a_function, sparse, all_in_a_function, all_in_a_branch, all_in_a_loop),
    apply_in_a_branch,
)
REFUSED = (
    *(gradients_from_a_function, unscaled_in_a_function, gradients_from_a_loop),
    *(from_a_function_unscaled_outside, gradients_from_a_branch, two_losses),
    *(gradients_as_arguments, through_a_variable, apply_in_a_function),
    clipped_applied_in_a_function,
)
GOOD, BAD = [2.0, 0.5], [INF, 0.5]
#: What happens: the true gradients of each step. `moves`: another worker halves the
#: loss scale in the first one.
HAPPENS = {
    "one at a time": {"steps": [GOOD, BAD, [-1.0, 4.0], GOOD]},
    "at once": {"steps": [GOOD, [0.5, -4.0], BAD, GOOD], "at_once": True},
    "the scale moves": {"steps": [GOOD, [0.25, 8.0]], "moves": True},
    "the scale moves, overflow": {"steps": [BAD, GOOD], "moves": True},
}


def case(coordinator, family, make, program, steps, at_once=False, moves=False):
    """Runs a program on the workers, and says what came of it."""
    with coordinator.strategy.scope():
        scale = DynamicLossScale(**strategies.SCALE)
        ours, turn = make(scale, family), tf.Variable(0.0)

    def reached(number):
        """Waits until the other worker has set `turn`."""
        is_waiting = lambda _: turn.read_value() < number  # noqa: E731
        return tf.while_loop(is_waiting, lambda i: [i + 1], [0], parallel_iterations=1)

    def wait(tensors):
        with tf.control_dependencies(tensors):
            told = turn.assign_add(1.0, read_value=False)
        with tf.control_dependencies([told]), tf.control_dependencies(reached(2.0)):
            return [tf.identity(tensor) for tensor in tensors]

    def step(x, waits):
        each = lambda x: program(ours, x, wait if waits else list)  # noqa: E731
        coordinator.strategy.run(each, (x,))

    def move():
        now = scale.current_loss_scale
        with tf.control_dependencies(reached(1.0)):
            halved = now.assign(now / 2.0, read_value=False)
        with tf.control_dependencies([halved]):
            turn.assign_add(1.0)

    def expected():
        weights, low = np.float64(START), 1.0 if "clip" in program.__name__ else INF
        for x in np.float64(steps):
            if np.isfinite(x).all():
                weights = weights - RATE * np.clip(x, -low, low)
        return weights

    for number, x in enumerate(steps):
        waits = moves and number == 0
        one = tf.function(partial(step, waits=waits), autograph=False)
        try:
            # Traced here first: what is refused must leave nobody waiting.
            with coordinator.strategy.scope():
                one.get_concrete_function(tf.constant(x))
        except ValueError as error:
            assert not np.any(ours.weight.numpy() != START)
            return str(error)
        if waits:
            coordinator.schedule(tf.function(move, autograph=False))
        coordinator.schedule(one, (tf.constant(x),))
        if not at_once:
            coordinator.join()
    coordinator.join()
    is_good = [bool(np.isfinite(x).all()) for x in steps]
    weights, (found, *counts) = ours.state()
    if not (weights == expected()).all():
        return f"weights {weights} for {expected()}"
    state, _, skipped, _ = strategies.rule(is_good)[-1]
    # Workers that adjust it at one moment may lose one of two adjustments.
    allowed = [state, state / 2.0] if moves else [state]
    if at_once:
        is_right = 16.0 <= found <= 256.0
    else:
        is_right = found in allowed and counts == [skipped, sum(is_good)]
    return "right" if is_right else f"state {found, counts} for {state, skipped}"


def fit(strategy, family, wraps):
    """Returns what `fit` says, which fails."""
    inner = strategies.momentum(family)
    data = tf.data.Dataset.from_tensor_slices(strategies.rows(strategies.RUN[:1]))
    try:
        with strategy.scope():
            if wraps:
                inner = LossScaleOptimizer(inner)
            elif family.name != "keras3":  # whose bare optimizer fails, too
                inner = family.keras.mixed_precision.LossScaleOptimizer(inner)
            model = strategies.linear(family, inner, "float32")
        data = data.batch(strategies.ROWS).repeat()
        model.fit(data, steps_per_epoch=1, verbose=0)
    except Exception as error:
        return str(error)
    return "trained"


def main():
    strategy, told, kinds = cluster(), {}, {"engine": (ByEngine, None)}
    coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
    for family in installed.families():
        for wraps in (True, False):
            name = "ours" if wraps else "Keras's"
            told[f"fit, {family.name}, {name}"] = fit(strategy, family, wraps)
        if family.name == "keras3":  # Keras 2 refuses the strategy
            kinds[family.name] = ByKeras, family
    for kind, (make, family) in kinds.items():
        for program in (*RIGHT, *REFUSED):
            for what, happens in HAPPENS.items():
                args = coordinator, family, make, program
                answer = case(*args, **happens)
                told[f"{kind}, {program.__name__}, {what}"] = answer
    print(json.dumps(told), flush=True)
    os._exit(0)  # the servers never end


if __name__ == "__main__":
    main()
