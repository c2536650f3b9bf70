"""Begins a process as a program of TensorFlow 1 does, before anything else is imported.

`LOSSSCALE_WORLD` names the line: "disable_v2_behavior" or "disable_eager_execution".
For pytest: `python -m pytest -p in_world`, with this folder on `PYTHONPATH`.
"""

from __future__ import annotations

import os

import tensorflow as tf

getattr(tf.compat.v1, os.environ["LOSSSCALE_WORLD"])()
