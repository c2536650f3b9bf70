"""The loss scales, and every way to get one.

Knows gradients and replicas, no optimizer. In the order of its imports:

* `variables`: what loss scales are made of;
* `listening`: who is told where a loss scale is used;
* `number`: a loss scale as the number that it is;
* `adjusting`: how a loss scale is adjusted to one step, in each context;
* `base`: the contract, LossScale;
* `moves`: how far a loss scale moves, and what keeps it;
* `fixed`, `dynamic`: a rule each;
* `headroom`, `log_normal`: rules that look at the gradients;
* `managers`: the names of TensorFlow 1;
* `state_formats`, `interchange`: the states of other systems, read and written;
* `tensorflows`: TensorFlow's own loss scales as ours;
* `serialization`: loss scales from names, numbers and configs, and configs of them;
* `spike_guard`: holds another loss scale, and skips the steps that do not belong.

Begin with `base`. A new loss scale is a file like `fixed`.
"""
