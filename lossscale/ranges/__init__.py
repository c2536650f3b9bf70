"""What float16 would do to a model's gradients, before anybody trains in it.

Knows models of every Keras, and asks an optimizer for no more than its loss scale. In
the order of its imports:

* `exponents`: numbers counted by their exponent, and what float16 makes of them;
* `views`: the table that is printed, and the picture;
* `report`: `GradientRanges`, the result;
* `batches`: what `fit` takes as data, batch by batch;
* `float32_model`: a model that computes in float32 for a while;
* `gradient_ranges`: the function itself.

Begin with `gradient_ranges`.
"""
