"""Every route to disk keeps the whole state, whatever has happened to an optimizer.

Wrapped late, loss scales and guards that are replaced, shared, copied, read from files:
then the optimizer is saved by each route, another is made of its config, and both go on
alike: weights, slots, the loss scale, the guard, counters, what is known of bad losses.
"""

import copy
import json

import numpy as np
import pytest
import tensorflow as tf
from exact import of_loss
from guards import Judges, tiny
from limits import skip_without
from models import (
    backup_and_restore,
    build,
    checkpoint_of,
    optimizer_state,
    variable_of,
)

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


class Tiny(Judges):
    """A user's guard, which leaves small steps out."""

    def __init__(self):
        super().__init__(tiny)


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
    "own": Tiny,
}
CUSTOM = {"Tiny": Tiny}


def sgd_of(family):
    """Returns an optimizer with slots and a learning rate schedule."""
    schedule = family.keras.optimizers.schedules.InverseTimeDecay(0.05, 1, 1.0)
    return family.optimizers.SGD(schedule, momentum=0.5)


class Run:
    """A model of one weight, its optimizer, and others beside that one."""

    def __init__(self, family, how, scale):
        self.family, self.how, self.others = family, how, []
        self.model = self.new_model()
        self.variable = self.model.trainable_variables[0]
        inner = sgd_of(family)
        if family.name == "keras2-legacy":
            inner._create_all_weights(self.model.trainable_variables)
        else:
            inner.build(self.model.trainable_variables)
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
        build(optimizer, self.model.trainable_variables)

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
        alone = LossScaleOptimizer(inner, SCALES["search"](), guard=Tiny())
        pairs = [*self.others, (alone, variable_of(self.family, [[1.0]]))]
        for letter in letters:
            for optimizer, variable in pairs:
                optimizer.build([variable])
                self._step(letter, optimizer, variable)
            self.take("T")

    def copied(self):
        if self.family.name == "keras2-new":
            return  # it cannot be copied, without a wrapper either
        before, guard = self.state(), self.optimizer.guard
        self.use(copy.deepcopy(self.optimizer))
        assert guard is None or self.optimizer.guard is not guard
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


#: How bad losses are taken, the first loss scale, and what happened.
HISTORIES = [
    ("backoff", "search", "take TOt, replace window spike, looked_at, take S, copied"),
    ("skip", "headroom", "share TNO, replace same kept, copied, beside NT, back"),
    ("skip", "window", "take NNTN, replace fixed own, refused, share tO, copied"),
    ("backoff", "fixed", "beside TO, back, copied, replace headroom wide, take SNT"),
    ("skip", "search", "looked_at, replace same own, replace search none, take NTNN"),
    ("backoff", "headroom", "replace same wide, share ON, back, replace window kept"),
]


def weights_of(optimizer):
    if hasattr(optimizer, "get_weights"):  # Keras 2's
        return optimizer.get_weights()
    return [v.numpy() for v in optimizer.variables]


def write_weights(model, path):
    np.savez(f"{path}.npz", *weights_of(model.optimizer))


def read_weights(_, path, other):
    with np.load(f"{path}.npz") as values:
        other.optimizer.set_weights([values[name] for name in values.files])
    return other


def write_checkpoint(model, path):
    checkpoint_of(model).write(str(path))


def read_checkpoint(_, path, other):
    checkpoint_of(other).read(str(path)).expect_partial()
    return other


def write_folder(model, path):
    if type(model).__module__.startswith("keras.src.models"):  # Keras 3's
        tf.saved_model.save(model, str(path))
    else:
        model.save(str(path), save_format="tf")


def read_folder(family, path, other):
    variables = f"{path}/variables/variables"
    if family.name == "keras3":
        tf.train.Checkpoint(other).read(variables).expect_partial()
        return other
    model = family.keras.models.load_model(str(path))
    model.optimizer.build(model.trainable_variables)
    model.load_weights(variables).expect_partial()
    return model


def by_model(ending):
    return (
        lambda model, path: model.save(f"{path}{ending}"),
        lambda family, path, _: family.keras.models.load_model(f"{path}{ending}"),
    )


def by_weights(ending):
    def read(_, path, other):
        other.load_weights(f"{path}{ending}")
        return other

    return lambda model, path: model.save_weights(f"{path}{ending}"), read


#: Every route of a model to disk and back: what a Keras must have for it, see
#: limits.py; a function of a model and a path without ending that writes; and one of
#: the family, the path and a model, which returns that model or a new one.
ROUTES = {
    "checkpoint": (None, write_checkpoint, read_checkpoint),
    "set_weights": (None, write_weights, read_weights),
    ".weights.h5": (
        "an optimizer in a .weights.h5 file",
        *by_weights(".weights.h5"),
    ),
    "weights": ("weights in TensorFlow's format", *by_weights("")),
    ".keras": ("an optimizer in a .keras file", *by_model(".keras")),
    ".h5": ("an optimizer in an .h5 file", *by_model(".h5")),
    "SavedModel": (None, write_folder, read_folder),
}
#: The routes of the quick tests, which take turns with the histories.
QUICK = ("checkpoint", "set_weights", ".weights.h5")


def rebuilt(run):
    """Returns a run of what the config of another one makes."""
    optimizer = run.optimizer
    config = json.loads(json.dumps(optimizer.get_config()))
    other = Run(run.family, "backoff", "fixed")
    other.use(type(optimizer).from_config(config, custom_objects=CUSTOM))
    other.model.set_weights(run.model.get_weights())
    return other


