"""A stand-in for `ray.train.tensorflow`."""

from __future__ import annotations

import json
import os
from unittest import mock


class TensorflowTrainer:
    """Runs a function where TF_CONFIG says which worker it is."""

    def __init__(self, train_loop_per_worker, *, scaling_config):
        del scaling_config  # there is one worker
        self._run = train_loop_per_worker

    def fit(self):
        """Runs it."""
        cluster = {"worker": ["localhost:0"]}  # alone, it opens no port
        task = {"type": "worker", "index": 0}
        config = json.dumps({"cluster": cluster, "task": task})
        with mock.patch.dict(os.environ, {"TF_CONFIG": config}):
            self._run()
