"""Loss scales that hold others: in every file of each Keras, and step by step.

Each loss scale of the library and three of a user's own, held by one of the user's own,
held by another. Their variables have the same names.
"""

from __future__ import annotations

import itertools
import json
import warnings

import golden
import numpy as np
import pytest
import tensorflow as tf
from driving import EAGER_REPLICAS, MODES, ON_OTHERS, drive
from every_loss_scale import CASES
from holders import (
    CLASSES,
    HELD,
    HOLDERS,
    Counts,
    chain,
    fill,
    law,
    state_by_path,
)
from installed import families
from limits import TENSORFLOW, skip_without
from models import (
    assert_same,
    checkpoint_of,
    compiled,
    data,
    inner_variables,
    optimizer_state,
    regression,
    variable_of,
)
from routes import ROUTES, backup_and_restore, read_file, there
from strategies import agreed, assert_bit_equal, last_replica_gets, scope_of

import lossscale
from lossscale import DynamicLossScale, LossScaleOptimizer, SpikeGuard
from lossscale.optimizer.files import names_in_files, plain_name


class TestNamesInFiles:
    """They are file format."""

    @pytest.mark.smoke
    @pytest.mark.parametrize("name", CASES)
    def test_those_of_a_loss_scale_of_the_library_are_as_ever(self, name):
        loss_scale = CASES[name]()
        names = [plain_name(variable) for variable in loss_scale.variables]
        assert list(names_in_files(loss_scale)) == names

    def test_the_outer_ones_are_plain_and_the_inner_ones_have_their_paths(self):
        loss_scale = Counts(Counts(SpikeGuard(DynamicLossScale(8.0))))
        of_all = ["consecutive_skipped_steps", "last_step_finite", "skipped_steps"]
        alike = [*of_all, "good_steps"]
        guards = ["above_in_a_row", "limit", "recent", "spikes", *of_all]
        expected = {
            *alike,
            *(f"loss_scale/{name}" for name in alike),
            *(f"guard_{name}" for name in guards),
            *(f"loss_scale/loss_scale/loss_scale/{name}" for name in alike),
            *("bad_steps", "current_loss_scale"),
        }
        found = names_in_files(loss_scale)
        assert found.keys() == expected
        assert found["good_steps"] is loss_scale.good_steps
        held = loss_scale.loss_scale
        assert found["loss_scale/good_steps"] is held.good_steps

    def test_no_name_is_a_folder_of_another(self):
        """A file of HDF5 has either a value or a folder of a name."""
        found = names_in_files(Counts(HELD["own-2.x"]()))
        assert "loss_scale" not in found
        assert "loss_scale/loss_scale_now" in found

    def test_a_path_that_is_the_name_of_another_variable(self):
        class Odd(Counts):
            def __init__(self, loss_scale):
                super().__init__(loss_scale)
                self.bad = self._add_weight("good", 1, tf.int64)
                self.good = self._add_weight("bad_steps", 2, tf.int64)

        loss_scale = Odd(DynamicLossScale(8.0))
        found = names_in_files(loss_scale)
        assert len(found) == len(loss_scale.variables)
        assert found["good"] is loss_scale.good

    def test_a_loss_scale_that_is_reached_by_two_paths_is_listed_once(self):
        loss_scale = Counts(DynamicLossScale(8.0))
        loss_scale.also = loss_scale.loss_scale
        found = names_in_files(loss_scale)
        assert list(map(id, found.values())) == list(map(id, loss_scale.variables))

    def test_an_optimizer_lists_each_variable_once(self, family):
        loss_scale = chain("dynamic", "counts-counts")
        optimizer = LossScaleOptimizer(family.optimizers.SGD(), loss_scale)
        listed = optimizer.variables
        listed = list(listed() if callable(listed) else listed)
        names = [getattr(variable, "path", variable.name) for variable in listed]
        assert len(set(names)) == len(names)
        fill(loss_scale)
        count = len(loss_scale.variables)
        own = listed[:count] if family.name == "keras3" else listed[-count:]
        values = {np.array(v).item() for v in own if v.dtype != "bool"}
        # Any value but the three flags is the value of one variable.
        assert len(values) >= count - 3

    def test_a_renamed_variable_is_a_variable(self, family):
        skip_without("weights in TensorFlow's format", family)  # Keras 2
        loss_scale = chain("dynamic", "counts-counts")
        optimizer = LossScaleOptimizer(family.optimizers.SGD(), loss_scale)
        held, name = loss_scale.loss_scale.good_steps, "loss_scale/good_steps:0"
        (found,) = (each for each in optimizer.variables() if each.name == name)
        assert isinstance(found, tf.Variable)
        found.assign(7)
        assert held.numpy() == found.numpy() == int(np.array(found)) == 7
        assert int(found + 1) == int(tf.convert_to_tensor(found)) + 1 == 8
        assert (int(found), float(found), bool(found)) == (7, 7.0, True)
        assert repr(found) == repr(held)
        assert int(tf.function(lambda: tf.identity(found) * 2)()) == 14
        assert (found.dtype, found.shape) == (held.dtype, held.shape)


