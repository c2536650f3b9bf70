"""nonfinite_loss="skip": a loss scale does not learn of a loss that was bad itself.

A loss and its gradients are given from outside, so that each can be bad by itself. A
tape makes them, so it is seen that they belong together. Which of several losses is at
fault is in test_blame.py, and the rule of how many are ignored in
scales/test_ignored_losses.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from every_loss_scale import CASES
from exact import of_loss
from guards import PAGE as GUARD
from models import (
    assert_same,
    build,
    compiled,
    optimizer_state,
    variable_of,
)
from strategies import last_replica_gets, scope_of

import lossscale
from lossscale import DynamicLossScale, LossScaleManager, LossScaleOptimizer, SpikeGuard
from lossscale.runtime import keras_versions

INF, NAN = float("inf"), float("nan")
#: The largest gradients of good steps, so that some loss scales see them grow.
GOOD = [0.5, 0.25, 0.5, 0.125, 0.5, 0.5, 0.25, 0.5]
COUNTERS = ("skipped_steps", "consecutive_skipped_steps", "last_step_finite")


class OwnUpdate(DynamicLossScale):
    """One that is given the gradients."""

    def update(self, grads):
        return super().update(grads)


class OwnManager(LossScaleManager):
    """A user's own manager."""

    def __init__(self):
        super().__init__()
        self.value = tf.Variable(64.0)

    def get_loss_scale(self):
        return tf.convert_to_tensor(self.value)

    def update_loss_scale(self, finite_grads):
        change = tf.where(finite_grads, 1.0, -8.0)
        return self.value.assign_add(change, read_value=False)


#: Of a class whose rule is told nothing one case is enough, and one that searches.
ALIKE = {"fixed", "dynamic-hysteresis", "dynamic-cooldown", "dynamic-tolerance"}
EVERY = {
    **{name: make for name, make in CASES.items() if name not in ALIKE},
    "own-update": lambda: OwnUpdate(64.0, 2),
    "own-manager": lambda: lossscale.get(OwnManager()),
}


class Trained:
    """An optimizer, two variables, and a step that is given losses and gradients."""

    def __init__(self, family, loss_scale, how="skip", rate=2.0**-4, **kwargs):
        # Of powers of two all sums are exact.
        inner = family.optimizers.SGD(rate, momentum=0.5)
        self.optimizer = LossScaleOptimizer(
            inner, loss_scale, nonfinite_loss=how, **kwargs
        )
        self.variables = [variable_of(family, [8.0, 8.0]) for _ in range(2)]
        build(self.optimizer, self.variables)
        self.run = compiled(self.step, "graph")

    def step(self, loss, grads):
        self.apply(self.scaled(loss, grads))

    def scaled(self, loss, grads):
        """Returns the gradients of the scaled loss."""
        return of_loss(self.optimizer.scale_loss, loss, grads)

    def apply(self, grads):
        self.optimizer.apply_gradients(list(zip(grads, self.variables)))

    def __call__(self, loss=1.0, largest=0.5):
        grads = [tf.constant([largest, 0.25]), tf.constant([0.125, 0.0625])]
        self.run(tf.constant(loss), grads)

    def rule(self):
        """Returns the values of the rule's own variables, by position."""
        scale = self.optimizer.loss_scale
        names = [*COUNTERS, "ignored_loss_steps"]  # None without nonfinite_loss="skip"
        counters = {id(getattr(scale, name, None)) for name in names}
        found = [v for v in scale.variables if id(v) not in counters]
        manager = getattr(scale, "manager", None)
        found += [] if manager is None else manager.variables
        return [v.numpy().tolist() for v in found]

    def counted(self):
        scale = self.optimizer.loss_scale
        return [getattr(scale, name).numpy().item() for name in COUNTERS]

    def trained(self):
        state = optimizer_state(self.optimizer, self.variables)
        return [*(v.numpy() for v in self.variables), *state]

    def reasons(self):
        """Returns why steps were skipped."""
        return [why for _, why in self.optimizer.engine.record.skipped()[1]]


@pytest.fixture(params=EVERY.values(), ids=EVERY)
def make(request):
    return request.param


