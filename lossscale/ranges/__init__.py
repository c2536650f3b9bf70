"""What float16 would do to a model's gradients and layers, before it trains in it.

These files know models of every Keras. From an optimizer they need only its loss scale.
In the order of imports:

* `exponents`: counts numbers by exponent, and says what float16 does to them;
* `table`: the printed table, and its columns;
* `figures`: what float16 does to counted values, a number for each row;
* `picture`: draws the results;
* `report`: GradientRanges, the result in arrays and figures;
* `batches`: the data that `fit` takes, batch by batch;
* `float32_model`: lets a model compute in float32 for a while;
* `grouping`: which block of a model a variable belongs to;
* `losses`: a model's loss as training computes it;
* `asking`: checks of the model and of the data;
* `counting`: counts a model's gradients, batch by batch;
* `measuring`: the function gradient_ranges itself;
* `layer_calls`: every call of a layer in eager mode;
* `origins`: where a value that is not finite comes from;
* `backward`: which layer's gradient is the first that is not finite;
* `finding`: the result of find_nonfinite, and what to write;
* `nonfinite`: the function find_nonfinite itself;
* `passes`: a forward pass in float32, and one in float16;
* `forward_report`: ForwardRanges, the result of both passes;
* `forward`: the function forward_ranges itself.

Begin with `measuring`, then `nonfinite`, then `forward`.
"""