#: Each that is held, with holders in turn.
EACH = list(zip(HELD, itertools.cycle(HOLDERS)))
LOOPS = ["eager", "graph", "xla", "replica", "replica-graph"]
#: How a model goes to disk and back.
WAYS = [*ROUTES, "BackupAndRestore"]


def model_of(family, loss_scale, built=True):
    """Returns a model, whose optimizer may have its slots."""
    optimizer = LossScaleOptimizer(family.optimizers.Adam(0.05), loss_scale)
    model = regression(family, optimizer)
    if built:
        optimizer.build(model.trainable_variables)
        optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for
    return model


def fill_model(model):
    """Gives each variable of a model's optimizer a value of its own."""
    fill(model.optimizer.loss_scale)
    rng = np.random.default_rng(5)
    for variable in inner_variables(model.optimizer):
        if len(variable.shape):
            variable.assign(rng.normal(size=variable.shape).astype(np.float32))
    model.optimizer.iterations.assign(11)


def state_of(model):
    """Returns all state of a model's optimizer."""
    if getattr(model.optimizer, "built", None) is False:  # Keras 3's, of an .h5 file
        model.optimizer.build(model.trainable_variables)
    state = state_by_path(model.optimizer.loss_scale)
    return state, optimizer_state(model.optimizer, model.trainable_variables)


def by_backup(family, model, fresh, folder):
    callbacks = family.keras.callbacks

    class Fills(callbacks.Callback):
        """Gives the state at the end of the epoch, before it is written."""

        def on_epoch_end(self, epoch, logs=None):
            del epoch, logs
            fill_model(self.model)

    class Stops(callbacks.Callback):
        """Ends the run at the beginning of the second epoch, when all is read."""

        def on_epoch_begin(self, epoch, logs=None):
            del logs
            if epoch == 1:
                raise InterruptedError

    x, y = data(np.random.default_rng(1), 4)
    for each, first in ((model, [Fills()]), (fresh, [])):
        listed = [*first, backup_and_restore(family, folder / "backup"), Stops()]
        with pytest.raises(InterruptedError):
            each.fit(x, y, batch_size=4, epochs=2, callbacks=listed, verbose=0)
    return fresh


def by(route):
    """Returns how a model is written by a route and read: it returns what was read."""
    if route == "BackupAndRestore":
        return by_backup

    def write_and_load(family, model, fresh, folder):
        used = there(family, route)
        used.write(model, folder / "model")
        return used.read(family, folder / "model", fresh)

    return write_and_load


