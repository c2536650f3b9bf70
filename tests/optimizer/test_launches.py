"""How many kernels a good step starts: no change may add one unseen.

Counted in the graph that the newest TensorFlow runs, by `benchmarks/step_graphs.py`.
"""

import benchmark  # noqa: F401 - it makes benchmarks/ importable
import pytest
import tensorflow as tf
from exact import of_loss
from installed import ROOT
from limits import IS_NEWEST
from models import built

from lossscale import DynamicLossScale, HeadroomLossScale, SpikeGuard

pytestmark = pytest.mark.skipif(not IS_NEWEST, reason="others count other nodes")

#: What a wrapper adds to a bare step of so many layers: that of its Keras, and ours at
#: most. docs/cost.md shows these figures.
ADDED = {
    "keras3": {2: (20, 50), 20: (128, 86)},
    "keras2": {2: (21, 65), 20: (129, 101)},
}
SHOWN = {"keras3": "Keras 3", "keras2": "tf_keras, also legacy"}


def step_graphs():
    return pytest.importorskip("step_graphs")


@pytest.mark.each_keras
@pytest.mark.parametrize("inner", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layers", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_good_step_starts_no_more_kernels(family, layers, inner):
    totals = []
    for by in step_graphs().WRAPPERS:
        made = step_graphs().make_layers_step
        step = made(family.name, f"{layers}-layers", inner, by)
        counted = step_graphs().launches(tf.function(step, autograph=False))
        totals.append(sum(counted.values()))
    bare, its_own, ours = totals
    theirs, most = ADDED[family.name.partition("-")[0]][layers]
    assert its_own - bare == theirs, "it is no longer compared with what it was"
    assert ours - bare <= most, counted


def test_the_page_shows_these_figures():
    page = (ROOT / "docs" / "cost.md").read_text()
    for name, shown in SHOWN.items():
        few, many = ADDED[name][2], ADDED[name][20]
        row = f"| {shown} | {few[0]}, {few[1]} | {many[0]}, {many[1]} |"
        assert row in page


#: Kernels of a good step of an optimizer of one variable with Keras 3.
WITH = {
    (DynamicLossScale, None): 45,
    (HeadroomLossScale, None): 66,
    (DynamicLossScale, SpikeGuard): 107,
    (HeadroomLossScale, SpikeGuard): 113,
}


@pytest.mark.every
@pytest.mark.parametrize(("scale", "guard"), WITH, ids=str)
def test_rules_and_guards_start_no_more_kernels(family, scale, guard):
    def counted(how):
        options = {"guard": guard and guard(), "nonfinite_loss": how}
        optimizer, variable = built(family, scale(), **options)

        @tf.function(autograph=False)
        def step():
            loss = tf.random.stateless_uniform([], [1, 2])
            grads = of_loss(optimizer.scale_loss, loss, [tf.ones([2])])
            optimizer.apply_gradients(list(zip(grads, [variable])))

        return sum(step_graphs().launches(step).values())

    backoff = counted("backoff")
    if family.name == "keras3":
        assert backoff <= WITH[scale, guard]
    # With a guard there is a flag more: whether the rule learns of the step.
    assert counted("skip") - backoff <= (guard is not None)
