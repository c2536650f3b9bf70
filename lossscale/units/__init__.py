"""The loss scale as a unit, which operations hand on: what each value has of it.

Knows no loss scale, no optimizer and no step: whoever uses it says which values have
the unit. In the order of its imports:

* `rules`: the rules by which exponents are handed on; no graph, no tensor;
* `operations`: which rule an operation follows;
* `sweep`: the exponents of a graph's values, or of a function's;
* `eager`: those of eager mode's values.

Begin with `rules`.
"""
