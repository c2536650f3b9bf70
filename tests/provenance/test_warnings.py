"""Warnings are given of the user's line, and each text says what to write."""

from __future__ import annotations

import os
import pickle
import sys

import pytest
import tensorflow as tf

from lossscale import LossScaleWarning
from lossscale.provenance import warnings
from lossscale.runtime.graphs import do_not_convert
from lossscale.runtime.loss_scale_warning import warn

KERAS3 = sys.modules.get("lossscale.optimizer.keras3")  # where there is a Keras 3
TEXTS = {
    name: text
    for module in filter(None, (warnings, KERAS3))
    for name, text in vars(module).items()
    if name.isupper() and isinstance(text, str) and len(text) > 80
}


def test_a_warning_is_of_the_users_line():
    with pytest.warns(LossScaleWarning, match="something") as caught:
        warn("something")
    assert caught[0].filename == __file__


def test_its_pickles_name_no_room():
    text = pickle.dumps(LossScaleWarning("something"))
    assert b"lossscale\n" in pickle.dumps(LossScaleWarning("something"), 0)
    assert pickle.loads(text).args == ("something",)  # noqa: S301 - its own


def test_lines_of_ours_and_of_keras_are_no_users():
    program = "from lossscale.runtime.loss_scale_warning import warn\nwarn('it')"
    with pytest.warns(LossScaleWarning) as caught:
        exec(  # noqa: S102 - as if this line stood in Keras
            compile(program, "keras.py", "exec"), {"__name__": "keras.src.optimizers"}
        )
    assert caught[0].filename == __file__


def test_a_copy_that_autograph_makes_is_no_users():
    given = do_not_convert(warn)  # as the optimizer's methods are called

    @tf.function
    def step():
        given("something")

    with pytest.warns(LossScaleWarning) as caught:
        step()
    (ours,) = [each for each in caught if each.category is LossScaleWarning]
    if os.path.basename(ours.filename).startswith("tmp"):
        pytest.skip("AutoGraph's files have names as any other temporary file")
    assert ours.filename == __file__


@pytest.mark.parametrize("name", TEXTS)
def test_each_text_ends_with_what_to_write(name):
    text = TEXTS[name]
    first, _, program = text.partition(":\n\n")
    assert program, name
    lines = program.splitlines()
    assert all(line.startswith("    ") for line in lines)
    assert any("optimizer" in line or "clip" in line for line in lines)
    assert "\n" not in first  # one paragraph: who shows it breaks it
