"""The pages as their readers see them: rendered, linked, and read on two replicas."""

import re

import pages
import pytest
from installed import ROOT
from pages import DOCS, PAGES

EVERY = {name: ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING")}
EVERY.update(PAGES)


def prose(text):
    """Returns a page without its code: fences, and what is in backticks."""
    text = re.sub(r"(?ms)^```.*?^```$|<!--.*?-->", "", text)
    return re.sub(r"(``?)(?!`).+?(?<!`)\1(?!`)", "", text, flags=re.DOTALL)


def test_a_power_is_code_since_two_of_them_would_become_bold_text():
    found = {
        (name, power)
        for name, path in EVERY.items()
        for power in re.findall(r"\d(?:\\?\*){2}-?\w+", prose(path.read_text()))
    }
    assert not found


#: With these words a sentence begins, if the text of the link is no title.
FIRST_WORDS = {"A", "An", "In", "One", "Some", "The", "This", "Without"}


def test_a_link_that_reads_as_a_title_is_the_title():
    wrong = []
    for name, path in EVERY.items():
        text = re.sub(r"(?ms)^```.*?^```$", "", path.read_text())
        for words, link in re.findall(
            r"(?<!!)\[([^]\[]+)\]\((?!https?:)([^)\s]+\.md[^)\s]*)\)", text
        ):
            target, _, anchor = link.partition("#")
            there = (path.parent / target).resolve()
            said = " ".join(words.split()).strip("*")
            if DOCS not in there.parents or not said[0].isupper():
                continue
            names = pages.headings(there)
            titles = {next(iter(names.values())), names.get(anchor)}
            if said not in titles and said.split()[0] not in FIRST_WORDS:
                wrong.append((name, said, link))
    assert not wrong


@pytest.mark.slow
def test_variables_are_read_on_two_replicas_as_the_page_reads_them(mirrored):
    program = pages.block_of("trouble", "on_train_batch_end=note")
    found = {}
    try:
        with mirrored.scope():
            exec(program.partition("for row in")[0], found)  # noqa: S102
    finally:
        found["keras"].mixed_precision.set_global_policy("float32")
    assert found["skipped"] == [2]


def test_no_page_reads_a_variable_as_two_replicas_cannot():
    """`bool()` of such a variable is always True there, and `int()` an error."""
    wrong = r"\b(?:bool|int)\([\w.]+\.(?:last_step_\w+|\w*skipped_\w+|good_steps)\)"
    code = {name: "".join(pages.blocks(path)) for name, path in EVERY.items()}
    code.update({path.name: path.read_text() for path in DOCS.rglob("*.ipynb")})
    assert not [name for name, text in code.items() if re.search(wrong, text)]
