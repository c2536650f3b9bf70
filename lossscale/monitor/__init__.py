"""LossScaleMonitor: what the loss scale does during `fit`, and why a run dies.

Knows optimizers, and the file that `simulation` reads. In the order of its imports:

* `stalls`: when skipped steps are worth a word;
* `underflow`: when a loss scale is far too low;
* `diagnosis`: what to say of them;
* `beforehand`: what to say before training begins;
* `watched`: which optimizers are watched, and what was read of each;
* `callback`: the callback of Keras.

Begin with `callback`.
"""
