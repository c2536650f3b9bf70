"""A loss scale over a run, without a model.

Knows loss scales, no optimizer. In the order of its imports:

* `picture`: the loss scale over the steps, and those that were lost;
* `run_file`: a run's steps on disk;
* `result`: what a loss scale did over a run, in arrays, figures and a picture;
* `replay`: `simulate` itself.

Begin with `replay`.
"""
