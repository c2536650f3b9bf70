"""A coordinator with two workers and a parameter server, all in this process.

    python parameter_server.py

Prints what came of each case, as JSON: `"right"` if the weights are those that float64
arithmetic in one process comes to, and the loss scale is as by the rule, or what was
raised. test_processes.py starts it.
"""

import json
import os
from functools import partial

import installed
import numpy as np
import strategies
import tensorflow as tf
from exact import clip
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


def gradient(ours, x, wait=list, loss=None):
    """Returns scaled gradients. In `wait` another worker may move the loss scale."""
    with tf.GradientTape() as tape:
        scaled = ours.scale(loss() if loss else tf.reduce_sum(ours.weight * x))
    return wait(tape.gradient(scaled, [ours.weight]))


def unscaled(ours, x, wait=list):
    return ours.unscale(gradient(ours, x, wait))


def unscale_apply(ours, x, wait):
    ours.apply(unscaled(ours, x, wait))


def sparse(ours, x, wait):
    with tf.GradientTape() as tape:
        scaled = ours.scale(tf.reduce_sum(tf.gather(ours.weight, [0, 1]) * x))
    ours.apply(wait([tf.convert_to_tensor(tape.gradient(scaled, ours.weight))]))


def two_losses(ours, x, wait):
    with tf.GradientTape() as tape:
        losses = [tf.reduce_sum(ours.weight * x) / 2.0 for _ in range(2)]
        scaled = wait([ours.scale(losses[0])])[0] + ours.scale(losses[1])
    ours.apply(tape.gradient(scaled, [ours.weight]))


def run(function):
    """Runs a function, of whose trace nothing is known outside."""
    return tf.function(function, autograph=False)()


def loop(function):
    """Returns what a loop of one turn returns, a gradient."""
    turn = lambda i, _: [i + 1, *function()]  # noqa: E731
    return tf.while_loop(lambda i, _: i < 1, turn, [0, tf.zeros([2])])[1:]


def branch(ours, function):
    """Returns what a branch returns, a gradient."""
    is_so = tf.reduce_sum(ours.weight) > -1e9
    return [tf.cond(is_so, lambda: function()[0], lambda: tf.zeros([2]))]


def then(*_):
    """Returns a gradient, for what changes variables in a loop or in a branch."""
    return [tf.zeros([2])]


def apply_in_a_branch(ours, grads):
    branch(ours, lambda: then(ours.apply(grads)))


def apply_in_a_function(ours, grads):
    run(lambda: ours.apply(grads))


#: The programs: what a worker runs. `x` is the true gradient. That a variable hides
#: where it comes from is in test_pending.py.
RIGHT = {
    "scale, apply": lambda o, x, w: o.apply(gradient(o, x, w)),
    "scale, unscale, apply": unscale_apply,
    "scale, unscale, wait, apply": lambda o, x, w: o.apply(w(unscaled(o, x))),
    "clip": lambda o, x, w: o.apply(clip(unscaled(o, x, w))),
    "clip in a function": lambda o, x, w: o.apply(
        [tf.function(lambda g: clip([g])[0])(g) for g in unscaled(o, x, w)]
    ),
    "loss in a function": lambda o, x, w: o.apply(
        gradient(o, x, w, tf.function(lambda: tf.reduce_sum(o.weight * x)))
    ),
    "sparse": sparse,
    "all in a function": lambda o, x, w: run(lambda: unscale_apply(o, x, w)),
    "all in a loop": lambda o, x, w: loop(lambda: then(unscale_apply(o, x, w))),
    "all in a branch": lambda o, x, w: branch(o, lambda: then(unscale_apply(o, x, w))),
    "apply in a branch": lambda o, x, w: apply_in_a_branch(o, gradient(o, x, w)),
}
REFUSED = {
    "from a function": lambda o, x, w: o.apply(w(run(lambda: gradient(o, x)))),
    "unscaled in a function": lambda o, x, w: o.apply(w(run(lambda: unscaled(o, x)))),
    "from a loop": lambda o, x, w: o.apply(w(loop(lambda: gradient(o, x)))),
    "from a branch": lambda o, x, w: o.apply(w(branch(o, lambda: gradient(o, x)))),
    "arguments": lambda o, x, w: (o.scale(x), o.apply(w([x * 64.0]))),
    "two losses": two_losses,
    "apply in a function": lambda o, x, w: apply_in_a_function(o, gradient(o, x, w)),
}
GOOD, BAD = [2.0, 0.5], [INF, 0.5]
#: What happens: the true gradients of each step. `moves`: another worker halves the
#: loss scale in the first one.
HAPPENS = {
    "one at a time": {"steps": [GOOD, BAD, [-1.0, 4.0], GOOD]},
    "at once": {"steps": [GOOD, [0.5, -4.0], BAD, GOOD], "at_once": True},
    "the scale moves": {"steps": [GOOD, [0.25, 8.0]], "moves": True},
    "the scale moves, overflow": {"steps": [BAD, GOOD], "moves": True},
}


def case(coordinator, family, make, name, steps, at_once=False, moves=False):
    """Runs a program on the workers, and says what came of it."""
    with coordinator.strategy.scope():
        scale = DynamicLossScale(**strategies.SCALE)
        ours, turn = make(scale, family), tf.Variable(0.0)
    program = {**RIGHT, **REFUSED}[name]

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
        weights, low = np.float64(START), 1.0 if "clip" in name else INF
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
        except (ValueError, RuntimeError) as error:
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
        for name in (*RIGHT, *REFUSED):
            for what, happens in HAPPENS.items():
                answer = case(coordinator, family, make, name, **happens)
                told[f"{kind}: {name}: {what}"] = answer
    print(json.dumps(told), flush=True)
    os._exit(0)  # the servers never end


if __name__ == "__main__":
    main()
