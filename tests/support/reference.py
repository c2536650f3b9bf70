"""The rule of DynamicLossScale once more, in plain Python."""

from __future__ import annotations

import numpy as np


def reference(config, flags):
    """Returns the scale after each step, from the rule as it is written down."""
    scale, good, bad, seen = config["initial_loss_scale"], 0, 0, []
    search, period = config.get("search_period"), config["increment_period"]
    cooldown, cooled = config.get("backoff_cooldown") or 0, 0  # the first step that may
    tolerance, steps, overflows = config.get("overflow_tolerance") or 0.0, 0, 0
    for done, is_finite in enumerate(flags):
        if search is not None:
            searches = all(flags[:done])
            period = search if searches else config["increment_period"]
        steps += 1
        if is_finite:
            good += 1
            bad = 0 if "good" in config["hysteresis_reset"] else bad
            if good >= period:
                good = steps = 0
                bad = 0 if "growth" in config["hysteresis_reset"] else bad
                grown = scale * config["multiplier"]
                if config["max_loss_scale"] is not None:
                    scale = min(grown, config["max_loss_scale"])
                elif grown <= float(np.finfo(np.float32).max):
                    scale = grown
        else:
            good = 0
            bad += 1
            overflows += 1
            is_tolerated = overflows / steps < tolerance
            if bad >= config["hysteresis"] and done >= cooled and not is_tolerated:
                steps = overflows = 0
                cooled = done + 1 + cooldown
                factor = config["backoff_factor"] or 1 / config["multiplier"]
                scale = max(scale * factor, config["min_loss_scale"])
                bad = 0 if "backoff" in config["hysteresis_reset"] else bad
        seen.append(scale)
    return seen
