"""What signatures call TensorFlow's things. It has no types: to a checker each is Any.

They tell a reader what is meant, where `Any` tells nothing.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional

#: A NumPy array.
Array = Any
#: A tensor of eager mode, or of a graph.
Tensor = Any
#: A `float32` tensor of shape `[]`.
Scalar = Any
#: A `bool` tensor of shape `[]`.
Flag = Any
#: A `tf.Variable` or a Keras's own, mirrored or not.
Variable = Any
#: A gradient: a tensor, `tf.IndexedSlices` or None.
Grad = Any
#: One replica's gradients, in the order of their variables.
Grads = List[Grad]
#: What each gradient is still to be divided by. None: it is unscaled.
Divisors = List[Optional[Scalar]]
#: A graph that is built, None in eager mode.
Graph = Any
#: An operation of a graph, None in eager mode.
Op = Any
#: What inner optimizers do with unscaled gradients.
ApplyFunction = Callable[[Grads], Any]
