"""The loss scales, and every way to get one.

These files know gradients and replicas, but no optimizer. In the order of imports:

* `variables`: the variables of loss scales, and how a rule reads them;
* `listening`: a loss scale tells optimizers of each use;
* `number`: a loss scale used as a number;
* `adjusting`: how a loss scale is adjusted to one step, in each context;
* `base`: the contract, LossScale;
* `moves`: how far a loss scale moves, and when an overflow does not lower it;
* `fixed`, `dynamic`: one rule each;
* `headroom`, `log_normal`: rules that look at the gradients;
* `managers`: the names of TensorFlow 1;
* `state_formats`, `interchange`: reads and writes other systems' saved states;
* `tensorflows`: converts TensorFlow's own loss scales to ours;
* `serialization`: loss scales from names, numbers and configs, and their configs;
* `spike_guard`: holds another loss scale, and skips steps with huge gradients.

Begin with `base`. A new loss scale is a new file like `fixed`.
"""
