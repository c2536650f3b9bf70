"""What other loss scalers get wrong, what we promise instead, and where it is held.

The table is in docs/reliability.md. A row is held by every test with the marker
`peer_defect(row)`, and shown in a peer by every test with `peer_fails(row)`; both are
read from the files. test_peer_defects.py holds that no row is without.

    python tests/support/peer_defects.py    # prints the table, with the tests' names
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"

#: Row -> who has the defect, what they do, what we do.
DEFECTS = {
    int(row): tuple(cells)
    for row, *cells in re.findall(
        r"(?m)^\| (\d+) \| (.*) \| (.*) \| (.*) \|$", PAGE.read_text()
    )
}
#: Sentences of docs/, for rows of documentation.
DOCUMENTED = {
    14: "With Keras 3 an optimizer, wrapped or not, applies its `clipnorm` to each "
    "replica's gradients before they are added up.",
    26: "What the forward pass did stays done: it has updated BatchNormalization's "
    "moving statistics,",
}
#: Why no test shows it in a peer.
NOT_SHOWN = {
    25: "neither Keras nor TensorFlow checks a norm",
    29: "not installed: run (jmp) and read (the others) once, by hand",
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
    for number, (who, peer, promise) in DEFECTS.items():
        print(f"{number}. {who}: {peer}\n   ours: {promise}")
        for test in held.get(number, []):
            print(f"   held by {test}")
        for test in shown.get(number, [NOT_SHOWN.get(number)]):
            print(f"   shown by {test}")


if __name__ == "__main__":
    main()
