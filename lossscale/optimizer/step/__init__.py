"""One step of an optimizer: unscale, check, reduce, adjust, apply or skip.

In the order of its imports:

* `aggregation`: gradients that the user aggregates across replicas;
* `communication`: gradients that cross the replicas in float16, while still scaled;
* `sharing`: one loss scale for several optimizers;
* `reduction`: the flag, all-reduced over one replica or several;
* `step`: the step itself.

Begin with `step`. It knows loss scales, gradients, where they come from and replicas;
no rule and no Keras.
"""
