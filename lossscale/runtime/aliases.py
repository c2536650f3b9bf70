"""The types that signatures name, since TensorFlow and Keras bring none.

To a type checker an alias of `Annotated[Any, ...]` is `Any`: users hand tensors in, and
override methods that take them, with whatever types their TensorFlow has. The texts
behind `Any` are for you: the dtype first, then the shape. Graphs and operations stay
within this package, so a checker holds them to the protocols below, which list every
attribute that we use.
"""

from __future__ import annotations

import sys
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    List,
    Optional,
    Protocol,
    Sequence,
    Tuple,
)

import numpy as np

if sys.version_info >= (3, 9):
    from typing import Annotated
else:

    class Annotated:
        """Python 3.8 has none. There an alias is the type that stands first in it."""

        def __class_getitem__(cls, parameters: Tuple[Any, ...]) -> Any:
            return parameters[0]


# The subscript is for the checker: NumPy's class takes none on Python 3.8.
if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]  #: a NumPy array
else:
    Array = np.ndarray

#: A tensor of eager mode or of a graph.
Tensor = Annotated[Any, "any dtype", "any shape"]
#: The inputs or the outputs of an operation.
Tensors = Sequence[Tensor]
#: One number: the loss scale, a divisor, a limit.
Scalar = Annotated[Any, "float32", "[]"]
#: One truth value. In eager mode it may be a Python bool.
Flag = Annotated[Any, "bool", "[]"]
#: A number for each gradient, in the order of the gradients.
PerGradient = Annotated[Any, "float32", "[gradients]"]
#: A `tf.Variable` or a Keras variable, mirrored or not.
Variable = Annotated[Any, "any dtype", "any shape", "assignable"]
#: A gradient: a tensor, `tf.IndexedSlices` or None.
Grad = Annotated[Any, "a floating-point dtype", "its variable's shape"]
#: One replica's gradients, in the order of their variables.
Grads = List[Grad]
#: What each gradient must still be divided by. None: it is unscaled.
Divisors = List[Optional[Scalar]]
#: An operation of a graph. None in eager mode, where it has run already.
Op = Annotated[Any, "an Operation, or None"]
#: What functions return to a graph: tensors, operations and None, as `tf.nest` has it.
Results = Annotated[Any, "tensors and operations, nested"]
#: What inner optimizers do with unscaled gradients.
ApplyFunction = Callable[[Grads], Results]
#: The attributes of an operation that eager mode runs.
Attributes = Annotated[Sequence[Any], "name, value, name, value, ..."]


class Context(Protocol):
    """A loop or a branch of `tf.compat.v1`, which has no graph of its own."""

    outer_context: Optional[Context]

    def IsXLAContext(self) -> bool: ...  # noqa: N802 - TensorFlow's name


class Graph(Protocol):
    """A `tf.Graph`. Eager mode has none: None stands for it.

    Attributes:
      outer_graph: The graph around that of a function, of a loop's body or of a branch.
        Other graphs have no such attribute.
      building_function: Whether it is the graph of a function.
    """

    outer_graph: Optional[Graph]
    building_function: bool

    def get_operations(self) -> List[Operation]: ...

    def as_default(self) -> ContextManager[Graph]: ...

    def _get_function(self, name: str) -> Any: ...

    def _get_control_flow_context(self) -> Optional[Context]: ...


class Operation(Protocol):
    """An operation of a graph: a `tf.Operation`.

    Attributes:
      type: What it does, as `"MatMul"`.
    """

    type: str
    graph: Graph
    inputs: Tensors
    outputs: Tensors

    def get_attr(self, name: str) -> Any: ...

    def _get_control_flow_context(self) -> Optional[Context]: ...
