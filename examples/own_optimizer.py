"""Trains with an optimizer of no framework: SGD, written by hand, on two replicas.

    python examples/own_optimizer.py

A `LossScaleEngine` scales the loss, and calls the optimizer for each step that did not
overflow. In step 3 the last replica's batch is too large for float16: both replicas
skip that step. Then the same optimizer trains on one device, compiled by XLA.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import lossscale

STEPS = 40


class SGD:
    """The whole framework."""

    def __init__(self, learning_rate):
        self.learning_rate = learning_rate

    def apply(self, grads, variables):
        """Changes variables. Called on each replica, with its true gradients."""
        replicas = tf.distribute.get_replica_context()
        for grad, variable in zip(replicas.all_reduce("SUM", grads), variables):
            variable.assign_sub(self.learning_rate * grad)


def train(strategy, jit_compile):
    """Returns the trained weights and the engine."""
    with strategy.scope():
        engine = lossscale.LossScaleEngine(lossscale.DynamicLossScale(2.0**10))
        # Every replica computes the same new value.
        same = tf.VariableAggregation.ONLY_FIRST_REPLICA
        weights = tf.Variable(tf.zeros([3, 1]), aggregation=same)
    optimizer = SGD(0.5 / strategy.num_replicas_in_sync)

    @tf.function(jit_compile=jit_compile)
    def step(x, y):
        with tf.GradientTape() as tape:
            predicted = tf.matmul(tf.cast(x, tf.float16), tf.cast(weights, tf.float16))
            loss = tf.reduce_mean(tf.square(tf.cast(predicted, tf.float32) - y))
            scaled_loss = engine.scale_loss(loss)
        grads = tape.gradient(scaled_loss, [weights])
        engine.apply(grads, [weights], optimizer.apply)

    @tf.function
    def step_of_all(x, y):
        strategy.run(step, (x, y))

    for number, batches in enumerate(make_batches(strategy.num_replicas_in_sync)):
        step_of_all(
            *map(strategy.experimental_distribute_values_from_function, batches)
        )
        if not engine.loss_scale.last_step_finite.numpy():
            now = int(engine.loss_scale)
            print(f"step {number} is skipped on every replica, the loss scale is {now}")
    return weights.numpy().ravel(), engine


def make_batches(replicas):
    """Yields functions that return each replica's inputs and targets."""
    rng, true_weights = np.random.default_rng(1), np.float32([[1.0], [-2.0], [3.0]])
    for number in range(STEPS):
        x = rng.normal(size=[replicas, 32, 3]).astype(np.float32)
        y = x @ true_weights
        if number == 3:
            x[-1] *= 1e6  # float16 ends at 65504

        def inputs(context, x=x):
            return tf.constant(x[context.replica_id_in_sync_group])

        def targets(context, y=y):
            return tf.constant(y[context.replica_id_in_sync_group])

        yield inputs, targets


def main():
    """Trains on two replicas, then compiled."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for name, strategy, jit_compile in (
        ("two replicas", two, False),
        ("XLA", tf.distribute.get_strategy(), True),
    ):
        weights, engine = train(strategy, jit_compile)
        applied = engine.applied_steps.numpy()
        print(f"{name}: {applied} of {STEPS} steps applied, weights {weights.round(2)}")


if __name__ == "__main__":
    main()
