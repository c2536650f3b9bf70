"""docs/warnings.md: an entry for each warning, by the words that it begins with."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from pages import PAGES

import lossscale

ROOT = Path(lossscale.__file__).parent
#: Where the texts of warnings are constants. Elsewhere they are in the call itself.
OF_TEXTS = ("monitor", "optimizer", "provenance", "runtime", "scales")
#: What follows other words of one warning: nobody sees these as the first ones.
PARTS = (
    "Since training began",
    "It has been lowered",
    "The largest gradient",
    "If steps are still skipped",
    "{} This loss scale checks no gradient",
    "Optimizer of ",
)


def text_of(node):
    """Returns the text of an expression, with {} for what it fills in, or None."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [getattr(part, "value", None) for part in node.values]
        return "".join(p if isinstance(p, str) else "{}" for p in parts)
    if isinstance(node, ast.BinOp):
        parts = [text_of(node.left), text_of(node.right)]
        return None if parts == [None, None] else "".join(p or "{}" for p in parts)
    return None


def names_in(tree, kind):
    """Returns the names within all nodes of a kind."""
    within = (
        n
        for found in ast.walk(tree)
        if isinstance(found, kind)
        for n in ast.walk(found)
    )
    return {node.id for node in within if isinstance(node, ast.Name)}


def messages():
    """Yields what the package warns with."""
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                found += [text_of(node.args[0])] if name in ("warn", "_warn") else []
        if path.relative_to(ROOT).parts[0] in OF_TEXTS:
            raised = names_in(tree, ast.Raise)
            for node in tree.body:
                target = getattr(node, "targets", [getattr(node, "target", None)])[0]
                name = getattr(target, "id", "")
                if name.isupper() and name not in raised:
                    found.append(text_of(node.value))
        for text in filter(None, found):
            words = " ".join(text.split())
            # Fewer words, or such that begin within a sentence, are parts of others.
            if len(words.split()) >= 8 and re.match(r"[A-Z`{]|lossscale\.", words):
                yield words


def entries():
    """Returns the words of each entry: several if there is something between them."""
    rows = re.findall(r"(?m)^\| (.*?) \| .* \| .* \|$", PAGES["warnings"].read_text())
    rows = [row for row in rows if row != "---" and not row.startswith("it begins")]
    return [re.findall(r"\*(.*?)\*", row) for row in rows]


def holds(words, text):
    """Tells whether a text begins with some words, but for what is filled in."""
    beginning = re.sub(r"[`]", "", text)[:160]
    place = 0
    for each in words:
        place = beginning.find(each, place)
        if place < 0:
            return False
    return True


@pytest.mark.smoke
def test_each_warning_has_an_entry():
    found = [text for text in messages() if not text.startswith(PARTS)]
    assert len(found) > 20
    for text in found:
        assert any(holds(words, text) for words in entries()), text


def test_each_entry_is_of_a_warning():
    found = list(messages())
    for words in entries():
        assert words
        assert any(holds(words, text) for text in found), words
