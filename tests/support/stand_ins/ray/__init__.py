"""A stand-in for Ray 2.60: one worker, in this process, and what the pages call."""
