"""LossScaleMonitor: shows what the loss scale does during `fit`, and why a run dies.

These files know optimizers. In the order of imports:

* `statistics`: puts back what a bad batch has left in a model;
* `reading`: which optimizers are watched, what is read of one, and in which batches it
  skipped steps, and why;
* `texts`: what is said;
* `diagnosis`: why steps were skipped;
* `watched`: one optimizer, when to warn of it, and with which texts;
* `callback`: the Keras callback.

Begin with `callback`.
"""
