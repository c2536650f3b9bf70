"""The README and docs/: programs print what is shown, links lead somewhere."""

import ast
import importlib
import os
import re
import runpy
from pathlib import Path

import pages
import pytest
from installed import ROOT, families
from limits import IS_NEWEST, LIMITS, TENSORFLOW, skip_without
from pages import DOCS, MIGRATIONS, PAGES
from private_names import PRIVATE_NAMES
from processes import SUPPORT, printed

import lossscale

README = ROOT / "README.md"
#: The installed package: other versions are tested without the checkout.
PACKAGE = Path(lossscale.__file__).parent
GUIDE = {name: path for name, path in PAGES.items() if name not in MIGRATIONS}
BLOCKS = [each for path in (README, *GUIDE.values()) for each in pages.programs(path)]
#: Those that several processes run are in test_replicas_page.py and test_horovod.py.
BLOCKS = [each for each in BLOCKS if not each[0].startswith("# On each ")]
#: What a reader begins with, and what depends on Keras the most.
FIRST = [README, *(GUIDE[name] for name in ("start", "custom-loops", "saving"))]


def assert_run(found, folder, **environment):
    """Runs programs, each on its own: they print what their pages show."""
    paths = []
    for number, (program, shown) in enumerate(found):
        paths.append(folder / f"block{number}.py")
        paths[-1].write_text(program)  # AutoGraph reads the source of a file
        if shown:
            paths[-1].with_suffix(".txt").write_text(shown)
    printed(SUPPORT / "run_blocks.py", *paths, cwd=folder, **environment)


#: They take a fifteenth of all quick tests. On the newest TensorFlow the slow tests run
#: them; on other versions, and where its `tf.keras` is Keras 2, quick ones do.
slow_with_the_newest_keras = (
    pytest.mark.slow
    if IS_NEWEST and "TF_USE_LEGACY_KERAS" not in os.environ
    else lambda test: test
)
#: Between Keras 2's last TensorFlow and the newest only the migrations run.
IS_BETWEEN = (2, 15) < TENSORFLOW < (2, 21)


@slow_with_the_newest_keras
@pytest.mark.parametrize("half", [0, 1])
def test_programs_print_what_their_pages_show(half, tmp_path):
    """All on the newest; the first ones and the migrations on Keras 2's last, too."""
    found = [each for path in MIGRATIONS.values() for each in pages.programs(path)]
    is_too_old, _ = LIMITS["the pages"]
    if IS_NEWEST:
        found += BLOCKS
    elif not is_too_old(families()[0]) and not IS_BETWEEN:
        found += [each for path in FIRST for each in pages.programs(path)]
    assert_run(found[half::2], tmp_path, MPLBACKEND="agg")


def test_there_is_a_page_for_each_system_with_its_names_and_its_code():
    listed = PAGES["coming-from"].read_text()
    for origin in ("contrib", "train.experimental", "Keras 2", "Keras 3", "torch"):
        assert origin in listed
    for name, path in MIGRATIONS.items():
        assert f"]({name}.md)" in listed
        assert "| there | here |" in path.read_text()
        assert len(pages.blocks(path)) == 1


def test_docstrings_and_messages_name_pages_that_are_there():
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    found = {page for text in texts for page in re.findall(r"docs/[\w/-]+\.md", text)}
    assert len(found) > 10
    assert all((ROOT / page).is_file() for page in found)


def test_links_lead_somewhere():
    others = {name: ROOT / name for name in ("README.md", "CONTRIBUTING.md")}
    broken = [
        (name, link)
        for name, path in {**PAGES, **others}.items()
        for link in pages.links(path)
        if not pages.is_there(path, link)
    ]
    assert not broken


