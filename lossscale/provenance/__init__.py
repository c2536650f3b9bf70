"""Where gradients come from: are they scaled, by what, and of which loss?

A program may do anything between `scale_loss` and `apply_gradients`. So we look: in a
graph at its operations, in eager mode while they run. Where nothing is to be seen, the
state of the step decides (`optimizer/pending`). This package changes no state and adds
no operation. A step notes what it does (`Witness.note_...`), and asks where gradients
come from (`Witness.origins`); it can be read without opening this package.

It knows loss scales and gradients, but no optimizer. In the order of imports:

* `kinds`: what an operation makes of scaled, unscaled and other values;
* `walk`: `Kinds`, the kinds of all values, in graphs and in eager mode;
* `origins`: what is known of a list of gradients, and which losses are to blame;
* `mistakes`: warns of a program's likely mistakes. No step depends on it;
* `witness`: `Witness`, all of it for one loss scale. Other packages import only this.

Begin with `witness`.
"""
