"""One replica's gradients as numbers: scaled, packed, finite or not.

Knows no rule of a loss scale, no other replica and no Keras. In the order of its
imports:

* `packing`: many small gradients as a few tensors;
* `check`: what is known of gradients;
* `finite`: are all of them finite?
* `faults`: which of them are not, and how;
* `largest`: their greatest magnitude;
* `rows`: sparse gradients in which a row comes more than once;
* `scaling`: a loss times a number, and gradients divided by it.

Begin with `finite`.
"""
