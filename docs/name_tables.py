"""Writes the tables of the API pages for a hosting site: `python docs/name_tables.py`.

Sphinx makes the reference from the docstrings. A hosting site shows only the page, so
there a table stands for it: each name, and a link to the file that holds its docstring.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, Dict, Iterator, Tuple

import docstrings

import lossscale

API = Path(__file__).parent / "api"
ROOT = API.parent.parent
BEGIN, END = "<!-- hosted -->\n", "<!-- /hosted -->\n"
HEAD = "| name | its docstring |\n| --- | --- |\n"
_OBJECTS = r"(?m)^ *\.\. (\w+):: ([\w.]+)"


def tables() -> Dict[Path, str]:
    """Returns each page of `docs/api/` as it must be."""
    return {path: _page(path.read_text()) for path in sorted(API.glob("*.md"))}


def _page(page: str) -> str:
    bare = re.sub(r"(?ms)^<!-- hosted -->$.*?^<!-- /hosted -->$\n\n?", "", page)
    filled = docstrings.filled(bare, docstrings.loss_scales(lossscale))
    rows = "".join(_row(*each) for each in _documented(filled))
    first, _, rest = bare.partition("<!-- sphinx\n")
    # Below the page's first words, since the first directive may be under a heading.
    title, _, rest_of_first = first.partition("\n\n")
    words, _, others = rest_of_first.partition("\n\n")
    table = f"{BEGIN}\n{HEAD}{rows}\n{END}"
    parts = [title, words, table, others]
    head = "\n\n".join(part.strip() for part in parts if part.strip())
    return f"{head}\n\n<!-- sphinx\n{rest}"


def _documented(page: str) -> Iterator[Tuple[str, Any]]:
    """Yields the public objects that a page documents, with their full names."""
    module = ""
    for kind, name in re.findall(_OBJECTS, page):
        if kind in ("currentmodule", "automodule"):
            module = name
        elif kind in ("autoclass", "autofunction", "autodata"):
            yield f"{module}.{name}", getattr(importlib.import_module(module), name)


def _row(name: str, documented: Any) -> str:
    module = getattr(documented, "__module__", name.rpartition(".")[0])
    source = Path(inspect.getsourcefile(importlib.import_module(module)) or "")
    # An installed package is elsewhere: its path below the package's folder counts.
    parts = source.parts
    start = len(parts) - 1 - parts[::-1].index("lossscale")
    file = "/".join(parts[start:])
    return f"| `{name}` | [{source.name}](../../{file}) |\n"


if __name__ == "__main__":
    for _path, _text in tables().items():
        _path.write_text(_text)
