"""How often the host must wait for a step: each branch that runs asks it for a bool.

Counted on the way of a good step, in what TensorFlow runs: at most so many, as a branch
within a branch may stay out.
"""

import re

import tensorflow as tf
from tensorflow.python.eager import context  # no public name (seen on 2.13 to 2.21)

#: What asks, of the nodes that a `tf.cond` of a graph becomes.
ASKS = re.compile(r"(^|/)switch_pred/_\d+$")


def in_graph(step):
    """Counts them in a function that is run as a graph of TensorFlow."""
    nodes = nodes_run(tf.function(step, autograph=False))
    asked = {node.name for node in nodes if ASKS.search(node.name)}
    return sum("/else/" not in name for name in asked)


def nodes_run(function, *args, of=""):
    """Calls a `tf.function`, and returns the nodes of the graph that TensorFlow ran.

    What else runs meanwhile, on another thread, is collected too: `of` is a part of the
    name of some node that only the function's graph has.
    """
    context.enable_graph_collection()
    try:
        function(*args)
        graphs = context.export_run_metadata().function_graphs
    finally:
        context.disable_graph_collection()
    listed = [list(graph.post_optimization_graph.node) for graph in graphs]
    own = [nodes for nodes in listed if any(of in node.name for node in nodes)]
    return [node for nodes in own for node in nodes]


def under_xla(step):
    """Counts them in a function that XLA compiles: its branches, and turns of loops."""
    function = tf.function(step, autograph=False, jit_compile=True)
    program = function.experimental_get_compiler_ir()(stage="optimized_hlo")
    bodies = {}
    for body in program.split("\n\n"):
        head = body.strip().partition(" ")[0]
        bodies[head] = body

    def asked(body):
        branches = re.findall(r" conditional\(.* true_computation=(%[\w.-]+)", body)
        loops = re.findall(r" while\(.* body=(%[\w.-]+)", body)
        return sum(1 + asked(bodies[name]) for name in [*branches, *loops])

    return asked(bodies["ENTRY"])
