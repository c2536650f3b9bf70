"""Whatever has happened to an optimizer, its variables are those that its config makes.

A history is drawn: wrapped late, loss scales and guards that are replaced, shared,
copied, read from files. Then the optimizer is saved by each route, another is made of
its config, and both go on alike: weights, slots, the loss scale, the guard, counters.
"""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import tensorflow as tf
from exact import of_loss
from guards import Judges, tiny
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from models import optimizer_state, variable_of
from routes import ROUTES, there

from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScaleOptimizer,
    SpikeGuard,
)

INF, NAN = float("inf"), float("nan")
#: By letter the loss and the gradient of a step: good, a bad loss, an overflow, a spike
#: and one that is so small that `tiny` leaves it out.
STEPS = {"T": (1, 1), "N": (NAN, NAN), "O": (1, INF), "S": (1, 2**9), "t": (1, 0.25)}
TAIL = "TNTTSOTTtNNTSTT"
SCALES = {
    "search": lambda: DynamicLossScale(2.0**4, 3, search_period=1),
    "window": lambda: DynamicLossScale(
        2.0**6, 2, overflow_tolerance=0.5, backoff_cooldown=2, hysteresis=2
    ),
    "headroom": lambda: HeadroomLossScale(2.0**8),
    "fixed": lambda: FixedLossScale(8.0, skip_nonfinite=True),
}
GUARDS = {
    "none": lambda: None,
    "kept": lambda: "kept",
    "spike": lambda: SpikeGuard(window=3),
    "wide": lambda: SpikeGuard(window=5),
    "own": lambda: Judges(tiny),
}
CUSTOM = {"Judges": lambda **_: Judges(tiny)}


class Run:
    """A model of one weight, its optimizer, and others beside that one."""

    def __init__(self, family, how, scale):
        self.family, self.how, self.others = family, how, []
        self.model = self.new_model()
        self.variable = self.model.trainable_variables[0]
        inner = family.optimizers.SGD(2.0**-6, momentum=0.5)
        inner.build(self.model.trainable_variables) if family.name != (
            "keras2-legacy"
        ) else inner._create_all_weights(self.model.trainable_variables)
        inner.apply_gradients([(tf.ones([1, 1]), self.variable)])  # bare, at first
        self.use(LossScaleOptimizer(inner, SCALES[scale](), nonfinite_loss=how))

    def new_model(self):
        keras = self.family.keras
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return keras.Sequential([keras.Input((1,)), layer])

    def use(self, optimizer):
        self.optimizer = optimizer
        loss = self.family.keras.losses.MeanSquaredError()
        self.model.compile(optimizer, loss)
        optimizer.build(self.model.trainable_variables)
        optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for

    def take(self, letters):
        """Takes steps. Returns the state after each."""
        return [self._step(letter, self.optimizer, self.variable) for letter in letters]

    def _step(self, letter, optimizer, variable):
        loss, grad = STEPS[letter]
        loss, grad = tf.constant(loss, tf.float32), tf.constant([[grad]], tf.float32)
        grads = of_loss(optimizer.scale_loss, loss, [grad])
        optimizer.apply_gradients([(grads[0], variable)])
        return self.state()

    def state(self):
        own = self.optimizer._own_variables()
        values = {name: v.numpy().tolist() for name, v in own.items()}
        inner = optimizer_state(self.optimizer, [self.variable])
        return {**values, "inner": str(inner), "weight": self.variable.numpy().item()}

    # What may happen.

    def levels(self):
        """Returns what a loss scale that is replaced hands on of bad losses."""
        saved = self.optimizer.engine._saved()
        return {name: int(variable.numpy()) for name, variable in saved.items()}

    def replace(self, scale, guard):
        self.take("N")
        before = self.levels()
        scale = self.optimizer.loss_scale if scale == "same" else SCALES[scale]()
        self.use(self.optimizer.with_loss_scale(scale, guard=GUARDS[guard]()))
        assert self.levels() == before

    def refused(self):
        before = self.state()
        with pytest.raises(TypeError, match="`loss_scale` must not be None"):
            self.optimizer.with_loss_scale(None, guard=SpikeGuard())
        assert self.state() == before

    def share(self, letters):
        """With an optimizer that stays, and one of the loss scale's."""
        inner = self.family.optimizers.SGD(0.5)
        scale = self.optimizer.loss_scale
        other = LossScaleOptimizer(inner, scale, nonfinite_loss=self.how)
        self.others.append((other, variable_of(self.family, [[1.0]])))
        self.beside(letters)

    def beside(self, letters):
        """Steps of others between ours."""
        inner = self.family.optimizers.SGD(0.5)
        alone = LossScaleOptimizer(inner, SCALES["search"](), guard=Judges(tiny))
        pairs = [*self.others, (alone, variable_of(self.family, [[1.0]]))]
        for letter in letters:
            for optimizer, variable in pairs:
                optimizer.build([variable])
                self._step(letter, optimizer, variable)
            self.take("T")

    def copied(self):
        if self.family.name == "keras2-new":
            return  # it cannot be copied, without a wrapper either
        before = self.state()
        self.use(copy.deepcopy(self.optimizer))
        is_whole = self.family.name != "keras3"  # which begins `iterations` again
        after = self.state()
        assert {**after, "inner": is_whole and after["inner"]} == {
            **before,
            "inner": is_whole and before["inner"],
        }

    def looked_at(self):
        self.optimizer.loss_scale.keep_largest()

    def back(self, folder):
        """Reads a checkpoint of what was there before it was replaced."""
        checkpoint = tf.train.Checkpoint(optimizer=self.optimizer)
        path = checkpoint.write(str(folder / "before"))
        self.replace("search", "own")
        checkpoint = tf.train.Checkpoint(optimizer=self.optimizer)
        checkpoint.read(path).expect_partial()


