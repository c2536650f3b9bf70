"""One replica's gradients as numbers: scaled, packed, finite or not.

These files know no rule of a loss scale, no other replica and no Keras. In the order
of imports:

* `packing`: packs many small gradients into a few tensors;
* `check`: are all finite? A quick check and an exact one, and which are not;
* `arithmetic`: multiplies a loss, divides gradients, finds their greatest magnitude;
* `rows`: sparse gradients with duplicate rows.

Begin with `check`.
"""
