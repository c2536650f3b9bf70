"""What is known of a list of gradients, and that asking for it changes nothing."""

import gc
import weakref

import pytest
import tensorflow as tf
from exact import Trained

from lossscale.provenance.origins import Origins
from lossscale.provenance.walk import notes_of


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_gradients_know_the_loss_they_are_of(family, mode, dtype):
    """Eager mode multiplies before the product is noted, in a wider dtype too."""
    trained = Trained(family)
    (variable,) = trained.variables
    division, found = trained.optimizer.engine.division, []

    def step():
        with tf.GradientTape() as tape:
            loss = tf.cast(tf.reduce_sum(tf.convert_to_tensor(variable)), dtype)
            scaled = trained.optimizer.scale_loss(loss)
        value = variable if isinstance(variable, tf.Variable) else variable.value
        grads = tape.gradient(scaled, [value])
        graph = None if mode == "eager" else tf.compat.v1.get_default_graph()
        before = graph and len(graph.get_operations())
        origins = Origins(grads, division.uses.kinds)
        assert before == (graph and len(graph.get_operations()))
        found.append((origins.names, [loss is each for each in origins.losses]))
        found.append(origins.owners == [division])
        trained.apply(grads)

    (step if mode == "eager" else tf.function(step))()
    assert found == [({"scaled"}, [True]), True]
    assert trained.subtracted() == 1.0


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
