"""Random programs of several optimizers: none is wrong in silence, or told for nothing.

What a program may do, `programs.py` says. A seed that fails is in the message.
"""

from __future__ import annotations

import pytest
from installed import families
from programs import offence

#: So many programs are in a test.
CHUNK = 20
#: So many tests are quick.
QUICK = 2
CHUNKS = [
    pytest.param(chunk, marks=[pytest.mark.slow] if chunk >= QUICK else [])
    for chunk in range(10)
]


@pytest.mark.every
@pytest.mark.parametrize("chunk", CHUNKS)
def test_none_is_wrong_in_silence(chunk):
    every = families()
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    found = [offence(every[seed % len(every)], seed) for seed in seeds]
    assert not any(found), "\n".join(filter(None, found))
