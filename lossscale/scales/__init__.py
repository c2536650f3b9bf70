"""The loss scales, and every way to get one.

These files know gradients and replicas, but no optimizer. Each file that is not named
here is one loss scale, such as `headroom.py`, and imports only `base` and `adjustment`
of this package. The others, in the order of imports:

* `checks`: checks of what a user's loss scale returns;
* `adjustment`: one step of a loss scale: it is judged, its rule runs, it is counted;
* `uses`: what a loss scale reports of its uses, and what optimizers ask of it;
* `variables`: Stateful, what makes a loss scale an object with variables;
* `subclasses`: what a subclass has of its own, also one that was written for 2.x;
* `base`: the contract, LossScale;
* `fixed`, `dynamic`: one rule each;
* `serialization`: loss scales from names, numbers and configs, and their configs;
* `spike_guard`: holds another loss scale, and skips steps with huge gradients;
* `ignored_losses`: how many bad losses in a row, or nearly, a rule may ignore.

Begin with `base`. docs/own-loss-scale.md shows the whole file of a new loss scale, and
CONTRIBUTING names its places elsewhere.
"""