def test_the_readme_is_one_page_that_begins_with_commands_and_leads_to_the_guide():
    text = README.read_text()
    assert len(text.split()) <= 900
    for name in ("start", "guide", "coming-from", "trouble", "api", "examples", "cost"):
        assert f"](docs/{name}.md" in text
    # Where the pages are, and how to build them.
    assert "python -m sphinx docs docs/_build" in text
    assert text.count("git clone https://github.com/lossscale/lossscale") == 1
    first = re.search(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == [
        "pip install .",
        'pip install ".[examples]" && python examples/digits.py',
        'pip install ".[test]" && pytest',
    ]
    assert first.start() < text.index("```python")
    assert "```python" in text.splitlines()[:20]


def test_the_guide_leads_to_every_page():
    waiting, found = ["guide"], {"index"}
    while waiting:
        name = waiting.pop()
        found.add(name)
        for link in pages.links(PAGES[name]):
            target = (PAGES[name].parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and DOCS in target.parents:
                there = target.relative_to(DOCS).with_suffix("").as_posix()
                waiting += [there] if there not in found else []
    # The last two: from the header of the site, and from the README.
    assert set(PAGES) - found <= {"index", "new", "changes"}


def test_no_page_shows_a_directive_where_it_is_hosted():
    for name, path in PAGES.items():
        hosted = re.sub(r"(?ms)^<!-- sphinx$.*?^-->$", "", path.read_text())
        assert "```{" not in hosted, name
        assert len(hosted.split()) > 5, name


PRINTED = "Loss scale: 14 steps applied, 2 skipped; it took 31ms/step.\nloss: 0.8159\n"


@pytest.mark.skipif(not IS_NEWEST, reason="others may print any figures")
@pytest.mark.parametrize(
    ("program", "shown", "is_said"),
    [
        ("", "Loss scale: ... 2 skipped; it took 99ms/step.", True),
        ("", "14 steps applied, 2\nskipped; ... loss: 0.8161", True),
        ("", "14 steps applied, 3 skipped", False),
        ("", "loss: 0.9", False),
        ("", "loss: ... 14 steps", False),  # in this order
        ("print(loss)  # 0.8159\n", "", False),
        ("print('loss:', loss)  # a number\n", "", True),
        ("print(x)  # 14 steps\n", "", False),
    ],
)
def test_what_a_page_shows_is_what_is_printed(program, shown, is_said, tmp_path):
    (tmp_path / "shown.txt").write_text(shown)
    found = list(pages.missing(program, PRINTED, tmp_path / "shown.txt"))
    assert (not found) == is_said


def test_what_follows_a_program_at_once_is_what_it_prints(tmp_path):
    page = tmp_path / "page.md"
    fences = ["python\nprint(1)\n", "text\n1\n", "text\nnot\n", "python\nprint(2)\n"]
    page.write_text("\n\n".join(f"```{each}```" for each in fences) + "\n\nwords\n")
    assert pages.programs(page) == [("print(1)\n", "1\n"), ("print(2)\n", "")]


#: One step: after each line, the kind of its value and the state of the step.
TRACED_STEP = """\
import keras
import tensorflow as tf
import lossscale

weights = tf.Variable([1.0, 1.0])
scale = lossscale.DynamicLossScale(1024.0)
optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.5), scale)
optimizer.build([weights])
division = optimizer.engine.division  # not part of the API


def kinds_of(what, value):
    (kind,) = division.uses.kinds.of([value])
    state = division.state.pending.numpy()
    print(f"{what:<24} {kind.name if kind else 'number':<9} {state:>6.0f}")


with tf.GradientTape() as tape:
    loss = tf.reduce_sum(weights * [3.0, 4.0])
    kinds_of("loss", loss)
    scaled_loss = optimizer.scale_loss(loss)
kinds_of("scaled loss", scaled_loss)
(grad,) = tape.gradient(scaled_loss, [weights])
kinds_of("its gradient", grad)
kinds_of("clipped while scaled", tf.clip_by_value(grad, -1.0, 1.0))
(true_grad,) = optimizer.get_unscaled_gradients([grad])
kinds_of("unscaled", true_grad)
clipped = tf.clip_by_norm(true_grad, 1.0)
kinds_of("then clipped", clipped)
optimizer.apply_gradients([(clipped, weights)])
print(weights.numpy())
"""


def test_the_traced_step_prints_what_the_page_shows(tmp_path, capsys):
    skip_without("the pages", families()[0])
    program = tmp_path / "step.py"  # AutoGraph reads the source of a file
    program.write_text(TRACED_STEP)
    runpy.run_path(str(program))
    lines = capsys.readouterr().out
    assert lines.splitlines()[-1] == "[0.7 0.6]"
    (shown,) = re.findall(
        r"(?ms)^```\n(scaled loss.*?)^```", PAGES["inside"].read_text()
    )
    assert shown in lines


def private_names():
    """Yields what the package uses that TensorFlow and Keras do not publish."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    known = {getattr(node, "name", None) for node in nodes}
    known |= {
        getattr(node, "attr", getattr(node, "id", None))
        for node in nodes
        if isinstance(getattr(node, "ctx", None), ast.Store)
    }
    # Ours, set in other ways; Python's, TensorFlow Privacy's and torch's; what keys of
    # Keras's logs end with.
    known |= {"_built_for", "_asked_class", "_getframe", "_was_dp_gradients_called"}
    known |= {"_growth_tracker", "_hysteresis_tracker", "_asdict", "_by_position"}
    known |= {"_applied_steps", "_loss", "_judge", "_adjust", "_self_unconditional_"}
    for node in nodes:
        module = getattr(node, "module", None) or ""
        if module.startswith("tensorflow.python"):
            yield from (each.name for each in node.names)
        name = getattr(node, "attr", getattr(node, "value", None))
        if isinstance(name, str) and re.fullmatch(r"_(?!lossscale)[a-zA-Z]\w*", name):
            yield from {name} - known


def test_each_private_name_is_listed_with_the_harm_if_it_goes():
    found = set(private_names())
    assert len(found) >= 20
    names, _, harms = zip(*PRIVATE_NAMES)
    assert found <= set(re.findall(r"\w+", " ".join(names)))
    assert all(harms)


def test_what_to_change_names_files_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split("## What you want to change, and where")[1].split("\n## ")[0]
    files = re.findall(r"`([a-z0-9_/]+\.py)`", section)
    assert len(files) >= 20
    for file in files:
        assert (PACKAGE / file).is_file() or (ROOT / file).is_file(), file


def test_pages_show_pictures_that_are_there():
    linked = {
        Path(link).name
        for path in (README, *PAGES.values())
        for link in pages.links(path)
        if "_pictures/" in link
    }
    assert {path.name for path in (DOCS / "_pictures").iterdir()} == linked


@pytest.mark.slow
def test_the_pictures_show_what_the_pages_and_the_library_say():
    """`python docs/pictures.py NAME` draws what fails here."""
    pytest.importorskip("matplotlib")
    if not IS_NEWEST:
        pytest.skip("the newest version draws them")
    printed(DOCS / "pictures.py", "--check", PYTHONPATH=str(ROOT))


def test_each_public_name_has_one_entry_in_the_api_reference(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    found, docstrings = [], importlib.import_module("docstrings")
    for path in (DOCS / "api").glob("*.md"):
        module = ""
        page = docstrings.filled(path.read_text(), docstrings.loss_scales(lossscale))
        for kind, name in re.findall(r"(?m)^\.\. (\w+):: ([\w.]+)", page):
            if kind in ("currentmodule", "automodule"):
                module = name
            found.append(name if kind == "automodule" else f"{module}.{name}")
    ours = [f"lossscale.{name}" for name in lossscale.__all__]
    assert sorted(name for name in found if name in ours) == sorted(ours)


def test_each_defect_of_the_table_has_a_test():
    table = (DOCS / "reliability.md").read_text()
    rows = re.findall(r"(?m)^\| (\d+) \| .* \| .* \| .* \|$", table)
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    marked = {row for each in texts for row in re.findall(r"defect\((\d+)\)", each)}
    assert marked == {*rows}
