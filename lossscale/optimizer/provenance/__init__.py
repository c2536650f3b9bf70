"""Provenance: are these gradients still scaled, by what, and what is known of them?

Every value has an exponent of the loss scale (`units`). In the order of its imports:

* `events`: what can happen to a loss scale: read, loss, unscale, apply;
* `values`: what each value has of it: its unit;
* `history`: what happened to it, a list of events for each graph, on one clock;
* `kinds`: what a gradient is, by its unit;
* `resolve`: what each gradient is divided by, and what is known of a list.

Begin with `resolve`. It knows loss scales, gradients and replicas, no Keras and no
step.
"""
