"""Replays a loss scale over a run, without a model.

These files know loss scales, but no optimizer. In the order of imports:

* `run_file`: the steps of a run on disk, and their picture;
* `replay`: the function `simulate`, and the `Simulation` that it returns.

Begin with `replay`.
"""
