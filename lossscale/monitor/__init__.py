"""LossScaleMonitor: shows what the loss scale does during `fit`, and why a run dies.

These files know optimizers. In the order of imports:

* `statistics`: puts back what a bad batch has left in a model;
* `skips`: which steps an optimizer skipped, and why;
* `reading`: what is read of an optimizer, and in which batches it skipped steps;
* `optimizers`: which optimizers are watched;
* `texts`: what is said;
* `diagnosis`: why steps were skipped;
* `watched`: one optimizer, when to warn of it, and with which texts;
* `callback`: the Keras callback.

Begin with `callback`.
"""
