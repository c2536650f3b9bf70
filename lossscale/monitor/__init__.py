"""LossScaleMonitor: shows what the loss scale does during `fit`, and why a run dies.

These files know optimizers. In the order of imports:

* `model`: what can be looked at in a model, and in the data that `fit` was given;
* `statistics`: puts back what a bad batch has left in a model;
* `reading`: what one look at the device gives of an optimizer;
* `batches`: in which batches of an epoch steps were skipped;
* `watched`: what is remembered between looks, of an optimizer and of a training;
* `asking`: what a finding is, and when and how often it may be said;
* `causes`: why steps are skipped again and again;
* `findings`: all that is said, and the table of it;
* `callback`: the Keras callback.

Begin with `findings`: its table, at the end, says what a monitor may say, and when.
"""
