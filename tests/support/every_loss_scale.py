"""Every loss scale, and what is promised of it: one entry of `DECLARED` for each.

Written by hand, never read from the code: a line that changes or goes breaks somebody's
code or files, and the changelog says so. Who reads an entry:

* test_every_loss_scale.py: every promise of a loss scale, of each of `cases`, and
  `rule`;
* test_base.py and test_replay.py: the same, in other ways;
* test_public_api.py: what files hold. It also tells whether each public loss scale has
  an entry.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Tuple

import pages

import lossscale
from lossscale import DynamicLossScale, FixedLossScale, HeadroomLossScale


class Declared(NamedTuple):
    """What is promised of a class.

    Attributes:
      variables: The names of its variables besides those of every loss scale, in a
        graph and in checkpoints.
      keys: The keys of its config if it is made from one number.
      cases: Functions that make one, with arguments that are not the defaults, and
        a scale to begin with that can fall twice.
      rule: A run, as "TFF", and the scale after each step of it, of the first case. It
        should reach both bounds, and grow twice in a row.
        Its largest gradients are those of `driving.magnitude`.
    """

    variables: str
    keys: str
    cases: Dict[str, Callable[[], Any]]
    rule: Tuple[str, str]


DECLARED = {
    "DynamicLossScale": Declared(
        variables="bad_steps current_loss_scale good_steps",
        keys="backoff_factor hysteresis hysteresis_reset increment_period "
        "initial_loss_scale max_loss_scale min_loss_scale multiplier",
        cases={
            "dynamic": lambda: DynamicLossScale(
                64, 2, 4.0, backoff_factor=0.5, min_loss_scale=2.0, max_loss_scale=512.0
            ),
            "dynamic-hysteresis": lambda: DynamicLossScale(
                64, 3, hysteresis=2, hysteresis_reset=("good", "backoff")
            ),
            "dynamic-search": lambda: DynamicLossScale(
                64, 3, hysteresis=2, search_period=1
            ),
            "dynamic-cooldown": lambda: DynamicLossScale(64, 3, backoff_cooldown=2),
            "dynamic-tolerance": lambda: DynamicLossScale(
                64, 3, hysteresis=2, overflow_tolerance=0.5
            ),
        },
        rule=("TTFTTFFFFFFFFF", "64 256 128 128 512 256 128 64 32 16 8 4 2 2"),
    ),
    "FixedLossScale": Declared(
        variables="",
        keys="loss_scale_value skip_nonfinite",
        cases={
            "fixed": lambda: FixedLossScale(64),
            "fixed-skip": lambda: FixedLossScale(64, skip_nonfinite=True),
        },
        rule=("TFT", "64 64 64"),
    ),
    "HeadroomLossScale": Declared(
        variables="ceiling current_loss_scale good_steps peak",
        keys="half_life headroom increment_period initial_loss_scale max_loss_scale "
        "min_loss_scale",
        cases={
            "headroom": lambda: HeadroomLossScale(
                64,
                3,
                5.0,
                increment_period=3,
                min_loss_scale=2.0,
                max_loss_scale=2.0**40,
            ),
        },
        # The gradients leave room for more, but overflows have halved the ceiling.
        rule=("FTF", "32 32 16"),
    ),
}


#: The module that docs/own-loss-scale.md shows as the model of all.
PAGE = pages.module_of("own-loss-scale", "class Halving")
#: Ways to make a loss scale, by name: each must keep every promise.
CASES = {
    **{name: each for known in DECLARED.values() for name, each in known.cases.items()},
    "manager": lambda: lossscale.get(
        lossscale.ExponentialUpdateLossScaleManager(64, 2, 3, 4.0, 0.5)
    ),
    "page": lambda: PAGE.Halving(64),
}