def assert_whole(family, route, make, folder, scope=None):
    """Asserts that a route keeps all state of an optimizer, bit for bit."""
    with scope_of(scope), family.keras.utils.custom_object_scope(CLASSES):
        model, fresh = model_of(family, make()), model_of(family, make())
        fill_model(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error", lossscale.LossScaleWarning)
            loaded = by(route)(family, model, fresh, folder)
        (held, slots), (expected, expected_slots) = state_of(loaded), state_of(model)
    assert held.keys() == expected.keys()
    for path, value in expected.items():
        assert held[path].dtype == value.dtype
        np.testing.assert_array_equal(held[path], value, err_msg=path)
    assert_same(slots, expected_slots)
    assert type(loaded.optimizer.loss_scale) is type(model.optimizer.loss_scale)


@pytest.mark.parametrize(
    "route", [*ROUTES, pytest.param("BackupAndRestore", marks=pytest.mark.slow)]
)
def test_a_route_to_disk_keeps_a_holder_whole(family, route, tmp_path):
    def make():
        return chain("dynamic", "counts-counts")

    assert_whole(family, route, make, tmp_path)


def test_a_state_tree_keeps_a_holder_whole(family):
    if not hasattr(family.keras.Model, "get_state_tree"):
        pytest.skip("this Keras has no state tree")
    model = model_of(family, chain("dynamic", "counts-counts"))
    fill_model(model)
    tree, expected = model.get_state_tree("numpy_array"), state_of(model)[0]
    for variable in model.optimizer.loss_scale.variables:
        variable.assign(tf.zeros_like(variable))
    model.set_state_tree(tree)
    assert listed(state_of(model)[0]) == listed(expected)


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
@pytest.mark.parametrize("route", WAYS)
def test_a_route_to_disk_keeps_each_chain_whole(family, route, tmp_path):
    # What the loss scale is made of matters to names alone, in two kinds of files.
    few = None if route in ("checkpoint", ".weights.h5", ".h5") else 4
    for held, holders in EACH[::few]:
        folder = tmp_path / held
        folder.mkdir()
        assert_whole(family, route, lambda h=held, n=holders: chain(h, n), folder)


@pytest.mark.slow
@pytest.mark.parametrize("route", WAYS)
def test_a_route_to_disk_keeps_it_whole_on_two_replicas(
    family, route, mirrored, tmp_path
):
    if route == "SavedModel" and family.name != "keras3":
        pytest.skip("Keras 2 loads weights into no model that was loaded in a scope")

    def make():
        return chain("spike-guard", "counts-counts")

    assert_whole(family, route, make, tmp_path, mirrored)


def test_a_saver_of_sessions_keeps_a_chain_whole(tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loss_scale = chain("dynamic", "counts-counts")
        names = [variable.name for variable in loss_scale.variables]
        assert len(set(names)) == len(names)
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver(loss_scale.variables)
        values = session.run(list(loss_scale.variables))
        session.run(
            [v.assign(v + 1) for v in loss_scale.variables if v.dtype != "bool"]
        )
        before = session.run(list(loss_scale.variables))
        path = saver.save(session, str(tmp_path / "saved"))
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(list(loss_scale.variables)) == values
        saver.restore(session, path)
        assert session.run(list(loss_scale.variables)) == before


class TestFilesOf300:
    """What 3.0.0 wrote loads as well as by 3.0.0: tests/data/lossscale-3.0.0/held."""

    HOME = golden.DATA / "lossscale-3.0.0" / "held"

    @pytest.mark.parametrize("kind", ["guard", "own"])
    def test_a_checkpoint(self, family, kind):
        name = f"{family.name}-{kind}"
        optimizer = golden.holding(family, kind)
        model = golden.compiled_model(family, optimizer)
        path = str(self.HOME / f"{name}-checkpoint")
        needed = (2, 21) if family.name == "keras3" else (2, 15)
        if needed > TENSORFLOW:
            pytest.skip("written by a newer TensorFlow")
        checkpoint_of(model).read(path).expect_partial()
        expected = json.loads((self.HOME / f"{name}.json").read_text())
        assert listed(state_by_path(optimizer.loss_scale)) == expected

    def test_one_of_0_1_0_lacks_a_counter_of_each(self, family):
        """It lists the others first, since Keras 2 reads such a file by numbers."""
        if family.name != "keras2-new":
            pytest.skip("other optimizers' files have names, or no counter is missing")
        model, other = (model_of(family, Counts(DynamicLossScale(8.0))) for _ in "12")
        fill_model(model)
        values = model.optimizer.get_weights()[:-2]
        store = {str(n): np.array(value) for n, value in enumerate(values)}
        other.optimizer.load_own_variables(store)
        (held, slots), (expected, expected_slots) = state_of(other), state_of(model)
        new = "consecutive_skipped_steps"
        expected.update({new: np.int64(0), f"loss_scale/{new}": np.int64(0)})
        assert listed(held) == listed(expected)
        assert_same(slots, expected_slots)

    @pytest.mark.every
    @pytest.mark.parametrize("kind", ["guard", "own"])
    @pytest.mark.parametrize("suffix", [".keras", ".weights.h5", ".h5"])
    def test_a_file(self, family, kind, suffix):
        path = self.HOME / f"{family.name}-{kind}{suffix}"
        needed = (2, 21) if family.name == "keras3" else (2, 15)
        if not path.exists() or needed > TENSORFLOW:
            pytest.skip("3.0.0 could not write it, or a newer TensorFlow wrote it")
        model = golden.compiled_model(family, golden.holding(family, kind))
        model.optimizer.build(model.trainable_variables)
        # Keras 3 finds no "mse" of an .h5 file, bare too.
        known = {"mse": family.keras.losses.MeanSquaredError(), **CLASSES}
        with family.keras.utils.custom_object_scope(known):
            model = read_file(family, path, model)
        written = json.loads((self.HOME / f"{family.name}-{kind}.json").read_text())
        expected, loss_scale = dict(written), model.optimizer.loss_scale
        if family.name == "keras3" and kind == "own":
            # It wrote one of two variables of a name, the inner one.
            new = state_by_path(golden.holding(family, kind).loss_scale)
            lost = [name for name in written if f"loss_scale/{name}" in written]
            assert "good_steps" in lost
            expected.update({name: new[name].tolist() for name in lost})
        assert listed(state_by_path(loss_scale)) == expected
        iterations = written["good_steps"] if kind == "own" else None
        assert iterations is None or int(model.optimizer.iterations.numpy()) > 0


def listed(state):
    return {path: value.tolist() for path, value in state.items()}


#: Finite or not, and the largest gradient of a step. The fifth is a spike to the guards
#: of `CASES`, the third and the last but one are all zero, the second tiny.
STEPS = [
    (True, 1.0),
    (True, 2.0**-9),
    (True, 0.0),
    (True, 1.25),
    (True, 512.0),
    (False, 1.0),
    (True, 1.0),
    (False, 1.0),
    (True, 0.0),
    (True, 1.5),
]


def on_replicas(steps):
    """Returns the steps with what `driving.drive` gives the other replicas."""
    return [(flag, max(largest, ON_OTHERS)) for flag, largest in steps]


@pytest.mark.parametrize("holders", HOLDERS)
@pytest.mark.parametrize("held", HELD)
def test_a_step_is_applied_if_each_applies_it(held, holders):
    """And the held one's schedule and counters are what they are alone."""
    made = []

    def make():
        made.append(chain(held, holders))
        return made[-1]

    found, alone = drive(make, STEPS, "eager"), HELD[held]()
    assert found == law(held, holders, STEPS, alone)
    within = made[0].loss_scale.loss_scale
    assert listed(state_by_path(within)) == listed(state_by_path(alone))


def in_modes():
    """Returns each that is held with holders and a mode: of the modes two, in turn."""
    modes = itertools.cycle(MODES[1:])
    return [(*each, mode) for each in EACH for mode in (next(modes), next(modes))]


@pytest.mark.slow
@pytest.mark.parametrize(("held", "holders", "mode"), in_modes())
def test_in_every_mode(held, holders, mode, mirrored):
    steps = STEPS[:4] if mode in EAGER_REPLICAS else STEPS
    steps = on_replicas(steps) if "replica" in mode else steps
    found = drive(lambda: chain(held, holders), steps, mode, mirrored)
    assert found == law(held, holders, steps), holders


def steps_of(family, make, mode, mirrored, steps):
    """Returns the scales and the applied steps of an optimizer in a custom loop."""
    strategy = mirrored if "replica" in mode else None
    with scope_of(strategy):
        loss_scale = make()
        optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-20), loss_scale)
        variable = variable_of(family, np.array([1.0, 2.0], np.float32))
        optimizer.build([variable])
        optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for

    def each(grad):
        if strategy is not None:
            grad = last_replica_gets(grad, [0.0, ON_OTHERS])
        scaled = grad * optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply_gradients([(scaled, variable)])

    def step(grad):
        return each(grad) if strategy is None else strategy.run(each, args=(grad,))

    how = {"replica": "eager", "replica-graph": "graph"}.get(mode, mode)
    step = compiled(step, how)
    scales, applied, before = [], [], 0
    for is_finite, largest in steps:
        second = largest / 4.0 if is_finite else np.inf
        step(tf.constant([-largest, second], tf.float32))
        count = int(agreed(strategy, optimizer.iterations))
        applied.append(count > before)
        before = count
        scales.append(float(loss_scale.numpy()))
        if strategy is not None:
            assert_bit_equal(strategy, loss_scale.variables)
    assert np.isfinite(agreed(strategy, variable)).all()
    return scales, applied


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
@pytest.mark.parametrize("mode", LOOPS)
def test_an_optimizer_takes_the_steps_of_the_law(family, mode, mirrored):
    if "replica" in mode:
        skip_without("adding up over replicas", family)
    steps = STEPS[:4] if mode == "replica" else STEPS
    steps = on_replicas(steps) if "replica" in mode else steps
    keras = [each.name for each in families()].index(family.name)
    # All in a graph with the first Keras, and a third of them, in turn, elsewhere.
    turn, is_whole = keras + LOOPS.index(mode), keras == 0 and mode == "graph"
    for held, holders in EACH if is_whole else EACH[turn % 3 :: 3]:
        found = steps_of(
            *(family, lambda h=held, n=holders: chain(h, n), mode, mirrored, steps)
        )
        assert found == law(held, holders, steps), (held, holders)


@pytest.mark.slow
@pytest.mark.parametrize(("held", "holders"), EACH[::3])
def test_an_optimizer_in_a_session(held, holders):
    found = [each for each in families() if each.name == "keras2-legacy"]
    if not found:
        pytest.skip("only legacy optimizers of Keras 2 work in a tf.compat.v1 graph")
    scales, applied, before = [], [], 0
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loss_scale = chain(held, holders)
        inner = found[0].optimizers.SGD(2.0**-20)
        optimizer = LossScaleOptimizer(inner, loss_scale)
        variable = tf.Variable([1.0, 2.0])
        grad = tf.compat.v1.placeholder(tf.float32, [2])
        scaled = grad * optimizer.scale_loss(tf.constant(1.0))
        train = optimizer.apply_gradients([(scaled, variable)])
        current = loss_scale()
        session.run(tf.compat.v1.global_variables_initializer())
        for is_finite, largest in STEPS:
            second = largest / 4.0 if is_finite else np.inf
            session.run(train, {grad: np.array([-largest, second], np.float32)})
            count = int(session.run(optimizer.iterations))
            applied.append(count > before)
            before = count
            scales.append(float(session.run(current)))
    assert (scales, applied) == law(held, holders, STEPS)
