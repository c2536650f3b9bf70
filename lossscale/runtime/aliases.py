"""The types that signatures name, since TensorFlow and Keras bring none.

To a type checker each of TensorFlow's is `Any`: users hand tensors in, and override
methods that take them, with whatever types their TensorFlow has. The comments are for
you: the dtype first, then the shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence

import numpy as np

# The subscript is for the checker: NumPy's class takes none on Python 3.8.
if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]  #: a NumPy array
else:
    Array = np.ndarray

#: A tensor of eager mode or of a graph, of any dtype and shape.
Tensor = Any
#: The inputs or the outputs of an operation.
Tensors = Sequence[Tensor]
#: One number: the loss scale, a divisor, a limit. `float32`, `[]`.
Scalar = Any
#: One truth value: `bool`, `[]`. In eager mode it may be a Python bool.
Flag = Any
#: A number for each gradient, in the order of the gradients: `float32`, `[gradients]`.
PerGradient = Any
#: A `tf.Variable` or a Keras variable, mirrored or not.
Variable = Any
#: A gradient: a tensor, `tf.IndexedSlices` or None, of a floating-point dtype.
Grad = Any
#: One replica's gradients, in the order of their variables.
Grads = List[Grad]
#: What each gradient must still be divided by. None: it is unscaled.
Divisors = List[Optional[Scalar]]
#: An operation of a graph. None in eager mode, where it has run already.
Op = Any
#: What functions return to a graph: tensors, operations and None, as `tf.nest` has it.
Results = Any
#: What inner optimizers do with unscaled gradients.
ApplyFunction = Callable[[Grads], Results]
#: A `tf.Graph`. Eager mode has none: None stands for it.
Graph = Any
