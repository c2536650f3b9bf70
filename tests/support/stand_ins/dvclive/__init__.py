"""A stand-in for `dvclive`."""
