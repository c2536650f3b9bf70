"""The pages as their readers see them: rendered, linked, and run with their output."""

from __future__ import annotations

import re

import pages
import pytest
from installed import ROOT, families
from limits import IS_NEWEST, skip_without
from pages import DOCS, PAGES
from processes import SUPPORT, printed

EVERY = {name: ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING")}
EVERY.update(PAGES)
#: How long something takes, which no page can promise.
TIME = re.compile(r"\b\d+m?s(/step|/epoch)?\b")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


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


def test_no_number_of_a_rendered_page_is_cut_by_bold_text():
    markdown_it = pytest.importorskip("markdown_it", reason="no Markdown here")
    for name, path in EVERY.items():
        text = re.sub(r"(?ms)^<!-- sphinx$.*?^-->$", "", path.read_text())
        html = markdown_it.MarkdownIt("commonmark").enable("table").render(text)
        html = re.sub(r"(?s)<(pre|code)\b.*?</\1>", "", html)
        assert not re.findall(r".{20}\d<(?:strong|em)>.{20}", html), name


#: With these words a sentence begins, if the text of the link is no title.
FIRST_WORDS = {"A", "An", "In", "One", "Some", "The", "This", "Without"}


def headings(path):
    """Returns a page's title, and its headings by the names that links give them."""
    text = re.sub(r"(?ms)^```.*?^```$", "", path.read_text())
    found = re.findall(r"(?m)^#+ (.*)$", text)
    named = {re.sub(r"[^\w\- ]", "", each).lower(): each for each in found}
    return found[0], {name.replace(" ", "-"): each for name, each in named.items()}


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
            titles = {headings(there)[0], headings(there)[1].get(anchor)}
            if said not in titles and said.split()[0] not in FIRST_WORDS:
                wrong.append((name, said, link))
    assert not wrong


def shown():
    """Yields each program of the pages that shows its output, and that output."""
    for path in (EVERY["README"], *PAGES.values()):
        fences = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", path.read_text())
        for (kind, program), (after, output) in zip(fences, fences[1:]):
            # Horovod is not installed beside the newest TensorFlow.
            if (kind, after) == ("python", "text") and "horovod" not in program:
                yield program, output


def differs(output, found):
    """Returns the first part of an output that a program has not printed, or "".

    Parts are what is between dots, `...`. Numbers that are not whole may differ by a
    twentieth, since processors round in other ways.
    """
    found = " ".join(TIME.sub("", found).split())
    for part in re.split(r"\s*\.\.\.\s*", TIME.sub("", output)):
        words = [re.escape(each) for each in NUMBER.sub("@", part).split()]
        pattern = r"\s+".join(words).replace("@", f"({NUMBER.pattern})")
        numbers = [float(each) for each in NUMBER.findall(part)]
        for match in re.finditer(pattern, found):
            if numbers == pytest.approx([*map(float, match.groups())], 0.05):
                found = found[match.end() :]
                break
        else:
            return part
    return ""


@pytest.mark.slow
def test_programs_print_what_the_pages_show(tmp_path):
    skip_without("the pages", families()[0])
    if not IS_NEWEST or families()[0].name != "keras3":
        pytest.skip("the newest version prints it")
    programs = [*shown()]
    assert len(programs) >= 8
    paths = [tmp_path / f"block{number}.py" for number in range(len(programs))]
    for path, (program, _) in zip(paths, programs):
        path.write_text(program)
    printed(SUPPORT / "print_blocks.py", *paths, cwd=tmp_path, MPLBACKEND="agg")
    wrong = [
        (part, path.with_suffix(".out").read_text()[-3000:])
        for path, (_, output) in zip(paths, programs)
        for part in [differs(output, path.with_suffix(".out").read_text())]
        if part
    ]
    assert not wrong


def test_a_page_that_shows_other_figures_is_found():
    said = "Epoch 1\n8/8 - 2s - 3ms/step - loss: 0.5000\nwas 7"
    assert not differs("Epoch 1\n... loss: 0.51\n...", said)
    assert differs("loss: 0.6", said) == "loss: 0.6"
    assert differs("was 8", said)
    assert differs("was 7\n...\nEpoch 1", said)


def test_variables_are_read_on_two_replicas_as_the_pages_read_them(mirrored):
    """`bool()` of such a variable is always True there, and `int()` an error."""
    (program,) = [
        block
        for block in pages.blocks(PAGES["trouble"])
        if "on_train_batch_end=note" in block
    ]
    head, _, _ = program.partition("for row in")
    found = {}
    with mirrored.scope():
        exec(compile(head, str(PAGES["trouble"]), "exec"), found)  # noqa: S102
    assert found["skipped"] == [2]
    reads = [EVERY["README"], *PAGES.values(), *DOCS.rglob("*.ipynb")]
    for path in reads:
        assert not re.findall(
            r"(?:bool|int)\([\w.]+\.(?:last_step_\w+|\w*skipped_\w+|good_steps)\)",
            path.read_text(),
        ), path
