"""The runtime: what is particular to each TensorFlow, each Keras and each mode.

This package knows no loss scale and no gradient. In the order of its imports:

* `aliases`, `warning`, `autograph`: types, warnings, and what AutoGraph leaves alone;
* `graphs`, `mode`, `callbacks`, `control`: graphs, eager mode, sessions and XLA;
* `kerases`, `random_streams`, `registry`: the Kerases, and what is the process's;
* `replicas`: what replicas know together. Nothing else reduces across them.

Begin with `mode`.
"""
