"""The way of one gradient as data: `pictures.inside` draws it, a test checks it.

It needs neither TensorFlow nor matplotlib, so that the test can import it.
"""

from __future__ import annotations

from typing import List, NamedTuple


class Station(NamedTuple):
    """What happens to a gradient, and where.

    Attributes:
      kind: What the value is that comes out: "scaled", "unscaled", or "either".
      what: What happens, one line of the drawing.
      who: The file and the function that does it, `file.py: function`; or, in a word,
        somebody else.
      is_optional: Whether only a loop that clips comes here.
    """

    kind: str
    what: str
    who: str
    is_optional: bool = False


#: What every step does, in this order.
WAY: List[Station] = [
    Station("unscaled", "loss", "your model"),
    Station(
        "scaled",
        "scale: S times the loss, in float32",
        "optimizer/engine.py: scale_loss",
    ),
    Station("scaled", "gradients of the scaled loss", "TensorFlow's tape"),
    Station(
        "unscaled",
        "to clip: unscale, check",
        "optimizer/pending.py: unscale",
        is_optional=True,
    ),
    Station(
        "either", "resolve: are they still scaled?", "optimizer/pending.py: resolve"
    ),
    Station("either", "prepare: several replicas divide", "optimizer/step.py: prepare"),
    Station(
        "either", "check: would all be finite?", "gradients/bundle.py: check_as_applied"
    ),
    Station(
        "either", "reduce: all-reduce one scalar", "optimizer/reduction.py: reduce"
    ),
    Station("either", "adjust: the flag moves S", "optimizer/step.py: adjust"),
]

#: How a step ends: in one of these, the same on all replicas.
ENDS: List[Station] = [
    Station("unscaled", "apply", "step.py: _apply"),
    Station("either", "skip", "step.py: skip"),
]