def every_route_and_history():
    for route in ROUTES:
        for number, history in enumerate(HISTORIES):
            marks = [] if QUICK[number % 3] == route else [pytest.mark.slow]
            yield pytest.param(route, history, id=f"{route}-{number}", marks=marks)


@pytest.mark.every
@pytest.mark.peer_defect(12)
@pytest.mark.parametrize(("route", "history"), [*every_route_and_history()])
def test_what_is_rebuilt_goes_on_alike(family, tmp_path, route, history):
    (feature, write, read), (how, scale, happened) = ROUTES[route], history
    if feature is not None:
        skip_without(feature, family)
    run = Run(family, how, scale)
    for each in happened.split(", "):
        name, *arguments = each.split()
        more = [tmp_path] if name == "back" else []
        getattr(run, name)(*arguments, *more)
    run.take("TN")
    other = rebuilt(run)
    assert [*other.optimizer._own_variables()] == [*run.optimizer._own_variables()]
    other.take("ONt")
    with family.keras.utils.custom_object_scope(CUSTOM):
        write(run.model, tmp_path / "file")
        other.model = read(family, tmp_path / "file", other.model)
    other.model.set_weights(run.model.get_weights())  # not in lists of an optimizer
    other.optimizer = other.model.optimizer
    (other.variable,) = other.model.trainable_variables
    other.optimizer.build([other.variable])
    assert other.state() == run.state()
    assert run.take(TAIL) == other.take(TAIL)


@pytest.mark.smoke
@pytest.mark.peer_defect(6)
def test_a_checkpoint_is_read_before_the_build(family, tmp_path):
    """As programs do: the slots and the first step are right then, too."""
    run, other = (Run(family, "skip", "search") for _ in range(2))
    run.take("TNNOTNT")
    path = checkpoint_of(run.model).write(str(tmp_path / "checkpoint"))
    scale = SCALES["search"]()
    other.optimizer = LossScaleOptimizer(sgd_of(family), scale, nonfinite_loss="skip")
    other.model.compile(other.optimizer, family.keras.losses.MeanSquaredError())
    status = checkpoint_of(other.model).read(path)
    # The slots of an optimizer that is not built yet are restored when it is.
    status.assert_existing_objects_matched()
    assert float(scale) == float(run.optimizer.loss_scale)
    other.optimizer.build(other.model.trainable_variables)
    assert other.state() == run.state()
    assert run.take(TAIL) == other.take(TAIL)


@pytest.mark.slow
@pytest.mark.peer_defect(12)
def test_a_fit_that_is_cut_goes_on_from_its_backup(family, tmp_path):
    """What a ModelCheckpoint writes is a file of some route."""

    def fit(run, *callbacks):
        """Trains for four epochs of nine steps, with losses of all kinds."""
        x = np.float32([1, NAN, 1, NAN, NAN, 2.0**63, 1, 1, NAN])[:, None]
        how = {"epochs": 4, "shuffle": False, "verbose": 0, "callbacks": [*callbacks]}
        run.model.fit(x, np.zeros_like(x), 1, **how)

    def stop(epoch, _):
        if epoch == 2:
            raise InterruptedError

    whole, cut, resumed = (Run(family, "skip", "window") for _ in range(3))
    fit(whole)
    stops = family.keras.callbacks.LambdaCallback(on_epoch_begin=stop)
    with pytest.raises(InterruptedError):
        fit(cut, backup_and_restore(family, tmp_path), stops)
    fit(resumed, backup_and_restore(family, tmp_path))
    assert resumed.state() == whole.state()


def test_the_variables_of_a_loss_scale_depend_on_no_other_optimizer(family):
    def wrapped(scale, how):
        inner = family.optimizers.SGD(0.5)
        return LossScaleOptimizer(inner, scale, nonfinite_loss=how)

    for first, second in (("skip", "backoff"), ("backoff", "skip")):
        scale = wrapped(DynamicLossScale(), first).loss_scale
        # A copy of one that counts no ignored losses is free.
        for each in [scale, copy.deepcopy(scale)][: 2 if first == "skip" else 1]:
            with pytest.raises(ValueError, match=f'must be "{first}" as in the'):
                wrapped(each, second)
        wrapped(scale, first)


@pytest.mark.each_keras
def test_lists_that_fit_nothing_change_nothing(family):
    """With a guard and without, too long and too short, in another order."""
    runs = {}
    for guard, how in [*((each, "backoff") for each in GUARDS), ("none", "skip")]:
        runs[guard, how] = run = Run(family, how, "search")
        run.replace("search", guard)
        run.take("TTOT")
    del runs["kept", "backoff"]  # it has none, too
    lists = {name: weights_of(run.optimizer) for name, run in runs.items()}
    plain = lists["none", "backoff"]
    lists.update(longer=[*plain, np.float32(0)], turned=plain[::-1])
    lists.update(shorter=plain[:-1], empty=[])
    for name, run in runs.items():
        before, count = run.state(), len(run.optimizer._own_variables())
        for other, values in lists.items():
            if other != name:
                with pytest.raises(ValueError, match=r"`weights` must be the"):
                    run.optimizer.set_weights(values)
                assert run.state() == before, (name, other)
        run.optimizer.set_weights(lists[name])
        is_last = family.name != "keras3"
        of_inner = lists[name][:-count] if is_last else lists[name][count:]
        run.optimizer.set_weights(of_inner)
        assert run.state() == before