def actions():
    letters = st.text("TTTNOSt", min_size=1, max_size=4)
    scales = st.sampled_from(["same", *SCALES])
    return st.one_of(
        st.tuples(st.just("take"), letters),
        st.tuples(st.just("replace"), scales, st.sampled_from([*GUARDS])),
        st.tuples(st.sampled_from(["share", "beside"]), letters),
        st.tuples(st.sampled_from(["copied", "looked_at", "refused", "back"])),
    )


HISTORIES = st.tuples(
    st.sampled_from(["backoff", "skip"]),
    st.sampled_from([*SCALES]),
    st.lists(actions(), min_size=4, max_size=7),
)


def rebuilt(run):
    """Returns a run of what the config of another one makes."""
    optimizer = run.optimizer
    config = json.loads(json.dumps(optimizer.get_config()))
    other = Run(run.family, "backoff", "fixed")
    other.use(type(optimizer).from_config(config, custom_objects=CUSTOM))
    other.model.set_weights(run.model.get_weights())
    return other


#: The quick tests have these.
QUICK = ("checkpoint", "set_weights")


@pytest.mark.every
@pytest.mark.peer_defect(12)
@pytest.mark.parametrize(
    "route",
    [pytest.param(r, marks=[pytest.mark.slow] * (r not in QUICK)) for r in ROUTES],
)
def test_what_is_rebuilt_goes_on_alike(family, tmp_path_factory, route):
    route = there(family, route)

    @settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],  # to shrink one that fails takes minutes
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(HISTORIES)
    def goes_on(history):
        how, scale, happened = history
        run, folder = Run(family, how, scale), tmp_path_factory.mktemp("histories")
        for name, *arguments in happened:
            more = [folder] if name == "back" else []
            getattr(run, name)(*arguments, *more)
        run.take("TN")
        other = rebuilt(run)
        assert [*other.optimizer._own_variables()] == [*run.optimizer._own_variables()]
        other.take("ONt")
        with family.keras.utils.custom_object_scope(CUSTOM):
            route.write(run.model, folder / "file")
            other.model = route.read(family, folder / "file", other.model)
        other.model.set_weights(run.model.get_weights())  # not in lists of an optimizer
        other.optimizer = other.model.optimizer
        (other.variable,) = other.model.trainable_variables
        other.optimizer.build([other.variable])
        assert other.state() == run.state()
        assert run.take(TAIL) == other.take(TAIL)

    goes_on()


def test_the_variables_of_a_loss_scale_depend_on_no_other_optimizer(family):
    def wrapped(scale, how):
        inner = family.optimizers.SGD(0.5)
        return LossScaleOptimizer(inner, scale, nonfinite_loss=how)

    for first, second in (("skip", "backoff"), ("backoff", "skip")):
        scale = DynamicLossScale()
        for each in (scale, copy.deepcopy(wrapped(scale, first).loss_scale)):
            if each is scale or first == "skip":
                with pytest.raises(ValueError, match=f'must be "{first}" as in the'):
                    wrapped(each, second)
        wrapped(scale, first)


def test_lists_that_fit_nothing_change_nothing(family):
    """With a guard and without, too long and too short, in another order."""

    def of(guard, how="backoff"):
        run = Run(family, how, "search")
        run.replace("search", guard)
        run.take("TTOT")
        return run

    def weights(run):
        optimizer = run.optimizer
        if hasattr(optimizer, "get_weights"):
            return optimizer.get_weights()
        return [np.array(v.numpy()) for v in optimizer.variables]

    plain, spike, wide, own, skip = (
        *map(of, ("none", "spike", "wide", "own")),
        of("none", "skip"),
    )
    lists = {name: weights(run) for name, run in (
        ("plain", plain), ("spike", spike), ("wide", wide), ("own", own), ("skip", skip)
    )}  # fmt: skip
    lists["longer"] = [*lists["plain"], np.float32(0)]
    lists["shorter"] = lists["plain"][:-1]
    lists["turned"] = lists["plain"][::-1]
    lists["empty"] = []
    runs = {"plain": plain, "spike": spike, "wide": wide, "own": own, "skip": skip}
    for name, run in runs.items():
        before = run.state()
        for other, values in lists.items():
            if other != name:
                with pytest.raises(ValueError, match=r"`weights` must be the"):
                    run.optimizer.set_weights(values)
                assert run.state() == before, (name, other)
        run.optimizer.set_weights(lists[name])
        bare = [np.array(v) for v in lists[name]]
        count = len(run.optimizer._own_variables())
        of_inner = bare[count:] if family.name == "keras3" else bare[:-count]
        run.optimizer.set_weights(of_inner)
        assert run.state() == before
