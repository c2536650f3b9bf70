"""A stand-in for Horovod 0.28.1: one worker, and what the pages call.

Gradients are added up where Horovod adds them up: where an optimizer computes them, and
in its tape's `gradient`. Of one worker the sum is what it has.
"""