def test_a_bad_loss_moves_no_rule_and_the_step_is_counted(family, make):
    trained, without = (Trained(family, make()) for _ in range(2))
    for number, largest in enumerate(GOOD):
        trained(largest=largest)
        without(largest=largest)
        if number in {2, 3, 6}:
            before, good = trained.rule(), trained.trained()
            skipped, in_a_row, _ = trained.counted()
            trained(INF if number == 3 else NAN, NAN)
            assert trained.rule() == before
            assert_same(trained.trained(), good)
            assert trained.counted() == [skipped + 1, in_a_row + 1, False]
    # As if these steps had not been, to the bit.
    assert trained.rule() == without.rule()
    assert_same(trained.trained(), without.trained())
    assert trained.counted()[0] == 3 + without.counted()[0]


def test_an_overflow_moves_it_and_by_default_a_bad_loss_does_so_too(family, make):
    skips, told, told_of_losses = (
        Trained(family, make(), how) for how in ("skip", "backoff", "backoff")
    )
    for largest in (0.5, INF, 0.5, NAN, 0.25):
        skips(largest=largest)
        told(largest=largest)
        told_of_losses(1.0 if np.isfinite(largest) else largest, largest)
    assert told_of_losses.rule() == told.rule() == skips.rule()
    assert skips.counted() == told.counted() == told_of_losses.counted()
    assert_same(skips.trained(), told.trained())


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_the_loss_of_the_last_replica_alone_may_be_bad(family, mirrored, dtype):
    """Beside an overflow on the first one, too, which no sum in float16 shows."""
    with mirrored.scope():
        options = {} if dtype is None else {"communication_dtype": dtype}
        trained = Trained(family, DynamicLossScale(64.0, 2), **options)

    def each(loss, on_first):
        loss = last_replica_gets(loss, 1.0)
        on_first = last_replica_gets(1.0, on_first)
        trained.step(loss, [on_first * loss * tf.constant([0.5, 0.25])])

    run = tf.function(lambda *args: mirrored.run(each, args=args))
    for loss, on_first, scale in (
        (1.0, 1.0, 64.0),
        (NAN, 1.0, 64.0),
        (INF, 1.0, 64.0),
        (1.0, 1.0, 128.0),  # the second good step
        (1.0, INF, 64.0),
        (NAN, INF, 32.0 if dtype is None else 64.0),
    ):
        run(tf.constant(loss), tf.constant(on_first))
        assert float(trained.optimizer.loss_scale) == scale
    last = "gradients" if dtype is None else "nan"
    assert trained.reasons() == ["nan", "inf", "gradients", last]
    assert int(trained.optimizer.iterations.numpy()) == 2


#: Of a step of two optimizers: their losses, the factors of their gradients, and
#: whether the rule learns of a good step or of an overflow. None: of nothing.
SHARED = [
    ([1.0, 1.0], [1.0, 1.0], True),
    ([NAN, 1.0], [NAN, 1.0], None),
    ([1.0, NAN], [1.0, NAN], None),
    ([NAN, NAN], [NAN, NAN], None),
    ([NAN, 1.0], [NAN, INF], False),
    ([1.0, NAN], [INF, NAN], False),
    ([1.0, 1.0], [1.0, 1.0], True),
]


@pytest.mark.parametrize("case", ["dynamic", "page"])
def test_an_overflow_of_either_of_two_counts_but_no_bad_loss_does(family, case):
    scale = EVERY[case]()
    both = [Trained(family, scale) for _ in range(2)]
    alone = Trained(family, EVERY[case]())  # told of each step as a whole

    @tf.function
    def step(losses, factors):
        for one, loss, factor in zip(both, tf.unstack(losses), tf.unstack(factors)):
            one.step(loss, [factor * tf.constant([0.5, 0.25])])

    for losses, factors, told in SHARED:
        step(tf.constant(losses), tf.constant(factors))
        if told is not None:
            alone(1.0, 0.5 if told else INF)
        assert both[0].rule() == alone.rule(), (losses, factors)
    assert both[0].counted()[:2] == [5, 0]
    assert [int(one.optimizer.iterations.numpy()) for one in both] == [3, 3]


