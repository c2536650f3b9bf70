"""The witness changes nothing, and the step asks nothing else of its package."""

from __future__ import annotations

import gc
import weakref

import pytest
import tensorflow as tf
from exact import Trained, changes_nothing, clip, sharing
from lossscale.provenance.witness import Witness

from lossscale.provenance.walk import notes_of
from lossscale.runtime import graphs

PUBLIC = [name for name in vars(Witness) if not name.startswith("_")]
METHODS = [name for name in PUBLIC if callable(getattr(Witness, name))]


def program(trained, other):
    """Uses all that a loop can do with two optimizers that share a loss scale."""
    loss_scale = trained.optimizer.loss_scale
    trained.apply(clip(trained.unscaled(2.0)))
    trained.apply(trained.scaled(2.0))
    trained.apply(changes_nothing(trained.scaled(2.0)))
    (grad,) = other.scaled(1.0)
    other.apply([grad / loss_scale()])
    other.apply(loss_scale.unscale(other.scaled(1.0)))
    loss_scale.scale(tf.constant(1.0))


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["eager", "graph", "session state"])
def test_it_adds_no_operation_and_changes_no_variable(family, mode, monkeypatch):
    trained, other = sharing(family)
    trained.build()
    other.build()
    variables = [
        *trained.optimizer.loss_scale.variables,
        *trained.variables,
        *trained.optimizer.engine.division.variables().values(),
    ]
    called = set()

    def count():
        every = [graph for graph in graphs.visible_graphs() if graph is not None]
        return [len(graph.get_operations()) for graph in every]

    def values():
        if not tf.executing_eagerly():
            return None
        return [variable.numpy().tolist() for variable in variables]

    def watched(name, method):
        def call(*args, **kwargs):
            before = count(), values()
            result = method(*args, **kwargs)
            called.add(name)
            assert (count(), values()) == before, name
            return result

        return call

    for name in METHODS:
        method = getattr(Witness, name)
        wrapped = watched(name, method)
        if isinstance(vars(Witness)[name], staticmethod):
            wrapped = staticmethod(wrapped)
        monkeypatch.setattr(Witness, name, wrapped)
    if mode == "session state":  # there the last scale stands for the state
        for each in (trained, other):
            each.optimizer.engine.division._state = None
    if mode == "eager":
        program(trained, other)
        float(trained.optimizer.loss_scale)
    else:
        tf.function(program)(trained, other)
    expected = {"origins", "note_loss", "note_applied", "note_unscaled", "before"}
    expected |= {"owners", "note_read", "note_weights", "note_unscaled_by"}
    if mode == "session state":
        expected |= {"note_last_scale"}
    assert expected <= called


def test_notes_end_with_their_graph_and_with_their_owner():
    class Owner:
        """Whoever notes something."""

    owner, other, graph = Owner(), Owner(), tf.Graph()
    notes = notes_of(graph, owner, set)
    notes.add("something")
    assert notes_of(graph, owner, set) is notes
    assert notes_of(graph, other, set) == set()
    assert notes_of(tf.Graph(), owner, set) == set()
    kept = weakref.ref(notes)
    del notes, owner
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_loss_of_any_dtype_is_to_blame(family, mode, dtype):
    """Eager mode multiplies before the product is noted, in a wider dtype too."""
    trained = Trained(family)
    trained.build()
    (variable,) = trained.variables
    found = []

    def step():
        with tf.GradientTape() as tape:
            loss = tf.cast(tf.reduce_sum(tf.convert_to_tensor(variable)), dtype)
            scaled = trained.optimizer.scale_loss(loss)
        value = variable if isinstance(variable, tf.Variable) else variable.value
        grads = tape.gradient(scaled, [value])
        origins = trained.optimizer.engine.division.witness.origins(grads)
        found.append((origins.names, [loss is each for each in origins.losses]))
        trained.apply(grads)

    (step if mode == "eager" else tf.function(step))()
    assert found == [({"scaled"}, [True])]
    assert trained.subtracted() == 1.0
