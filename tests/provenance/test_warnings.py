"""Warnings: of the user's line, with what to write, and of a term that is nearly lost.

Others are heard where their programs are: provenance/test_expressions.py, and
optimizer/test_pending.py.
"""

import os
import pickle
import re
import sys

import pytest
import tensorflow as tf
from exact import START, S, Trained, heard, warned
from models import compiled

from lossscale import DynamicLossScale, LossScaleWarning
from lossscale.provenance import warnings
from lossscale.runtime.graphs import do_not_convert
from lossscale.runtime.keras_versions import tensor_of
from lossscale.runtime.loss_scale_warning import warn

KERAS3 = sys.modules.get("lossscale.optimizer.keras3")  # where there is a Keras 3
TEXTS = {
    name: text
    for module in filter(None, (warnings, KERAS3))
    for name, text in vars(module).items()
    if name.isupper() and isinstance(text, str) and len(text) > 80
}


def test_its_pickles_name_no_room():
    text = pickle.dumps(LossScaleWarning("something"), 0)
    assert b"lossscale\n" in text
    assert pickle.loads(text).args == ("something",)  # noqa: S301 - its own


def test_a_warning_is_of_the_users_line_and_not_of_ours_or_of_keras():
    line = compile("warn('it')", "keras.py", "exec")
    with pytest.warns(LossScaleWarning, match="it") as caught:
        exec(line, {"__name__": "keras.src.optimizers", "warn": warn})  # noqa: S102
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


# A term that is added to a loss after that was scaled, and so divided by S.


#: Expressions of what is differentiated. `loss` is scaled, `total` and `penalty` are
#: not, `w` is the weight, which a variable holds, and `x` is data.
LOST = """
loss + penalty ; penalty + loss ; loss - penalty ; tf.add_n([loss, penalty])
loss + 1.0 + (penalty + 3.0) ; loss + tf.reduce_mean((w * x) ** 2) ; [loss, penalty]
loss + tf.gather(w, [1])[0] ; loss + tf.gather(variable, [1])[0]
"""
RIGHT = """
scale(total + penalty) ; loss + scale(penalty) ; loss + S * penalty ; loss + 3.0
loss + 0.0 * penalty ; loss + tf.reduce_sum(tf.zeros_like(w)) ; loss + x
loss + tf.random.normal([]) ; loss + tf.stop_gradient(penalty)
loss + tf.cast(tf.argmax(w), tf.float32) ; loss + held ; loss + held.assign_add(loss)
loss + others_loss ; loss + of_a_function() ; loss + number * penalty
loss + tf.cond(x > 0.0, lambda: scale(total), lambda: w[0])
"""


def told(family, expression, mode="graph"):
    """Returns the warnings of two steps that differentiate an expression."""
    trained = Trained(family)
    scale, other = trained.optimizer.scale_loss, DynamicLossScale(S)
    names = {"tf": tf, "scale": scale, "S": trained.optimizer.loss_scale}
    names["held"] = tf.Variable(0.0, trainable=False)
    names["variable"] = variable = tensor_of(trained.variables[0])
    if "number" in expression:
        names["number"] = float(names["S"])

    def step(x):
        with tf.GradientTape() as tape:
            w = tf.convert_to_tensor(variable)
            total, penalty = tf.reduce_sum(w), 0.25 * tf.reduce_sum(w**2)
            names.update(w=w, x=x, total=total, loss=scale(0.5 * total))
            names.update(penalty=penalty, others_loss=other.scale(total))
            # As a function returns it, of which nothing is known.
            names["of_a_function"] = tf.function(lambda: scale(tf.reduce_sum(w)))
            target = eval(expression, names)  # noqa: S307 - as above
        trained.apply([tape.gradient(target, variable)])

    step = compiled(step, mode)
    with heard() as messages:
        for _ in range(2):
            step(tf.constant(0.5))
    return messages


EXPRESSIONS = [
    (expression, times)
    for table, times in ((LOST, 1), (RIGHT, 0))
    for expression in re.split(r" ; |\n", table.strip())
]


@pytest.mark.parametrize(("expression", "times"), EXPRESSIONS)
def test_only_a_term_that_is_nearly_lost_is_told_of_and_once(family, expression, times):
    messages = told(family, expression)
    assert sum(": A term that depends" in each for each in messages) == times


def test_eager_mode_names_a_penalty_too_and_what_to_write(family):
    (message,) = told(family, "loss + penalty", "eager")
    assert "a number such as a penalty was added" in message
    assert "optimizer.scale_loss(loss + penalty)" in message


def test_decay_that_is_added_to_scaled_gradients_is_told_of(family):
    trained = Trained(family)

    @tf.function
    def step():
        (grad,) = trained.scaled(0.5)
        trained.apply([grad + 0.5 * tf.convert_to_tensor(trained.variables[0])])

    with warned(1):
        step()
    assert trained.subtracted() == 0.5 + 0.5 * START / S
