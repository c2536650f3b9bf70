"""Every expression of a zoo in the forward pass: `fit` trains as the bare optimizer.

No layer has a bias. A bias's gradient is scaled whatever the layers do, and could speak
for the others.
"""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest
import tensorflow as tf
from expressions import EXPRESSIONS, FEATURES, GROUPS, IMPUTES
from installed import families
from limits import TENSORFLOW, skip_without

from lossscale import LossScaleOptimizer, LossScaleWarning

FIRST = families()[0]
RATE = 2.0**-7
#: How a model is compiled.
MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},
    "static": {"jit_compile": False},
    "xla": {"jit_compile": True},
}
#: Where an expression stands. A factor of the weights' gradients is what comes before
#: them; what comes after them is on the way back.
PLACES = {
    "before": ["expression", "dense"],
    "between": ["dense", "expression", "dense"],
    "both": ["expression", "dense", "expression", "dense"],
}


def kernel(shape, dtype="float32", **_):
    """Initializes weights: the same of each shape."""
    value = np.random.default_rng(shape[0]).normal(size=tuple(shape)) / 4
    return tf.cast(value, dtype)


def batches_of(names, place, is_static):
    """Returns batches of seven and five rows, or if shapes are static two of six."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(12, FEATURES)).astype(np.float32) / 2
    x[1, 2] = 0.0
    y = x @ np.array([[1], [-2], [0.5], [1]], np.float32)
    if place != "between" and IMPUTES.keys() >= set(names):
        x[2, 1] = x[7, 3] = np.nan
    batches = tf.data.Dataset.from_tensor_slices((x, y))
    return batches.batch(6 if is_static else 7, drop_remainder=is_static)


def loss_of(y, predictions):
    """Returns a loss in which no output has to do with another."""
    return tf.reduce_sum((predictions - y) ** 2, -1)


def forward(name, place, x, weights):
    """Returns what a network of these weights makes of a batch."""
    rest = iter(weights)
    for part in PLACES[place]:
        x = EXPRESSIONS[name](x) if part == "expression" else x @ next(rest)
    return x


def reference(name, place, is_static):
    """Returns the weights after gradient descent without any Keras."""
    weights = None
    for x, y in batches_of([name], place, is_static):
        weights = weights or kernels(PLACES[place], EXPRESSIONS[name](x).shape[1])
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_mean(loss_of(y, forward(name, place, x, weights)))
        grads = tape.gradient(loss, weights, unconnected_gradients="zero")
        weights = [w - RATE * g for w, g in zip(weights, grads)]
    return [weight.numpy() for weight in weights]


def kernels(parts, width):
    """Returns the weights of a network whose expressions are of a width."""
    ends = [number for number, part in enumerate(parts) if part == "dense"]
    return [
        kernel(
            [
                width if "expression" in parts[max(end - 1, 0) : end] else FEATURES,
                FEATURES if end < ends[-1] else 1,
            ]
        )
        for end in ends
    ]


class Network:
    """For each expression a branch of its own, from the same input."""

    def __init__(self, keras, names, place, is_static):
        class Expression(keras.layers.Layer):
            def __init__(self, function):
                super().__init__()
                self.function = function

            def call(self, x):
                return self.function(x)

        def dense(width):
            return keras.layers.Dense(width, use_bias=False, kernel_initializer=kernel)

        self.layers = {}
        for name in names:
            self.layers[name] = [
                Expression(EXPRESSIONS[name]) if part == "expression" else dense(4)
                for part in PLACES[place][:-1]
            ]
            self.layers[name].append(dense(1))
        if len(names) == 1 and not is_static:
            self.model = keras.Sequential(self.layers[names[0]])
            return
        inputs = keras.Input((FEATURES,), batch_size=6 if is_static else None)
        outputs = [self._branch(inputs, layers) for layers in self.layers.values()]
        if len(outputs) > 1:
            outputs = [keras.layers.Concatenate()(outputs)]
        self.model = keras.Model(inputs, outputs[0])

    @staticmethod
    def _branch(x, layers):
        for layer in layers:
            x = layer(x)
        return x

    def weights(self):
        """Returns each expression's."""
        return {
            name: [np.array(w) for layer in layers for w in layer.get_weights()]
            for name, layers in self.layers.items()
        }


