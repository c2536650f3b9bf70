"""What other loss scalers get wrong, what we promise instead, and where it is held.

A row is held by every test with the marker `peer_defect(row)`, and shown in a peer by
every test with `peer_fails(row)`; both are read from the files, so the table and the
tests are one. test_peer_defects.py holds that no row is without.

    python tests/support/peer_defects.py    # prints the table, with the tests' names

K3 is Keras 3's LossScaleOptimizer, K2 is tf_keras's, TF the loss scales of
`tf.compat.v1.mixed_precision`; looked at on TensorFlow 2.21, Keras 3.15, tf_keras 2.21.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple, Optional

TESTS = Path(__file__).parents[1]


class Row(NamedTuple):
    """One defect.

    Attributes:
      who: The peers that have it.
      peer: What they do.
      promise: What we do.
      documented: A sentence of docs/, where the row is one of documentation.
      not_shown: Why no test shows it in a peer.
    """

    who: str
    peer: str
    promise: str
    documented: Optional[str] = None
    not_shown: Optional[str] = None


DEFECTS = {
    1: Row(
        "K3, MirroredStrategy",
        "applies a gradient that is not finite on any replica but the first",
        "the step is skipped on all replicas, which stay bit-equal",
    ),
    2: Row(
        "K3, MultiWorkerMirroredStrategy",
        "one worker overflows, and both hang for ever",
        "both skip, training goes on",
    ),
    3: Row(
        "K3",
        "no floor: the scale falls to 0, and the next clean batch makes weights NaN",
        "after any number of bad steps a clean batch trains",
    ),
    4: Row("K3", "no ceiling: the scale grows to infinity", "it is finite, always"),
    5: Row(
        "K2",
        "at 2**127 every gradient becomes 0, and counts as good",
        "unscaling is exact at every power of two up to 2**127",
    ),
    6: Row(
        "K3, custom loop",
        "if restored before it is built, its first step is 32 times too large",
        "the same step, whether restored before or after",
    ),
    7: Row(
        "K3",
        "if a restored counter is beyond the period, the scale never grows again",
        "it grows at the next good step",
    ),
    8: Row(
        "K3, custom loop",
        "without scale_loss gradients are divided all the same: nothing is learned",
        "it learns, and one warning shows the missing line",
    ),
    9: Row(
        "K3",
        "wraps a wrapper, a wrapped optimizer, an optimizer of another Keras",
        "refused, with its name in the error",
    ),
    10: Row(
        "K3, K2, TF",
        "accept 0, -1, NaN, infinity as scale, and 0, -5, 1.5 as period",
        "refused before any variable exists",
    ),
    11: Row(
        "K3, tf.train.Checkpoint",
        "a bare optimizer's checkpoint into a wrapped one, and back: dtype error",
        "it is restored if possible, or one sentence says what to do",
    ),
    12: Row(
        "K2",
        "`.keras`, `.h5` and SavedModel lose the scale and its counter",
        "every route keeps the whole state, or the pages say why not",
    ),
    13: Row(
        "K3, MirroredStrategy",
        "gradient_accumulation_steps, ema_overwrite_frequency: RuntimeError, bare too",
        "works if Keras can do it; otherwise the error is Keras's",
    ),
    14: Row(
        "K3, MirroredStrategy",
        "clipnorm clips each replica before gradients are added up, bare too",
        "documented, and not made worse",
        documented="With Keras 3 an optimizer, wrapped or not, applies its `clipnorm` "
        "to each replica's gradients before they are added up.",
    ),
    15: Row("K3, K2", "ignore a clipnorm set on the wrapper", "forwarded"),
    16: Row(
        "K3",
        "no way to unscale, clip and then apply in a custom loop",
        "there is a way, the same on every Keras",
    ),
    17: Row(
        "K2, K3 unbuilt",
        "a float16 loss times 2**16 is infinite; float16 gradients unscale to 0",
        "both are computed in float32",
    ),
    18: Row("K3", "apply_gradients returns a dead counter", "the true iterations"),
    19: Row("K3", "the check makes IndexedSlices dense", "it looks at .values only"),
    20: Row(
        "K2, TF, fixed",
        "a NaN is applied",
        "skip_nonfinite=True skips it; the default keeps TF's meaning",
    ),
    21: Row(
        "K2, TF",
        "started at 0.25, an overflow raises the scale to 1",
        "an overflow never raises the scale, except back to its floor if it was "
        "restored below it",
    ),
    22: Row(
        "TF",
        "update in replica context fails, and so do integer and complex gradients",
        "works in both contexts; integers are ignored, complex ones checked",
    ),
    23: Row(
        "K2, skip_gradients_aggregation=True",
        "replicas diverge",
        "the replicas agree on the flag, whoever sums the gradients",
    ),
    24: Row(
        "K3, K2",
        "clipping by value before the check hides an overflow",
        "the check comes before the user can clip",
    ),
    25: Row(
        "wrappers that check a norm",
        "the norm of [1e20, 1e20] is infinite: a false alarm",
        "finite gradients never count as an overflow",
        not_shown="neither Keras nor TensorFlow checks a norm",
    ),
    26: Row(
        "K3, K2, TF",
        "a skipped step leaves BatchNormalization's statistics infinite or NaN",
        "documented; the monitor names the variable",
        documented="One thing it cannot take back: the forward pass that overflowed "
        "has already updated BatchNormalization's moving statistics.",
    ),
    27: Row(
        "K3, K2, TF",
        "nobody can ask whether a step was skipped",
        "counters, and a callback whose one message names the variables",
    ),
    28: Row(
        "K3, MirroredStrategy",
        "jit_compile=True fails on CPUs, bare too",
        "not made worse; works where XLA can run",
    ),
    29: Row(
        "jmp, DeepSpeed, ColossalAI, fairseq",
        "floor lost under jit; hysteresis ignored; counters not saved",
        "the whole state is saved and restored, in compiled code too",
        not_shown="not installed: run (jmp) and read (the others) once, by hand",
    ),
    30: Row(
        "K3, and all that check before aggregating",
        "if the sum of finite float16 gradients is infinite, it is applied",
        "the sum is checked, too",
    ),
}


def marked(marker):
    """Returns row -> names of the tests with a marker, as pytest would name them.

    Read from the files, not from a collection: that depends on what is selected.
    """
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        for name, rows in _marked_in(tree, marker):
            for row in rows:
                found.setdefault(row, []).append(
                    f"{path.relative_to(TESTS).as_posix()}::{name}"
                )
    return found


def _marked_in(tree, marker, prefix="", inherited=()):
    of_all = [*inherited]
    for node in tree.body:
        if _is_pytestmark(node):
            of_all += _rows(node.value, marker)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            rows = [*of_all]
            for decorator in node.decorator_list:
                rows += _rows(decorator, marker)
            name = f"{prefix}{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from _marked_in(node, marker, f"{name}::", rows)
            elif node.name.startswith("test_"):
                yield name, rows


def _is_pytestmark(node):
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return isinstance(target, ast.Name) and target.id == "pytestmark"


def _rows(tree, marker):
    """Returns the rows of all `pytest.mark.<marker>(row)` in an expression."""
    return [
        ast.literal_eval(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == marker
        for argument in node.args
    ]


def main():
    held, shown = marked("peer_defect"), marked("peer_fails")
    for number, row in DEFECTS.items():
        print(f"{number}. {row.who}: {row.peer}\n   ours: {row.promise}")
        for test in held.get(number, []):
            print(f"   held by {test}")
        if row.documented:
            print(f"   docs: {row.documented}")
        for test in shown.get(number, [row.not_shown]):
            print(f"   shown by {test}" if "::" in test else f"   not shown: {test}")


if __name__ == "__main__":
    main()
