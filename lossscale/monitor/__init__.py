"""LossScaleMonitor: shows what the loss scale does during `fit`, and why a run dies.

These files know optimizers. In the order of imports:

* `statistics`: puts back what a bad batch has left in a model;
* `skips`: which steps an optimizer skipped, and why;
* `watched`: which optimizers are watched, what is read of each, when and what to warn;
* `callback`: the Keras callback.

Begin with `callback`.
"""
