"""Provenance: are these gradients still scaled, by what, and what is known of them?

Every value has an exponent of the loss scale (`units`). In the order of its imports:

* `unscalings`: lists of gradients that were unscaled and returned to the user;
* `timeline`: when a loss scale was read, scaled with and applied, on one clock;
* `ledger`: what the optimizers that share a loss scale know of it;
* `kinds`: what a gradient is, by its unit;
* `resolve`: what each gradient is divided by, and what is known of a list.

Begin with `resolve`. It knows loss scales, gradients and replicas, no Keras and no
step.
"""
