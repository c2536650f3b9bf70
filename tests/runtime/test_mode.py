"""In which mode TensorFlow is, is seen from wherever it is asked."""

import pytest
import tensorflow as tf
from installed import ROOT
from processes import printed

from lossscale.runtime import mode
from lossscale.runtime.mode import COMPILED_BY_XLA


def _seen(trace):
    """Returns the modes in a function, and in a branch and a nested function in it."""
    found = []

    def note():
        found.append(mode.current())
        return tf.constant(True)

    inner = tf.function(note, autograph=False)
    trace(lambda x: (note(), tf.cond(x > 0, note, note), inner())[0])
    return set(found)


def test_each_mode_is_seen_from_within_branches_and_nested_functions():
    one = tf.constant(1.0)
    assert mode.current() is mode.EAGER
    assert _seen(lambda f: tf.function(f, autograph=False)(one)) == {mode.GRAPH}
    compiled = _seen(lambda f: tf.function(f, autograph=False, **COMPILED_BY_XLA)(one))
    assert compiled == {mode.XLA}


@pytest.mark.slow
def test_a_session_and_xla_in_it_are_seen():
    # Eager execution can only be left before anything runs: in a process of its own.
    assert printed("-c", _IN_SESSION).split()[-2:] == ["True", "True"]


_IN_SESSION = """
import tensorflow as tf
tf.compat.v1.disable_eager_execution()
from lossscale.runtime import mode
print(mode.current() is mode.SESSION)
found = []
def compiled(x):
    found.append(mode.current())
    return x
tf.xla.experimental.compile(compiled, [tf.constant(1.0)])
print(found[0] is mode.XLA_IN_SESSION)
"""


def test_the_page_on_modes_names_each_difference():
    page = (ROOT / "docs" / "modes.md").read_text()
    for field in mode.Mode._fields:
        assert f"`{field}`" in page, field
