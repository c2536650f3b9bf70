"""What float16 would do to a model's gradients and layers, before it trains in it.

These files know models of every Keras. From an optimizer they need only its loss scale.
In the order of imports; begin with `step`, then `nonfinite`:

* `exponents`: counts numbers by exponent, and says what float16 does to them;
* `report`: what float16 does to counted values, in figures, a table and a picture;
* `causes`: what is said of a value that is not finite, by the monitor, too;
* `magnitudes`: how large a tensor's values are, and whether they hold inf or NaN;
* `inputs`: what a report is given: the model, its loss scale, and the data;
* `model_state`: changes a model for a while, and leaves it exactly as it was;
* `calls`: every call of a layer or an operation, in eager mode;
* `step`: the training step that `fit` runs, once, and nothing is applied;
* `advice`: where what is not finite comes from, what to write, and a step that does so;
* `nonfinite`: find_nonfinite, its report, and what helps against a fault;
* `forward`: forward_ranges, and its report;
* `gradient_report`: gradient_ranges, and its report.
"""
