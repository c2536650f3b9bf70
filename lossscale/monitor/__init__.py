"""LossScaleMonitor: what the loss scale does during `fit`, and why a run dies.

Knows optimizers, the calls of layers from `ranges`, and the file that `simulation`
reads. In the order of its imports:

* `stalls`: when skipped steps are worth a word;
* `underflow`: when a loss scale is far too low;
* `layer_outputs`: how large what each layer returns is, on the device;
* `activations`: which layer's output was the first that was not finite;
* `diagnosis`: what to say of them;
* `beforehand`: what to say before training begins;
* `watched`: which optimizers are watched, and what was read of each;
* `callback`: the callback of Keras.

Begin with `callback`.
"""
