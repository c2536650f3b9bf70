"""The step can run on a GPU: shown from the kernels that TensorFlow has, and by one."""

import re

import exact
import numpy as np
import predicates
import pytest
import tensorflow as tf
from installed import ROOT, families
from limits import TENSORFLOW
from models import build, compiled, variable_of
from tensorflow.python.framework import (  # no public name (seen on 2.4 to 2.21)
    kernels,
    op_def_registry,
)

import lossscale
from lossscale.runtime import mode
from lossscale.runtime.mode import COMPILED_BY_XLA

pytestmark = pytest.mark.slow
needs_cuda_build = pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without CUDA and knows no GPU kernels",
)
needs_gpu = pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU"), reason="TensorFlow sees no GPU"
)
#: What a graph holds that is not a kernel's work.
STRUCTURE = {"_Arg", "_Retval", "Placeholder", "NoOp", "Const"}
#: The branch: its predicate is read on the host.
PREDICATES = {("If", "cond"), ("StatelessIf", "cond"), ("Switch", "pred")}


def host_reads(concrete):
    """Returns `(op, argument)` of what a traced function needs in the host's memory.

    Constants and handles of variables excepted: they always are there.

    Raises:
      AssertionError: An op has no GPU kernel for its dtypes.
    """
    graph_def = concrete.graph.as_graph_def()
    found = set()
    for nodes in (graph_def.node, *(f.node_def for f in graph_def.library.function)):
        constant = _constants(nodes)
        for node in nodes:
            is_call = node.op.endswith("PartitionedCall")
            if node.op in STRUCTURE or is_call or node.name in constant:
                continue
            needs = [_host_arguments(node, k, constant) for k in _gpu_kernels(node)]
            assert needs, f"no GPU kernel for {node.op} of {_types(node)}"
            found |= {(node.op, argument) for argument in min(needs, key=len)}
    return found


def _constants(nodes):
    """Returns the nodes that are computed from constants alone, such as axes."""
    constant = {node.name for node in nodes if node.op == "Const"}
    before = 0
    while len(constant) > before:
        before = len(constant)
        for node in nodes:
            sources = {s.split(":")[0] for s in node.input if not s.startswith("^")}
            if sources and sources <= constant:
                constant.add(node.name)
    return constant


def _types(node):
    return {key: value.type for key, value in node.attr.items() if value.type}


def _gpu_kernels(node):
    """Returns the kernels that a GPU would run for a node's dtypes."""
    types = _types(node)
    registered = kernels.get_registered_kernels_for_op(node.op).kernel
    fitting = [
        kernel
        for kernel in registered
        if all(
            types.get(c.name) in c.allowed_values.list.type for c in kernel.constraint
        )
    ]
    own = [kernel for kernel in fitting if kernel.device_type == "GPU"]
    return own or [kernel for kernel in fitting if kernel.device_type == "DEFAULT"]


def _host_arguments(node, kernel, constant):
    """Returns the names of a kernel's arguments that cross to the host or back."""
    names = set()
    definition = op_def_registry.get(node.op)
    position = 0
    for argument in definition.input_arg:
        count = node.attr[argument.number_attr].i if argument.number_attr else 1
        if argument.type_list_attr:
            count = len(node.attr[argument.type_list_attr].list.type)
        sources = node.input[position : position + count]
        position += count
        is_idle = all(s.split(":")[0] in constant for s in sources)
        is_handle = argument.type == tf.resource.as_datatype_enum
        if argument.name in kernel.host_memory_arg and not (is_idle or is_handle):
            names.add(argument.name)
    outputs = {argument.name for argument in definition.output_arg}
    return names | outputs.intersection(kernel.host_memory_arg)


ROWS = tf.TensorSpec([2], tf.int32)


def gradients(dtype, rows):
    """Returns what gradients may look like: large, small ones to be packed, sparse."""
    dense = [tf.ones([100, 100], dtype)] + [tf.ones([16], dtype)] * 3
    sparse = tf.IndexedSlices(tf.ones([2, 8], dtype), rows, tf.constant([5, 8]))
    return [*dense, sparse]


def stepper(family, dtype="float32", clips=False, loss_scale=None, guard=None):
    """Returns an optimizer, its variables, and its step as a function of gradients."""
    loss_scale = loss_scale or lossscale.DynamicLossScale(8.0)
    inner = family.optimizers.SGD(0.5)
    optimizer = lossscale.LossScaleOptimizer(inner, loss_scale, guard=guard)
    variables = [
        variable_of(family, tf.ones(shape, dtype), dtype)
        for shape in ([100, 100], [16], [16], [16], [5, 8])
    ]
    build(optimizer, variables)

    def step(grads):
        optimizer.scale_loss(tf.constant(1.0))
        if clips or family.name != "keras3":
            grads = optimizer.get_unscaled_gradients(grads)
        if clips:
            *dense, sparse = grads
            grads = [*(tf.clip_by_norm(each, 1e3) for each in dense), sparse]
        optimizer.apply_gradients(list(zip(grads, variables)))

    return optimizer, variables, step


