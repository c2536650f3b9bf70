"""`tf.debugging.enable_check_numerics()`, with which people look for a NaN.

It stops a run at each infinity and NaN, so none of our operations makes one of finite
numbers: support/check_numerics.py. An overflow of scaled gradients stops it, too.
"""

import os
import sys

import pytest
from processes import SUPPORT, printed


@pytest.mark.slow
def test_an_overflow_stops_a_run_and_nothing_stops_a_healthy_one():
    path = os.pathsep.join(sys.path)
    found = printed("-W", "ignore", SUPPORT / "check_numerics.py", PYTHONPATH=path)
    *stopped, last = found.splitlines()
    assert last == "All runs are done."
    stopped = [line for line in stopped if line.startswith("STOPPED ")]
    assert [line[:19] for line in stopped] == ["STOPPED an_overflow"]
    assert "Infinity or NaN" in stopped[0] or "inf" in stopped[0].lower()
