"""Programs of TensorFlow 1, run as each of its modes and TensorFlow 2's would."""

import contextlib

import pytest
import tensorflow as tf
from models import compiled

v1 = tf.compat.v1
IS_EAGER = tf.executing_eagerly()
#: A session of a graph, and one as it was in TensorFlow 1. A process that began with
#: `disable_eager_execution` has no eager mode: its programs build the implicit graph.
SESSIONS = ["session", "session-of-1"] if IS_EAGER else ["implicit"]
#: Eager mode and `tf.function`, too.
MODES = ["eager", "function", *SESSIONS] if IS_EAGER else SESSIONS
needs_eager = pytest.mark.skipif(not IS_EAGER, reason="a process without eager mode")


class Eagerly:
    """Runs steps one after the other, as they are or in a `tf.function`."""

    def __init__(self, mode):
        self._mode = "graph" if mode == "function" else mode

    def loss(self, build):
        """Returns a loss as this mode takes it: here a function."""
        return build

    def step(self, build):
        """Returns a function that runs what `build` makes of a number.

        In a session `build` is called once, with a placeholder.
        """

        def step(value):
            build(value)  # a tf.function returns no operation

        wrapped = compiled(step, self._mode)
        return lambda value=0.0: wrapped(tf.constant(value, tf.float32))

    def value(self, tensor):
        return tensor().numpy() if callable(tensor) else tensor.numpy()


class InSession:
    """Builds a graph, and runs it. Variables are initialized before the first run."""

    def __init__(self, session):
        self.session = session
        self._initialized = set()

    def loss(self, build):
        return build()

    def step(self, build):
        fed = v1.placeholder(tf.float32, [])
        op = build(fed)
        return lambda value=0.0: self.run(op, {fed: value})

    def value(self, tensor):
        return self.run(tensor() if callable(tensor) else tensor)

    def run(self, fetched, fed=None):
        new = [v for v in v1.global_variables() if v.name not in self._initialized]
        self.session.run(v1.variables_initializer(new))
        self._initialized |= {variable.name for variable in new}
        return self.session.run(fetched, fed)


@contextlib.contextmanager
def running(mode):
    """Yields what runs steps in one of `MODES`, or compiled by "xla"."""
    if mode in ("eager", "function", "xla"):
        if not IS_EAGER:
            pytest.skip("a process without eager mode")
        yield Eagerly(mode)
        return
    with contextlib.ExitStack() as stack:
        if IS_EAGER:
            stack.enter_context(tf.Graph().as_default())
        else:
            v1.reset_default_graph()
        if mode == "session-of-1":
            # Branches and loops in the same graph, variables that are no resources.
            if v1.control_flow_v2_enabled():
                v1.disable_control_flow_v2()
                stack.callback(v1.enable_control_flow_v2)
            if v1.resource_variables_enabled():
                v1.disable_resource_variables()
                stack.callback(v1.enable_resource_variables)
        session = stack.enter_context(contextlib.closing(v1.Session()))
        # Not the session itself: it would make its graph another than the implicit one.
        stack.enter_context(session.as_default())
        yield InSession(session)


def variable(value, name="weight", trainable=True):
    """Returns a variable as programs of TensorFlow 1 make them."""
    return v1.Variable(value, name=name, trainable=trainable, dtype=tf.float32)
