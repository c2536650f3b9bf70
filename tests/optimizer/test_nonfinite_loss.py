"""nonfinite_loss="skip": a loss scale does not learn of a loss that was bad itself.

A loss and its gradients are given from outside, so that each can be bad by itself. A
tape makes them, so it is seen that they belong together. Which of several losses is at
fault is in test_blame.py, and the rule of how many are ignored in
scales/test_ignored_losses.py.
"""

import exact
import numpy as np
import pytest
import tensorflow as tf
from every_loss_scale import CASES
from exact import of_loss
from guards import PAGE as GUARD
from limits import skip_without
from models import assert_same, optimizer_state
from strategies import last_replica_gets

import lossscale
from lossscale import DynamicLossScale, LossScaleManager

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


class Trained(exact.Trained):
    """One with two variables, and a step that is given a loss and gradients."""

    def __init__(self, family, loss_scale, how="skip", **options):
        super().__init__(family, loss_scale, (2, 2), nonfinite_loss=how, **options)
        self.run = tf.function(self.step)

    def step(self, loss, grads):
        self.apply(of_loss(self.optimizer.scale_loss, loss, grads))

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


@pytest.mark.parametrize("setting", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_a_bad_loss_moves_no_rule_and_the_step_is_counted(family, make, setting):
    """Nor does it add to what Keras's own optimizer accumulates."""
    for feature in setting:
        skip_without(feature, family)
    trained, without = (Trained(family, make(), setting=setting) for _ in range(2))
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
    for _ in range(9):  # one of these is one too many
        run(tf.constant(NAN), tf.constant(1.0))
    assert float(trained.optimizer.loss_scale) == scale / 2


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
    trained()
    trained.run(tf.constant(1.0), [tf.zeros([2]), tf.zeros([2])])
    assert trained.state() == (64.0, 1, 0)
    assert int(guard.zeros.numpy()) == 1
    trained()
    trained(NAN, NAN)
    assert trained.state() == (128.0, 0, 1)
    assert int(scale.ignored_loss_steps.numpy()) == 1
    trained(1.0, INF)
    assert trained.state() == (64.0, 0, 2)
    assert trained.reasons() == ["left out", "nan", "gradients"]