@needs_cuda_build
@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_only_the_branchs_predicate_goes_to_the_host(family, clips, is_guarded):
    scale, guard = lossscale.DynamicLossScale(), None
    if is_guarded:
        scale, guard = lossscale.HeadroomLossScale(), lossscale.SpikeGuard()
    _, _, step = stepper(family, clips=clips, loss_scale=scale, guard=guard)
    other, variables, _ = stepper(family)

    def bare(grads):
        other.inner_optimizer.apply_gradients(list(zip(grads, variables)))

    def reads(apply):
        step = tf.function(lambda rows: apply(gradients("float32", rows)))
        return host_reads(step.get_concrete_function(ROWS))

    found = reads(step)
    assert found & PREDICATES, "no branch was found"
    # Keras 2 looks at the shape of sparse gradients, wrapped or not.
    assert found - reads(bare) <= PREDICATES


def waits(family, by, count, clips=False):
    """Returns how often the host waits, in the loop that its own wrapper wants.

    The optimizer is "bare", or in "its own" Keras's wrapper, or in "ours".
    """
    optimizer = family.optimizers.SGD(0.5)
    if by != "bare":
        owner = family.keras.mixed_precision if by == "its own" else lossscale
        optimizer = owner.LossScaleOptimizer(optimizer)
    variables = [variable_of(family, tf.ones([64, 64])), variable_of(family, [1.0])]
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    name = "scale_loss" if family.name == "keras3" else "get_scaled_loss"
    scale = getattr(optimizer, name, tf.identity)
    unscales = family.name != "keras3" and by != "bare"

    def step():
        grads = exact.gradients(scale, 2.0, variables)
        if unscales or clips:
            grads = optimizer.get_unscaled_gradients(grads)
        if clips:
            grads, _ = tf.clip_by_global_norm(grads, 1e3)
        optimizer.apply_gradients(list(zip(grads, variables)))

    return count(step)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """What is compiled by XLA is as it would be for a GPU, and runs on the CPU."""
    monkeypatch.setattr(mode, "_has_gpu", lambda: True)


@pytest.mark.skipif(TENSORFLOW < (2, 21), reason="the page's figures are of 2.21")
@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_the_host_waits_as_often_as_the_page_says():
    page = (ROOT / "docs" / "cost.md").read_text()
    for family in families():
        added = []
        for count in (predicates.in_graph, predicates.under_xla):
            bare, *both = (
                waits(family, by, count) for by in ("bare", "its own", "ours")
            )
            added.append(", ".join(str(number - bare) for number in both))
        shown = "Keras 3" if family.name == "keras3" else "tf_keras, also legacy"
        (row,) = re.findall(rf"(?m)^\| {shown} \|.*, .*, .*, .*\|$", page)
        assert row.endswith(" | ".join(["", *added, ""]).rstrip()), (family.name, added)
    for family in families():
        # What was unscaled and changed is settled in a branch of its own, and let go.
        assert waits(family, "ours", predicates.in_graph, clips=True) == 3


@pytest.mark.parametrize(("dtype", "clips"), [("float16", False), ("float32", True)])
@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_what_is_not_finite_is_seen_as_on_a_gpu(family, dtype, clips):
    """Once divided: by a loss scale below 2**-3, what is large overflows."""
    loss_scale = lossscale.DynamicLossScale(2.0**-4, min_loss_scale=2.0**-8)
    optimizer, variables, step = stepper(
        family, dtype=dtype, clips=clips, loss_scale=loss_scale
    )
    before = [np.array(each) for each in variables]

    @tf.function(**COMPILED_BY_XLA)
    def with_last(value):
        rows = tf.constant([0, 1])
        *dense, sparse = gradients(dtype, rows)
        dense[-1] = tf.tensor_scatter_nd_update(dense[-1], [[15]], [value])
        step([*dense, sparse])

    large = {"float16": 6e4, "float32": 1e38}[dtype]
    for number, last in enumerate([float("inf"), float("nan"), large, 1.0]):
        with_last(tf.constant(last, dtype))
        is_bad = last != 1.0
        assert int(loss_scale.skipped_steps.numpy()) == min(number + 1, 3)
        for old, variable in zip(before, variables):
            assert np.array_equal(old, np.array(variable)) == is_bad
        # After a good step the last bad one is still told of.
        (fault,) = optimizer.nonfinite_gradients()
        assert fault.kind == ("nan" if np.isnan(last) else "inf")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_steps_run_on_a_gpu(family, mode):
    optimizer, variables, step = stepper(family)
    step = compiled(step, mode)
    with tf.device("GPU:0"):
        *dense, sparse = gradients("float32", tf.constant([1, 3]))
        step([*dense, sparse])
        dense[-1] = tf.constant(np.r_[np.ones(15), np.inf], tf.float32)
        step([*dense, sparse])
    assert float(optimizer.loss_scale) == 4.0
    for variable in variables[:-1]:
        value = tf.convert_to_tensor(variable)
        np.testing.assert_allclose(value, np.full(value.shape, 1 - 0.5 / 8))
