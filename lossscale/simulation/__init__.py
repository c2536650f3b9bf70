"""Replays a loss scale over a run, without a model.

This file knows loss scales, but no optimizer:

* `replay`: the function `simulate`, and the `Simulation` that it returns.
"""
