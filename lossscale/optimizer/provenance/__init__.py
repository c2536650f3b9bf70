"""Provenance: are these gradients still scaled, by what, and what is known of them?

The loss scale is a unit, and every value has an exponent of it. In the order of its
imports:

* `exponents`: the rules by which exponents are handed on; no graph, no tensor;
* `operations`: which rule an operation follows;
* `unscalings`: lists of gradients that were unscaled and returned to the user;
* `sweep`: the exponents of a graph's values, or of a function's;
* `eager`: those of eager mode's values;
* `timeline`: when a loss scale was read, scaled with and applied, on one clock;
* `ledger`: what the optimizers that share a loss scale know of it;
* `kinds`: what a gradient is, by its unit;
* `resolve`: what each gradient is divided by, and what is known of a list.

Begin with `exponents`, then `resolve`. It knows loss scales, gradients and replicas, no
Keras and no step.
"""
