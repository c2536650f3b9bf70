"""What float16 would do to a model's gradients and layers, before it trains in it.

Knows models of every Keras, and asks an optimizer for no more than its loss scale. In
the order of its imports:

* `exponents`: numbers counted by their exponent, and what float16 makes of them;
* `table`: the table that is printed, and its columns;
* `figures`: what float16 does to counted values, a number for each row;
* `picture`: the picture;
* `report`: the result, GradientRanges, in arrays and figures;
* `batches`: what `fit` takes as data, batch by batch;
* `float32_model`: a model that computes in float32 for a while;
* `grouping`: which block of a model a variable belongs to;
* `losses`: a model's loss as training computes it;
* `asking`: which models can be asked;
* `counting`: its gradients, batch by batch, counted;
* `measuring`: the function gradient_ranges itself;
* `layer_calls`: every call of a layer in eager mode;
* `origins`: where a value that is not finite comes from;
* `backward`: which layer's gradient is the first that is not finite;
* `finding`: what find_nonfinite found, and what to write;
* `nonfinite`: the function find_nonfinite itself;
* `passes`: a forward pass in float32, and one in float16;
* `forward_report`: its result, ForwardRanges;
* `forward`: the function forward_ranges itself.

Begin with `measuring`, then `nonfinite`, then `forward`.
"""