def test_beside_a_guard_each_reason_is_told_apart(family):
    scale, guard = DynamicLossScale(64.0, 2), GUARD.SkipsZeros()
    trained = Trained(family, scale, guard=guard)
    zeros = [tf.zeros([2]), tf.zeros([2])]
    trained()
    before = trained.trained()
    trained.run(tf.constant(1.0), zeros)
    assert_same(trained.trained(), before)
    assert (float(scale), int(scale.good_steps.numpy())) == (64.0, 1)
    assert trained.counted() == [0, 0, True]
    assert int(guard.zeros.numpy()) == 1
    trained()
    assert float(scale) == 128.0
    trained(NAN, NAN)
    assert float(scale) == 128.0
    assert int(scale.ignored_loss_steps.numpy()) == 1
    trained(1.0, INF)
    assert float(scale) == 64.0
    assert trained.reasons() == ["left out", "nan", "gradients"]


# Losses that are only infinite because they are summed in float16: their gradients are
# finite once the loss scale is low enough, so the loss scale must fall


START, FITS = 2.0**9, 2.0**6
#: A step's loss and largest gradient. Scaled, that of "f" is finite up to `FITS`.
LOSSES = {"g": (1.0, 0.5), "b": (NAN, NAN), "f": (INF, 2.0**121)}
#: How many optimizers share a loss scale; what they train on, time after time: a
#: function is a word, with a letter for each optimizer, or - if it takes no step; how
#: often, and the loss scale then; and how many steps each has applied at the end.
PROGRAMS = {
    "good steps of another do not hide them": (2, [(["g-", "-f"], 45, FITS)], [45, 15]),
    # The 13th of these losses counts, then the 26th and the 39th.
    "two tasks that alternate": (1, [(["g", "f"], 45, FITS)], [45 + 45 - 39]),
    "a bad batch now and then": (1, [([*"gggggggggb"], 6, START)], [54]),
    # The tenth of the first one is the fifth of the second one.
    "each counts its own": (
        3,
        [
            (["b-g"], 5, START),
            (["bbg"], 4, START),
            (["bbg"], 1, START / 2),
            (["bbg"], 4, START / 2),
            (["bbg"], 1, START / 4),
        ],
        [0, 0, 15],
    ),
}


@pytest.mark.parametrize("mode", ["eager", "graph", "mirrored"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_loss_scale_falls_until_they_fit_and_not_for_a_few(
    family, mode, name, request
):
    count, rounds, applied = PROGRAMS[name]
    strategy = request.getfixturevalue("mirrored") if mode == "mirrored" else None
    with scope_of(strategy):
        scale = DynamicLossScale(START, 10**6)
        every = [Trained(family, scale, rate=0.0) for _ in range(count)]

    def take(word):
        for one, letter in zip(every, word):
            if letter != "-":
                loss, largest = map(last_replica_gets, LOSSES[letter], LOSSES["g"])
                one.step(loss, [tf.stack([largest, 0.25])])

    functions = {}
    for words, times, expected in rounds:
        for word in words * times:
            if word not in functions:
                step = lambda word=word: take(word)  # noqa: E731
                if strategy:
                    step = lambda word=word: strategy.run(take, (word,))  # noqa: E731
                functions[word] = compiled(step, "graph" if strategy else mode)
            functions[word]()
        assert float(scale.numpy()) == expected
    found = [int(one.optimizer.applied_steps.numpy()) for one in every]
    assert found == applied


def test_an_optimizer_that_counts_nothing_has_every_tenth_counted(family):
    """As larq's, whose `iterations` stay at 0 while good steps are in between."""
    scale = DynamicLossScale(START, 10**6)
    trained = Trained(family, scale, rate=0.0, guard=SpikeGuard())
    counted = keras_versions.tensor_of(trained.optimizer.applied_steps)
    for number in range(1, 31):
        trained(NAN, NAN)
        trained()
        counted.assign(0)
        assert float(scale.numpy()) == START / 2.0 ** (number // 10)
