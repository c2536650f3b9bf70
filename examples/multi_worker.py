"""Trains handwritten digits on two workers, each of which overflows once.

    python examples/multi_worker.py

starts two processes on this machine that train in step. In step 5 the first worker's
gradients overflow, in step 9 the second one's. Both workers skip both steps, and end
with equal weights.

On a real cluster, start the same script on every machine with that machine's
TF_CONFIG. Then it is one worker, and starts no other process.
"""

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import lossscale

keras = tf.keras

WORKERS = 2
STEPS = 200
BATCH_SIZE = 64  # of all workers together
SEED = 1
#: Which worker overflows in which step.
OVERFLOWS = {5: 0, 9: 1}


def load():
    """Returns training and test images, training and test labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 64)
    return train_test_split(images, labels, random_state=SEED, stratify=labels)


def make_model():
    """Returns a network in float16, with the same initial weights on every worker."""
    keras.utils.set_random_seed(SEED)
    keras.mixed_precision.set_global_policy("mixed_float16")
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, dtype="float32"),  # the logits in float32
        ]
    )


def make_dataset(strategy, images, labels, steps):
    """Returns each replica's part of each batch, with the planned overflows."""
    rng = np.random.default_rng(SEED)  # the same order on every worker
    order = [rng.permutation(len(images))[:BATCH_SIZE] for _ in range(steps)]

    def dataset_of_worker(context):
        worker = context.input_pipeline_id
        share = BATCH_SIZE // context.num_input_pipelines
        mine = [batch[worker * share : (worker + 1) * share] for batch in order]
        factors = [1e6 if OVERFLOWS.get(step) == worker else 1 for step in range(steps)]
        rows = np.concatenate(mine)
        factors = np.repeat(np.float32(factors), share)[:, None]
        # 1e6 is more than float16 can hold.
        dataset = tf.data.Dataset.from_tensor_slices(
            (images[rows] * factors, labels[rows])
        )
        of_replica = context.get_per_replica_batch_size(BATCH_SIZE)
        return dataset.batch(of_replica, drop_remainder=True)

    return strategy.distribute_datasets_from_function(dataset_of_worker)


def make_train_step(strategy, model, optimizer):
    """Returns a function that trains one step on every worker."""

    def step_of_one_replica(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            # The gradients are added up over the workers: divide by the whole batch.
            loss = tf.reduce_sum(losses) / BATCH_SIZE
            scaled_loss = optimizer.scale_loss(loss)
        weights = model.trainable_variables
        tensors = [weight if is_tensor(weight) else weight.value for weight in weights]
        grads = tape.gradient(scaled_loss, tensors)
        optimizer.apply_gradients(zip(grads, weights))

    return tf.function(
        lambda images, labels: strategy.run(step_of_one_replica, (images, labels))
    )


def is_tensor(weight):
    """Tells whether a weight is TensorFlow's variable, not Keras 3's that holds one."""
    return isinstance(weight, tf.Variable)


def work(steps, communication_dtype):
    """Trains as one of the workers that TF_CONFIG lists, and prints the results."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    train_images, test_images, train_labels, test_labels = load()
    with strategy.scope():
        model = make_model()
        loss_scale = lossscale.DynamicLossScale(2.0**10, increment_period=50)
        optimizer = lossscale.LossScaleOptimizer(
            keras.optimizers.Adam(3e-3),
            loss_scale,
            communication_dtype=communication_dtype,
        )
        optimizer.build(model.trainable_variables)
    train_step = make_train_step(strategy, model, optimizer)
    data = iter(make_dataset(strategy, train_images, train_labels, steps))
    for step in range(steps):
        train_step(*next(data))
        if not loss_scale.last_step_finite.numpy():
            scale = loss_scale.numpy()
            print(f"step {step} is skipped, the loss scale is {scale:g}", flush=True)
    weights = [np.array(weight) for weight in model.get_weights()]
    digest = hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()
    predicted = np.argmax(predict(weights, test_images), axis=1)
    print(f"accuracy: {np.mean(predicted == test_labels):.1%}")
    print(f"skipped: {loss_scale.skipped_steps.numpy()}")
    print(f"weights: {digest[:16]}", flush=True)


def predict(weights, images):
    """Returns the logits of the network, in float32."""
    kernel, bias, last_kernel, last_bias = weights
    return np.maximum(images @ kernel + bias, 0) @ last_kernel + last_bias


def begin(command, workers=WORKERS):
    """Starts a command as each of several workers on this machine, and watches them."""
    listeners = [socket.create_server(("localhost", 0)) for _ in range(workers)]
    addresses = [f"localhost:{each.getsockname()[1]}" for each in listeners]
    for each in listeners:
        each.close()  # its port is free, and the worker's now
    processes = []
    for index in range(workers):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": addresses}, "task": task})
        processes.append(
            subprocess.Popen(  # noqa: S603 - this very script, or a benchmark
                command,
                env={**os.environ, "TF_CONFIG": config},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    end_all_if_one_fails(processes)
    return processes


def start_workers(arguments):
    """Runs two workers on this machine and compares their weights at the end."""
    processes = begin([sys.executable, __file__, *arguments])
    ends = []
    for index, process in enumerate(processes):
        lines = process.communicate()[0].splitlines()
        print("".join(f"worker {index}: {line}\n" for line in lines), end="")
        ends.append(lines[-1:])
    if any(process.returncode for process in processes):
        sys.exit("a worker failed")
    are_equal = all(end == ends[0] for end in ends)
    print(f"Both workers end with equal weights: {are_equal}")
    sys.exit(not are_equal)


def end_all_if_one_fails(processes):
    """Ends all workers if one fails: the others would wait for it for ever."""

    def watch(process):
        if process.wait() != 0:
            for other in processes:
                other.kill()

    for process in processes:
        threading.Thread(target=watch, args=(process,), daemon=True).start()


def main():
    """Runs one worker if TF_CONFIG is set, else starts two."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="how long to train")
    parser.add_argument(
        "--communication-dtype",
        choices=("float16", "bfloat16"),
        help="what the gradients cross in; as they are if not given",
    )
    given = parser.parse_args()
    if "TF_CONFIG" in os.environ:
        work(given.steps, given.communication_dtype)
    else:
        start_workers(sys.argv[1:])


if __name__ == "__main__":
    main()
