"""The way of one gradient as data: `pictures.inside` draws it, a test checks it.

It needs neither TensorFlow nor matplotlib, so that the test can import it.
"""

from __future__ import annotations

from typing import List, NamedTuple


class Station(NamedTuple):
    """What happens to a gradient, and where.

    Attributes:
      exponent: The exponent of the loss scale S in the value that comes out.
      what: What happens, one line of the drawing.
      who: The file and the function that does it, `file.py: function`; or, in a word,
        somebody else.
      is_optional: Whether only a loop that clips comes here.
    """

    exponent: str
    what: str
    who: str
    is_optional: bool = False


#: What every step does, in this order.
WAY: List[Station] = [
    Station("0", "loss", "your model"),
    Station(
        "1", "scale: S times the loss, in float32", "optimizer/base.py: scale_loss"
    ),
    Station("1", "gradients of the scaled loss", "TensorFlow's tape"),
    Station(
        "0",
        "to clip: unscale and check here",
        "optimizer/base.py: get_unscaled_gradients",
        is_optional=True,
    ),
    Station(
        "0, 1",
        "resolve: are they still scaled?",
        "optimizer/provenance/resolve.py: resolve",
    ),
    Station("0", "unscale: divide by S, in float32", "optimizer/bundle.py: quotients"),
    Station(
        "0",
        "check: are all of them finite?",
        "optimizer/checking.py: check_as_applied",
    ),
    Station(
        "0",
        "reduce: all-reduce one scalar",
        "optimizer/step/reduction.py: reduce",
    ),
    Station("0", "adjust: the flag moves S", "optimizer/step/step.py: adjust"),
]

#: How a step ends: in one of these, the same on all replicas.
ENDS: List[Station] = [
    Station("0", "apply", "step/step.py: run"),
    Station("0", "skip", "step/step.py: skip"),
]
