"""Replays a loss scale over a run, without a model.

These files know loss scales, but no optimizer. In the order of imports:

* `picture`: draws the loss scale over the steps, and the lost steps;
* `run_file`: the steps of a run on disk;
* `result`: what a loss scale did over a run, in arrays, figures and a picture;
* `replay`: the function `simulate` itself.

Begin with `replay`.
"""
