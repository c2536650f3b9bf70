"""LossScaleMonitor: shows what the loss scale does during `fit`, and why a run dies.

These files know optimizers, the calls of layers from `ranges`, and the file that
`simulation` reads. In the order of imports:

* `activations`: which layer's output was the first that was not finite;
* `statistics`: puts back what a bad batch has left in a model;
* `watched`: which optimizers are watched, what is read of each, when and what to warn;
* `callback`: the Keras callback.

Begin with `callback`.
"""
