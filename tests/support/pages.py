"""The README and the pages of docs/: their Python blocks, headings and links."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

from installed import ROOT

import lossscale

DOCS = ROOT / "docs"
#: The pages of the documentation, by their path below docs/, without the ending.
PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix(): path
    for path in sorted(DOCS.rglob("*.md"))
    if "_build" not in path.parts
}
#: What users of other systems read. Its blocks run on the oldest TensorFlow, too.
MIGRATIONS = {name: path for name, path in PAGES.items() if "coming-from/" in name}


def blocks(path):
    """Returns the Python blocks of a page."""
    return re.findall(r"(?ms)^```python\n(.*?)^```$", path.read_text())


def block_of(name, text):
    """Returns the one Python block of a page that holds a text."""
    (found,) = [block for block in blocks(PAGES[name]) if text in block]
    return found


def module_of(name, text):
    """Returns that block as a module: it has run."""
    module = ModuleType(name)
    path = str(PAGES[name])
    exec(compile(block_of(name, text), path, "exec"), vars(module))  # noqa: S102
    return module


def links(path):
    """Returns the links and pictures of a page that stay in the repository."""
    text = re.sub(r"(?ms)^```.*?^```$", "", path.read_text())
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in found if not link.startswith(("http:", "https:"))]


def is_there(path, link):
    """Tells whether a link of a page leads somewhere."""
    name, _, anchor = link.partition("#")
    target = Path(path.parent, name) if name else path
    _, package, file = name.partition("lossscale/")
    if package and not target.exists():  # the installed package, without a checkout
        target = Path(lossscale.__file__).parent / file
    return target.is_file() and (not anchor or anchor in anchors(target))


def anchors(path):
    """Returns the names by which a page's headings can be linked to."""
    text = re.sub(r"(?ms)^```.*?^```$", "", path.read_text())
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    bare = [re.sub(r"[^\w\- ]", "", each).lower() for each in headings]
    return {each.replace(" ", "-") for each in bare}
