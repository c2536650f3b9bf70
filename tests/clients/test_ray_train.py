"""Ray Train: two workers, of which one overflows."""

import json

import pytest

pytestmark = pytest.mark.slow


def make_train():
    """Returns what each worker runs: a local function, which Ray sends as it is."""

    def train(config):
        """Trains on one worker, and writes down what it ended with."""
        import json
        from pathlib import Path

        import keras
        import ray.train
        import tensorflow as tf

        from lossscale import DynamicLossScale, LossScaleOptimizer

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variable = keras.Variable([8.0, 8.0])
            inner = keras.optimizers.SGD(1.0)
            optimizer = LossScaleOptimizer(inner, DynamicLossScale(8.0))
            optimizer.build([variable])
        rank = ray.train.get_context().get_world_rank()

        @tf.function
        def step(factor):
            def replica():
                optimizer.scale_loss(tf.constant(1.0))
                grads = [factor * optimizer.loss_scale() * tf.ones([2])]
                optimizer.apply_gradients(zip(grads, [variable]))

            strategy.run(replica)

        for number in range(config["steps"]):
            overflows = number == config["bad_step"] and rank == 1
            step(tf.constant(float("inf") if overflows else 0.5))
        found = {
            "value": variable.numpy().tolist(),
            "skipped": int(optimizer.loss_scale.skipped_steps.numpy()),
            "applied": int(optimizer.iterations.numpy()),
            "workers": strategy.num_replicas_in_sync,
        }
        # Not by ray.train.report: its second version keeps no metrics of a run.
        (Path(config["folder"]) / f"worker{rank}.json").write_text(json.dumps(found))

    return train


def test_two_workers_skip_the_same_step(tmp_path, monkeypatch):
    # Else Ray writes a token into the home folder.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    pytest.importorskip("ray.train.tensorflow")
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        TensorflowTrainer(
            make_train(),
            train_loop_config={"steps": 4, "bad_step": 2, "folder": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()
    finally:
        ray.shutdown()
    expected = {"value": [5.0, 5.0], "skipped": 1, "applied": 3, "workers": 2}
    for rank in (0, 1):
        found = json.loads((tmp_path / f"worker{rank}.json").read_text())
        assert found == expected
