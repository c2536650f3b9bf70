"""The README and the pages of docs/: their programs, what these print, and links."""

import re
from pathlib import Path
from types import ModuleType

from installed import ROOT
from limits import IS_NEWEST

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
    return [program for program, _ in programs(path)]


def programs(path):
    """Returns the Python blocks of a page, each with what the page says that it prints.

    That is a block without a language, or of `text`, that follows at once.
    """
    pattern = r"(?ms)^```python\n(.*?)^```$(?:\n\n?```(?:text)?\n(.*?)^```$)?"
    return re.findall(pattern, path.read_text())


#: What differs from run to run: how long it took. Keras 2 puts it elsewhere.
TIMES = r"( - )?\b\d+[mu]?s(/step|/epoch)?\b"
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"


def missing(program, printed, shown):
    """Yields what a program should have printed, and has not.

    That is what the page shows below it, where "..." is anything, and what stands
    behind a `print(...)` as a comment that is a value, such as `# 4.0`. Lines may be
    broken elsewhere. Figures with a point may differ by a hundredth, or be rounded.
    Versions but the newest may print any figures.
    """
    found, at = _figures(printed)[0], 0
    comments = re.findall(r"(?m)^ *print\(.*\)  # ([\d'\"\[(-].*|True|False)$", program)
    parts = re.split(r"\.\.\.", shown.read_text()) if shown.exists() else []
    for part in comments:
        if not any(_is_like(part, line) for line in printed.splitlines()):
            yield part
    for part in filter(str.strip, parts):
        words, numbers = _figures(part)
        while True:
            at = found.find(words, at)
            if at < 0:
                yield part
                return
            before = found[:at].count("#")
            if _are_near(numbers, _figures(printed)[1][before:][: len(numbers)]):
                at += len(words)
                break
            at += 1


def _figures(text):
    """Returns a text in one line with # for each number, and the numbers."""
    text = re.sub(TIMES, "", " ".join(text.split()))
    return re.sub(NUMBER, "#", " ".join(text.split())), re.findall(NUMBER, text)


def _is_like(part, line):
    (one, numbers), (other, others) = _figures(part), _figures(line)
    return one == other and _are_near(numbers, others)


def _are_near(numbers, others):
    return not IS_NEWEST or all(map(_is_near, numbers, others))


def _is_near(number, other):
    if "." not in number:
        return number == other
    digits = len(re.split("[.e]", number)[1])
    one, two = (float(each.replace(",", "")) for each in (number, other))
    return abs(one - two) <= max(0.01 * abs(one), 0.6 * 10.0**-digits)


def warnings_of(program):
    """Returns how often a program says that it warns: `# warns`, `# warns 2 times`."""
    found = re.search(r"# warns(?: (\d+) times)?", program)
    return int(found[1] or 1) if found else 0


def block_of(name, text):
    """Returns the one block of a page that holds a text, `python` or `py`."""
    blocks = re.findall(r"(?ms)^```py(?:thon)?\n(.*?)^```$", PAGES[name].read_text())
    (found,) = [block for block in blocks if text in block]
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
    return target.is_file() and (not anchor or anchor in headings(target))


def headings(path):
    """Returns a page's headings, the title first, by the names that links give them."""
    text = re.sub(r"(?ms)^```.*?^```$", "", path.read_text())
    found = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-"): h for h in found}