def trained(family, names, place, mode, wrap):
    """Returns each expression's weights after `fit`, and what our warnings say."""
    is_static = mode in {"static", "xla"}
    network = Network(family.keras, names, place, is_static)
    optimizer = family.optimizers.SGD(RATE)
    optimizer = LossScaleOptimizer(optimizer) if wrap else optimizer
    how = MODES[mode]
    if TENSORFLOW < (2, 9):
        how = {key: value for key, value in how.items() if key != "jit_compile"}
    network.model.compile(optimizer, loss=loss_of, **how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network.model.fit(batches_of(names, place, is_static), verbose=0)
    ours = [str(w.message) for w in caught if w.category is LossScaleWarning]
    return network.weights(), ours


def agree(first, second):
    return all(
        np.allclose(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(first, second)
    )


def faults(family, names, place, mode):
    """Returns what is wrong with the wrapped optimizer, None if the bare one fails."""
    try:
        weights, found = trained(family, names, place, mode, wrap=True)
    except Exception as error:
        try:
            trained(family, names, place, mode, wrap=False)
        except Exception:
            return None
        return [f"{place}, {mode}: raises {error}"]
    found = [f"{place}, {mode}: {warning}" for warning in found]
    expected = {
        name: reference(name, place, mode in {"static", "xla"}) for name in names
    }
    wrong = [name for name in names if not agree(weights[name], expected[name])]
    if wrong:  # by the optimizer, or by Keras's mode alone?
        expected, _ = trained(family, names, place, mode, wrap=False)
        wrong = [name for name in wrong if not agree(weights[name], expected[name])]
    return found + [f"{place}, {mode}: {name} {weights[name]}" for name in wrong]


def assert_no_faults(family, names, places_and_modes):
    found = []
    for place, mode in places_and_modes:
        found.append(faults(family, names, place, mode))
        gc.collect()  # an optimizer that is alive listens to all that is eager
    for (place, mode), each in zip(places_and_modes, found):
        # What cannot be tried on the newest versions is not in the table for nothing.
        newest = TENSORFLOW >= (2, 21) and mode != "xla"
        assert each is not None or not newest, f"{place}, {mode}: bare, too"
    wrong = [fault for each in found if each for fault in each]
    assert not wrong, "\n".join(wrong)
    if all(each is None for each in found):
        pytest.skip("the bare optimizer cannot train it here")


def each_by_itself():
    """Returns a parameter for each Keras and expression: quick tests have the masks."""
    return [
        pytest.param(
            family,
            name,
            id=f"{family.name}-{name}",
            marks=[]
            if family.name == FIRST.name and name in IMPUTES
            else [pytest.mark.slow],
        )
        for family in families()
        for number, name in enumerate(EXPRESSIONS)
        # Of Kerases but the first a fifth: what is told eagerly is TensorFlow's.
        if family.name == FIRST.name or number % 5 == 0
    ]


@pytest.mark.either_keras2
@pytest.mark.parametrize(("family", "name"), each_by_itself())
def test_trains_as_the_bare_optimizer_eagerly(family, name):
    assert_no_faults(family, [name], [("both", "eager"), ("between", "eager")])


def groups(quick=(), of=None):
    """Returns a parameter for each Keras, or one of them, and group of expressions."""
    return [
        pytest.param(
            family,
            group,
            id=f"{family.name}-{group}",
            marks=[] if group in quick and family is FIRST else [pytest.mark.slow],
        )
        for family in ([of] if of else families())
        for group in GROUPS
    ]


@pytest.mark.either_keras2
@pytest.mark.parametrize(("family", "group"), groups(quick=["masks"]))
def test_trains_as_the_bare_optimizer_in_one_graph_with_others(family, group):
    names = [name for name in GROUPS[group] if _is_possible(name, jit_compile=None)]
    assert_no_faults(family, names, [("both", "graph")])


@pytest.mark.parametrize(("family", "group"), groups(of=FIRST))
def test_trains_as_the_bare_optimizer_where_shapes_are_static(family, group):
    names = [name for name in GROUPS[group] if _is_possible(name, jit_compile=None)]
    assert_no_faults(family, names, [("both", "static")])


@pytest.mark.parametrize(("family", "group"), groups(of=FIRST))
def test_trains_as_the_bare_optimizer_compiled_by_xla(family, group):
    skip_without("compile(jit_compile=...)", family)
    names = [name for name in GROUPS[group] if _is_possible(name, jit_compile=True)]
    assert_no_faults(family, names, [("both", "xla")])


def _is_possible(name, jit_compile):
    """Tells whether this TensorFlow has all of it, and if asked, XLA too."""

    def slopes(x):
        weights = kernels(PLACES["both"], EXPRESSIONS[name](x).shape[1])
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_sum(forward(name, "both", x, weights))
        return tape.gradient(loss, weights)

    x = tf.constant(np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, FEATURES))
    try:
        (tf.function(slopes, jit_compile=True) if jit_compile else slopes)(x)
    except Exception:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS["masks"])
def test_trains_as_the_bare_optimizer_in_a_graph_by_itself(name):
    """Beside others in one graph a wrong rule can stay unseen: their gradients tell."""
    assert_no_faults(FIRST, [name], [("both", "graph")])
