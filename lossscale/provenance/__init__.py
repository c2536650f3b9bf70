"""Where gradients come from: are they scaled, by what, and of which loss?

A program may do anything between `scale_loss` and `apply_gradients`. So we look: in a
graph at its operations, in eager mode while they run. Where nothing is to be seen, the
state of the step decides (`optimizer/pending`). This package changes no state and adds
no operation. A step can be read without opening it.

It knows loss scales and gradients, but no optimizer. In the order of imports:

* `kinds`: what an operation makes of scaled, unscaled and other values;
* `walk`: `Kinds`, the kinds of all values, in graphs and in eager mode;
* `origins`: `Origins`, what is known of a list of gradients;
* `warnings`: what optimizers warn of. No step depends on it.

Begin with `origins`.
"""
