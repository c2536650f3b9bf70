"""The loss scale as a unit: which power of it each value has, as a metre or m**2.

This package knows no loss scale, no optimizer and no step: its caller says which values
have the unit. In the order of its imports:

* `sources`: where a value comes from: events of a loss scale;
* `unit`: which powers of the loss scale a value may have; no graph, no tensor;
* `rules`: the rules by which operations hand exponents on;
* `moves`: operations that add up, move or choose among values;
* `table`: which rule an operation follows;
* `operations`: the units of an operation's results;
* `variables`: the units of variables after assignments;
* `sides`: the units of branches' results on each side;
* `sweep`: the units of a graph's values, or of a function's;
* `direct_reads`: variables that eager mode hands to an operation itself;
* `eager`: the units of eager mode's values.

Begin with `rules`.
"""
