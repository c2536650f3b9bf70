"""What every LossScale promises, each with arguments that are not the defaults.

A new loss scale adds one entry to `DECLARED` in support/every_loss_scale.py.
"""

import json
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf
from driving import EAGER_REPLICAS, MODES, drive, finite, magnitude, state
from every_loss_scale import CASES, DECLARED
from models import compiled

import lossscale

RUN = "TTFTFFTTTTFT"


@pytest.fixture(params=CASES.values(), ids=CASES)
def make(request):
    return request.param


def follow(loss_scale, run):
    for number, flag in enumerate(finite(run)):
        loss_scale.adjust(flag, magnitude(number))
    return loss_scale


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("name", DECLARED)
def test_its_rule(name, mode):
    declared = DECLARED[name]
    run, expected = declared.rule
    make = next(iter(declared.cases.values()))
    scales, _ = drive(make, finite(run), mode)
    assert scales == list(map(float, expected.split()))


def restored(make, value):
    loss_scale = make()
    if not hasattr(loss_scale, "current_loss_scale"):
        pytest.skip("its value is no variable")
    loss_scale.current_loss_scale.assign(value)
    return loss_scale


@pytest.mark.smoke
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("value", [0.0, -8.0, np.nan, np.inf, 0.5])
def test_a_restored_value_that_is_no_loss_scale_is_replaced(make, value, flag):
    """Keras 3's own wrapper can write 0, and a rule that multiplies never leaves it."""
    loss_scale = restored(make, value)
    if value == 0.5 and not hasattr(loss_scale, "min_loss_scale"):
        pytest.skip("it has no floor")
    with pytest.warns(
        lossscale.LossScaleWarning, match="must be finite and at least"
    ) as caught:
        loss_scale.adjust(flag, magnitude(0))
    (warned,) = caught  # once, and of the caller
    assert warned.filename == __file__
    expected = loss_scale.min_loss_scale if value == 0.5 else float(make())
    assert float(loss_scale) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            loss_scale.adjust(True, magnitude(0))
    assert np.isfinite(np.hstack(state(loss_scale))).all()


@pytest.mark.filterwarnings("ignore::lossscale.LossScaleWarning")
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "v1"])
@pytest.mark.parametrize("name", ["dynamic", "headroom", "page"])
def test_it_is_replaced_in_every_mode(name, mode, mirrored):
    make = CASES[name]
    scales, _ = drive(lambda: restored(make, np.nan), [False], mode, mirrored)
    assert scales == [float(make())]


@pytest.mark.smoke
def test_config_through_json_is_the_constructors_arguments(make):
    first = follow(make(), RUN)
    config = json.loads(json.dumps(first.get_config()))
    second = type(first).from_config(config)
    assert second.get_config() == first.get_config() == make().get_config()
    assert state(second) == state(make())  # never the state
    assert (second().dtype, second().shape) == (tf.float32, ())
    assert type(first)(**config).get_config() == config
    serialized = json.loads(json.dumps(lossscale.serialize(first)))
    for third in (lossscale.deserialize(serialized), lossscale.get(serialized)):
        assert type(third) is type(first)
        assert third.get_config() == first.get_config()


def test_a_number_takes_no_variables_place(make):
    loss_scale = make()
    loss_scale.keep_largest()
    named = [(loss_scale, "last_largest", loss_scale.last_largest)]
    for module in (loss_scale, *loss_scale.submodules):
        held = vars(module).items()
        named += [(module, n, v) for n, v in held if isinstance(v, tf.Variable)]
    assert {id(v) for v in loss_scale.variables} < {id(v) for _, _, v in named}
    for module, name, variable in named:
        value = variable.numpy()
        for each in (value, value.tolist(), tf.constant(value), tf.identity(variable)):
            line = rf"`{name}` must be .* got .*\. Write loss_scale\.{name}\.assign\("
            with pytest.raises(AttributeError, match=re.compile(line, re.DOTALL)):
                setattr(module, name, each)
        assert getattr(module, name) is variable


@pytest.mark.smoke
def test_a_checkpoint_holds_the_whole_state(make, tmp_path):
    first = follow(make(), RUN)
    path = tf.train.Checkpoint(scale=first).write(str(tmp_path / "checkpoint"))
    second, later = make(), tf.train.Checkpoint()
    tf.train.Checkpoint(scale=second).read(path).assert_consumed()
    status = later.read(path)
    later.scale = make()  # restored as soon as there is an object
    status.assert_consumed()
    assert state(second) == state(later.scale) == state(first)


@pytest.mark.slow
@pytest.mark.peer_defect(29)
def test_the_whole_state_goes_on_where_it_is_compiled(make, tmp_path):
    def compiled_run(loss_scale, run, mode):
        step = compiled(lambda *known: loss_scale.adjust(*known)[1], mode)
        for number, flag in enumerate(finite(run)):
            step(tf.constant(flag), tf.constant(magnitude(number)))
        return state(loss_scale)

    first, rest = "FFFTFTTFF", "FTTFFFFFFFFF"  # down to the floor, if there is one
    saved = make()
    before = compiled_run(saved, first, "graph")
    path = tf.train.Checkpoint(scale=saved).write(str(tmp_path / "checkpoint"))
    restored = make()
    tf.train.Checkpoint(scale=restored).read(path).assert_consumed()
    assert state(restored) == before == state(follow(make(), first))
    expected = state(follow(follow(make(), first), rest))
    assert compiled_run(restored, rest, "xla") == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_mode_gives_what_eager_gives(name, mirrored):
    make = CASES[name]
    expected = drive(make, finite(RUN), "eager")
    for mode in MODES[1:]:
        if "replica" in mode and name.startswith("dynamic-"):
            continue  # the class is the same
        run = finite(RUN[:3] if mode in EAGER_REPLICAS else RUN)
        scales, applied = drive(make, run, mode, mirrored)
        assert scales == expected[0][: len(run)], mode
        assert applied == expected[1][: len(run)], mode


@pytest.mark.smoke
def test_adjust_is_update_with_the_flag_known(make):
    by_flag, by_grads = make(), make()
    for flag in finite(RUN):
        told = by_flag.adjust(flag, 1.0)
        seen = by_grads.update([tf.constant([1.0, 1.0 if flag else np.nan])])
        assert bool(told[1]) == bool(seen[1])
        assert told[0] is seen[0] is None
        assert state(by_flag) == state(by_grads)


def test_counters_count_what_was_looked_at(make):
    loss_scale, seen = make(), []
    counters = [
        loss_scale.skipped_steps,
        loss_scale.consecutive_skipped_steps,
        loss_scale.last_step_finite,
    ]
    assert [each.dtype for each in counters] == [tf.int64, tf.int64, tf.bool]
    for letter in "TFFT":
        follow(loss_scale, letter)
        seen.append([each.numpy() for each in counters])
        if loss_scale.needs_largest:
            largest = magnitude(0) if letter == "T" else np.inf
            assert loss_scale.last_largest.numpy() == largest
    if loss_scale.checks_gradients:
        assert seen == [[0, 0, True], [1, 1, False], [2, 2, False], [2, 0, True]]


def test_no_gradients_are_finite(make):
    for grads in ([], [None], {"a": None}, [tf.constant([1])]):
        loss_scale = make()
        assert bool(loss_scale.update(grads)[1])
        assert loss_scale.skipped_steps.numpy() == 0


def test_made_within_a_function_once(make):
    made = []

    @tf.function
    def step():
        if not made:
            made.append(make())
        return made[0]()

    assert float(step()) == float(make())
    follow(made[0], "F")
