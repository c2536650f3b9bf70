"""What tensors of a graph are computed from."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Set

from lossscale.runtime.aliases import Tensor


def ancestors_among(tensors: Iterable[Tensor], candidates: Iterable[Any]) -> List[Any]:
    """Returns the candidates that tensors are computed from, and those they are.

    A way ends at the first candidate, and at a variable: what was assigned to it may
    have been computed at another time. So all that is returned is computed whenever the
    tensors are.

    Args:
      tensors: Tensors of the graph that is built, or of those around it.
      candidates: Such tensors, too.
    """
    wanted = {id(each): each for each in candidates if _is_in_sight(each)}
    found: Dict[int, Any] = {}
    seen: Set[int] = set()
    waiting = list(tensors) if wanted else []
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if id(tensor) in wanted:
            found[id(tensor)] = tensor
        else:
            waiting += tensor.op.inputs
            waiting += _captured_as(tensor)
    return [each for key, each in wanted.items() if key in found]


def _captured_as(tensor: Tensor) -> List[Any]:
    """Returns what an argument of a function's graph is outside of it."""
    # Graphs of `tf.compat.v1` have no captures.
    pairs = getattr(tensor.graph, "captures", ()) if not tensor.op.inputs else ()
    return [o for o, inner in pairs if inner is tensor and hasattr(o, "op")]


def _is_in_sight(tensor: Tensor) -> bool:
    """Tells whether it is in no loop or branch of `tf.compat.v1` that has ended.

    Those have no graphs of their own, and what is in them cannot be used outside.
    """
    # Not public, and the same on TensorFlow 2.4 to 2.21: `mode` asks for it, too.
    around = tensor.graph._get_control_flow_context()
    own = tensor.op._get_control_flow_context()
    while around is not None and around is not own:
        around = around.outer_context
    return around is own
