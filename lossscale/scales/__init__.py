"""The loss scales, and every way to get one.

These files know gradients and replicas, but no optimizer. Each file that is not named
here is one loss scale, such as `headroom.py`, and imports only `base` and `adjustment`
of this package. The others, in the order of imports:

* `adjustment`: one step of a loss scale: its rule runs, it is counted;
* `variables`: what loss scales and guards have in common;
* `base`: the contract, LossScale;
* `guard`: the contract of what leaves finite steps out, Guard;
* `fixed`, `dynamic`: one rule each;
* `serialization`: loss scales from names, numbers and configs, and their configs;
* `spike_guard`: a guard that leaves out steps with huge gradients;
* `ignored_losses`: how many bad losses in a row, or nearly, a rule may ignore.

Begin with `base`. docs/own-loss-scale.md shows the whole file of a new loss scale, and
CONTRIBUTING names its places elsewhere.
"""
