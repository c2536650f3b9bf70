"""The loss scales, and every way to get one.

These files know gradients and replicas, but no optimizer. In the order of imports:

* `base`: the contract, LossScale, and how a loss scale is adjusted to a step;
* `fixed`, `dynamic`: one rule each;
* `headroom`, `log_normal`: rules that look at the gradients;
* `managers`: the names of TensorFlow 1;
* `interchange`: reads and writes other systems' saved states;
* `serialization`: loss scales from names, numbers and configs, and their configs;
* `spike_guard`: holds another loss scale, and skips steps with huge gradients.

Begin with `base`. A new loss scale is a new file like `headroom`; CONTRIBUTING
names its places elsewhere.
"""
