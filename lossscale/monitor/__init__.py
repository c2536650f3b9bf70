"""LossScaleMonitor: shows what the loss scale does during `fit`, and why a run dies.

Begin with `findings`: its table, at the end, says what a monitor may say, and when. In
the order of imports:

* `batches`: in which batches steps were skipped;
* `reading`: what one look at an optimizer gives;
* `model`: what can be looked at in a model and its data;
* `statistics`: puts back what a bad batch leaves in a model;
* `watched`: what is remembered between looks;
* `asking`: what a finding is, and how often it is told;
* `causes`: why steps are skipped again and again;
* `findings`: all that a monitor says;
* `callback`: the Keras callback.
"""
