"""LossScaleMonitor: shows what the loss scale does during `fit`, and why a run dies.

These files know optimizers, the calls of layers from `ranges`, and the file that
`simulation` reads. In the order of imports:

* `stalls`: when to warn of skipped steps;
* `underflow`: when a loss scale is far too low;
* `layer_outputs`: measures the outputs of each layer, on the device;
* `activations`: which layer's output was the first that was not finite;
* `diagnosis`: what to say about skipped steps;
* `beforehand`: what to say before training begins;
* `watched`: which optimizers are watched, and the readings of each;
* `callback`: the Keras callback.

Begin with `callback`.
"""
