"""One replica's gradients as numbers: scaled, packed, finite or not.

These files know no rule of a loss scale, no other replica and no Keras. In the order
of imports:

* `check`: are all finite? A quick check and an exact one, and which are not; small
  gradients are packed into few tensors for it;
* `arithmetic`: multiplies a loss, divides gradients, finds their greatest magnitude;
* `bundle`: gradients on their way through a step, their divisors, and their checks.

Begin with `check`.
"""
