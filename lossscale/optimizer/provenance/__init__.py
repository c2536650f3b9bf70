"""Provenance: are these gradients still scaled, by what, and what is known of them?

Every value has an exponent of the loss scale (`units`). This package knows loss scales,
gradients and replicas, no Keras and no step. In the order of its imports:

* `events`: what can happen to a loss scale: read, loss, unscale, apply;
* `values`: the unit of each value;
* `history`: what happened to one loss scale: a list of events for each graph;
* `kinds`: scaled, unscaled or unknown: what a gradient's unit says of it;
* `resolve`: what each gradient is divided by, and what is known of a list.

Begin with `resolve`.
"""
