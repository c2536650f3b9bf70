"""A stand-in for `aim`."""
