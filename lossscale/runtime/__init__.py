"""What TensorFlow and Keras are here, and what must be done differently because of it.

Knows no loss scale and no gradient. In the order of its imports:

* `aliases`: what signatures call TensorFlow's things;
* `autograph`: functions that `tf.function` traces as they are written;
* `graphs`: which graph is built, which are in sight, and their bodies;
* `checkpoints`: what checkpoints ask of objects, and users do not;
* `mode`: eager, graph, session or XLA;
* `op_types`: what operations are, where their type alone does not say it;
* `bodies`: what a graph or a function does, one operation after the other;
* `callbacks`: who is told of each operation that eager mode runs;
* `tapes`: what the tapes that are open record;
* `control`: what a graph must be told of branches and order;
* `late_imports`: what is to be done as soon as somebody imports a package;
* `kerases`: which Kerases are in use, and how they differ;
* `registry`: classes that a Keras must find by their name;
* `replicas`: what replicas know together. Nothing else reduces across them.

Begin with `mode`.
"""
