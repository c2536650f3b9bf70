"""The runtime: what is particular to each TensorFlow, each Keras and each mode.

This package knows no loss scale and no gradient. In the order of its imports:

* `aliases`: the types that signatures name;
* `loss_scale_warning`: LossScaleWarning, and the function that gives it;
* `graphs`: which graph is being built, and which graphs can be read from there;
* `mode`: eager, graph, session or XLA, and what is done differently in each;
* `op_callbacks`: notifies listeners of each operation that eager mode runs;
* `derivatives`: which operation's derivative eager mode computes now;
* `replicas`: what replicas know together. Nothing else reduces across them;
* `control`: the branches and the order of operations in a graph;
* `keras_versions`: which versions of Keras are in use, and how they differ;
* `float16_weights`: warns of variables that are trained in float16;
* `number_like`: an object that is used like its number;
* `saved_models`: variables that a SavedModel holds and no checkpoint;
* `random_streams`: keeps the process's random streams as they are for a while;
* `registry`: registers classes with each Keras, which finds them by name.

Begin with `mode`.
"""
