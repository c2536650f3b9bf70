"""One replica's gradients as numbers: scaled, packed, finite or not.

These files know no rule of a loss scale, no other replica and no Keras. In the order
of imports:

* `packing`: packs many small gradients into a few tensors;
* `check`: the quick check and the exact check of gradients;
* `finite`: are all of them finite?
* `faults`: which of them are infinite or NaN;
* `largest`: their greatest magnitude;
* `rows`: sparse gradients with duplicate rows;
* `scaling`: multiplies a loss by a number, and divides gradients by it.

Begin with `finite`.
"""
