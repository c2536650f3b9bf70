"""The loss scale as a unit, which operations hand on: what each value has of it.

Knows no loss scale, no optimizer and no step: whoever uses it says which values have
the unit. In the order of its imports:

* `sources`: where a value comes from: events of a loss scale;
* `unit`: which powers of the loss scale a value may have; no graph, no tensor;
* `rules`: the rules by which exponents are handed on;
* `moves`: operations that add up, move or choose among values;
* `table`: which rule an operation follows;
* `operations`: what is known of an operation's results;
* `variables`: what assignments leave in variables;
* `sweep`: the exponents of a graph's values, or of a function's;
* `direct_reads`: variables that an operation of eager mode is given itself;
* `eager`: the exponents of eager mode's values.

Begin with `rules`.
"""
