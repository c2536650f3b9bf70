"""What Sphinx does not know of our docstrings: fenced blocks, and code in backticks.

They are written to be read where they stand, in Python files: pseudo-code in fences, as
Markdown has it, code in single backticks, as ``the state's `None`s``, and pages as
paths, docs/origins.md, which become links. All are turned into reStructuredText here.
Besides, the page of loss scales gets the entries that it leaves out.
"""

from __future__ import annotations

import ast
import re
from typing import Any, Iterator, List

#: Code in backticks, one or two of each.
_CODE = re.compile(r"(``?)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)


#: A page of this site, as its address in the repository, or as its path there.
_PAGE = re.compile(
    r"(?:https://github\.com/lossscale/lossscale/blob/main/)?\bdocs/([\w/-]+)\.md"
)
#: What is returned, up to the next section or the end.
_RETURNS = re.compile(r"(?m)^Returns:\n((?:(?: .*)?\n)+)")


def to_rest(lines: List[str], what: str) -> List[str]:
    """Returns a docstring's lines as reStructuredText, its sections as they are.

    Args:
      lines: The lines.
      what: Of what: "class", "function", "property" and so on, as Sphinx says.
    """
    text = _RETURNS.sub(_untyped, "\n".join([*lines, ""]))
    if what in ("attribute", "property"):
        text = f": {text}"
    return list(_converted(text))


def _untyped(match: Any) -> str:
    """Returns a section in which napoleon takes no words for a type.

    It takes all before the first colon for one. Here there is none before it.
    """
    body = match[1]
    first = f"  : {body.lstrip()}"
    if len(re.findall(r"(?m)^  \w+: ", body)) > 1:  # each has a name
        first = "  :\n" + re.sub(r"(?m)^  (\w+): ", r"  * `\1`: ", body)
    return f"Returns:\n{first}"


def _converted(text: str) -> Iterator[str]:
    parts = re.split(r"(?ms)^([ ]*)```\n(.*?)^\1```$", text)
    # Text, then an indent, a fenced block and text again, as often as there are blocks.
    yield from _prose(parts[0])
    for indent, block, after in zip(parts[1::3], parts[2::3], parts[3::3]):
        yield from _literal(indent, block)
        yield from _prose(after)


def _literal(indent: str, block: str) -> Iterator[str]:
    yield ""
    yield f"{indent}.. code-block:: {_language(block, indent)}"
    yield ""
    for line in block.splitlines():
        yield f"   {line}" if line.strip() else ""
    yield ""


def _language(block: str, indent: str) -> str:
    """Returns what a block is written in: pseudo-code is no Python, though alike."""
    lines = [line[len(indent) :] for line in block.splitlines()]
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return "none"
    return "python"


def _prose(text: str) -> Iterator[str]:
    # Doctests stay as they are: their backticks are Python's.
    for paragraph in re.split(r"(\n[ ]*\n)", text.strip("\n")):
        is_prose = not paragraph.lstrip().startswith(">>>")
        shown = _CODE.sub(_code, paragraph) if is_prose else paragraph
        shown = _PAGE.sub(r":doc:`/\1`", shown)
        shown = re.sub(r"(?m)^( *)Source: ", r"\1**Source:** ", shown)
        yield from shown.split("\n") if shown.strip() else [""]


def _code(match: Any) -> str:
    """Returns code as a literal, set apart from letters that touch it."""
    text = match.string
    before, after = text[: match.start()][-1:], text[match.end() :][:1]
    escape = "\\ "
    code = re.sub(r"\s*\n\s*", " ", match[2])
    return "".join(
        [
            escape if before.isalnum() else "",
            f"``{code}``",
            escape if after.isalnum() else "",
        ]
    )


def opened(page: str) -> str:
    """Returns a page for Sphinx, without what only a hosting site shows.

    Directives are in comments `<!-- sphinx ... -->`, and what a hosting site shows in
    their place is between `<!-- hosted -->` and `<!-- /hosted -->`.
    """
    page = re.sub(r"(?ms)^<!-- hosted -->$.*?^<!-- /hosted -->$\n?", "", page)
    return re.sub(r"(?ms)^<!-- sphinx$\n(.*?)^-->$", r"\1", page)


def loss_scales(package: Any) -> List[str]:
    """Returns the names of a package's public subclasses of `LossScale`."""
    return [
        name
        for name in package.__all__
        if package.LossScale in getattr(getattr(package, name), "__mro__", ())[1:]
    ]


def filled(page: str, loss_scales: List[str]) -> str:
    """Returns a page of the API reference with an entry for each loss scale.

    The line `.. every other loss scale` becomes the entries of those that the page does
    not name itself.
    """
    others = [each for each in loss_scales if f":: {each}\n" not in page]
    entry = ".. autoclass:: {}\n   :members: next_state"
    entries = "\n\n".join(map(entry.format, others))
    return page.replace(".. every other loss scale", entries)


def missing(public: List[str], documented: List[str]) -> List[str]:
    """Returns the public names of `lossscale` that the API reference leaves out."""
    return sorted({f"lossscale.{name}" for name in public} - set(documented))
